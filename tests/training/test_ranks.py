"""One replayed rollout gives one loss, one gradient and one set of weights, however many ranks train on it."""

from functools import cache

import pytest
import torch
from rank_cases import nan_on_one_rank, no_signal, refused, replay_many, speak
from rank_pool import RankPool

from limes.config import load_config
from limes.config.parallel import RankLayout, lay_out
from limes.training.ranks import Ranks

pytestmark = pytest.mark.slow

EXACT, SINGLE = torch.float64, torch.float32
METHODS = {
    "grpo": {},
    "reinforce_plus_plus": {"algorithm": {"advantage_estimator": "reinforce_plus_plus"}},
    "ppo": {"algorithm": {"advantage_estimator": "ppo"}},
}
LAYOUTS = [
    (1, 2, 1, 1),
    (2, 1, 1, 1),
    (1, 1, 2, 1),
    (1, 1, 1, 2),
    (1, 4, 1, 1),
    (2, 2, 1, 1),
    (1, 1, 4, 1),
    (1, 1, 1, 4),
    (1, 2, 2, 1),
    (1, 2, 1, 2),
    (1, 1, 2, 2),
]
HARD = [
    ("given answers", {"algorithm": {"loss": "sft"}, "rollout": {"n_samples_per_prompt": 1, "batch_size": 12}}),
    ("whitened", {"algorithm": {"advantage_estimator": "reinforce_plus_plus_baseline"}}),
    ("gspo", {"algorithm": {"policy_loss": "gspo", "aggregation": "sequence_mean", "entropy_coef": 0.1}}),
    (
        "rejected",
        {"algorithm": {"correction": "mis", "correction_low": 0.0, "correction_high": 1.0, "rejected_tokens": "leave"}},
    ),
    ("steps", {"trainer": {"num_steps_per_rollout": 3, "gradient_checkpointing": True}}),
    ("reference", {"algorithm": {"kl_loss_coef": 0.3, "ref_update_interval": 1}}),
    ("kl in reward", {"algorithm": {"advantage_estimator": "ppo", "kl_coef": 0.3, "lambd": 0.9}}),
]


def layout_of(sizes: tuple[int, ...]) -> RankLayout:
    return RankLayout(*sizes)


@cache
def alone(name: str, how: str, dtype: torch.dtype) -> tuple:
    sections = METHODS[name] if name in METHODS else dict(HARD)[name]
    return replay_many(Ranks.alone(), [(sections, how, dtype, {})])[0]


def assert_same(found: tuple, wanted: tuple, tolerance: float, weights: float) -> None:
    metrics, tensors = found
    wanted_metrics, wanted_tensors = wanted
    for own, other in zip(metrics, wanted_metrics, strict=True):
        assert set(own) == set(other)
        for name in own:
            if not name.startswith("perf/"):
                assert own[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), name
    assert list(tensors) == list(wanted_tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, wanted_tensors[name], rtol=weights, atol=weights, msg=name)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_any_layout_gives_the_same_metrics_and_weights(pool: RankPool, sizes: tuple[int, ...]) -> None:
    layout = layout_of(sizes)
    names = (
        list(METHODS) if layout.size == 2 else ["reinforce_plus_plus"]
    )  # four processes on two cores take their time
    cases = [(METHODS[name], "turn", EXACT, {}) for name in names]
    for found in pool.run(layout, replay_many, cases):
        for name, one in zip(names, found, strict=True):
            assert_same(one, alone(name, "turn", EXACT), 1e-10, 1e-10)


@pytest.mark.parametrize("sizes", [(1, 2, 1, 1), (1, 1, 2, 2)], ids=str)
def test_single_precision_agrees_to_its_own(pool: RankPool, sizes: tuple[int, ...]) -> None:
    cases = [(sections, "turn", SINGLE, {}) for sections in METHODS.values()]
    for found in pool.run(layout_of(sizes), replay_many, cases):
        for name, (metrics, _) in zip(METHODS, found, strict=True):
            wanted, _ = alone(name, "turn", SINGLE)
            for key in ("train/loss", "train/grad_norm"):
                assert metrics[0][key] == pytest.approx(wanted[0][key], rel=1e-6, abs=1e-6), (name, key)


@pytest.mark.parametrize(
    ("sizes", "how", "hard"),
    [((1, 2, 1, 1), "empty", HARD), ((1, 2, 2, 1), "empty", HARD[:2]), ((2, 1, 1, 2), "one", HARD[-1:])],
    ids=["two", "four, empty", "four, one"],
)
def test_uneven_and_empty_shards_change_nothing(
    pool: RankPool, sizes: tuple[int, ...], how: str, hard: list[tuple[str, dict]]
) -> None:
    cases = [(sections, how, EXACT, {}) for _, sections in hard]
    for found in pool.run(layout_of(sizes), replay_many, cases):
        for (name, _), one in zip(hard, found, strict=True):
            assert_same(one, alone(name, "turn", EXACT), 1e-9, 1e-9)


@pytest.mark.parametrize("options", [{"family": "qwen3"}, {"family": "qwen2", "tied": False}], ids=str)
def test_norms_of_heads_biases_and_untied_heads(pool: RankPool, options: dict) -> None:
    case = ({}, "turn", EXACT, options)
    wanted = replay_many(Ranks.alone(), [case])[0]
    for sizes in ((1, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2)):
        for found in pool.run(layout_of(sizes), replay_many, [case]):
            assert_same(found[0], wanted, 1e-10, 1e-10)


def test_a_gradient_that_is_not_finite_on_one_rank_moves_nothing_on_any(pool: RankPool) -> None:
    for sizes in ((1, 2, 1, 1), (2, 1, 1, 2), (1, 1, 2, 2)):
        layout = layout_of(sizes)
        for metrics, stood_still, num_steps in pool.run(layout, nan_on_one_rank, layout.size - 1):
            assert metrics["train/nonfinite_grads"] == 1
            assert stood_still
            assert num_steps == 0


def test_equal_rewards_skip_on_every_rank(pool: RankPool) -> None:
    for metrics in pool.run(layout_of((1, 2, 1, 2)), no_signal):
        assert metrics["train/skipped"] == 1


def test_what_ranks_tell_each_other(pool: RankPool) -> None:
    found = pool.run(layout_of((2, 1, 1, 2)), speak)
    places = [place for place, *_ in found]
    assert places == [
        (0, 0, 0, 0, 0, True),
        (0, 0, 1, 0, 0, False),
        (1, 0, 0, 0, 1, True),
        (1, 0, 1, 0, 1, False),
    ]
    for rank, (_, total, gathered, most, told, error) in enumerate(found):
        assert total == 3.0  # data-parallel ranks alone
        assert gathered == ([0, 2] if rank % 2 == 0 else [1, 3])
        assert most == 3
        assert told == ("rank 0", 0.0)
        assert error == "work failed on 1 of 4 ranks; rank 3: disk full"
    for _, total, gathered, *_ in pool.run(layout_of((1, 1, 2, 1)), speak):
        assert (total, len(gathered)) == (1.0, 1)


def test_tensor_parallelism_that_does_not_divide_is_refused_with_the_numbers(pool: RankPool) -> None:
    for sizes, options, said in [
        ((1, 1, 1, 4), {"num_kv_heads": 2}, "= 4 does not divide the 2 key-value heads of the model; use one of 1, 2"),
        (
            (1, 1, 1, 3),
            {"num_kv_heads": 4},
            "= 3 does not divide the 4 attention heads of the model; use one of 1, 2, 4",
        ),
    ]:
        for error in pool.run(layout_of(sizes), refused, options):
            assert error == f"trainer.tensor_model_parallel_size {said}"


def test_layouts_that_do_not_divide_the_ranks_are_refused_with_the_numbers() -> None:
    many = {"cluster": {"kind": "ray", "actor_num_gpus_per_node": 6}}
    trainer = {"tensor_model_parallel_size": 2, "context_parallel_size": 2}
    with pytest.raises(ValueError, match="= 4 does not divide the 6 ranks of the trainer; use a multiple of 4"):
        load_config(None, {**many, "rollout": {"num_rollout": 1}, "trainer": trainer})
    with pytest.raises(ValueError, match=r"trainer\.context_parallel_size = 2 needs several ranks"):
        load_config(None, {"rollout": {"num_rollout": 1}, "trainer": {"context_parallel_size": 2}})
    config = load_config(None, {**many, "rollout": {"num_rollout": 1}, "trainer": {"dp_replicate_size": 3}})
    assert lay_out(6, config.trainer) == RankLayout(3, 2, 1, 1)
