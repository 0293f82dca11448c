"""Checkpoints, loading and hand-over of a model on many ranks."""

from pathlib import Path

import pytest
import torch
from rank_cases import RESUMED, load_folder, source_of, train_and_save
from rank_pool import RankPool
from tiny import save_tiny, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from limes.config.parallel import RankLayout
from limes.run import read_train_records
from limes.training.parallel import checkpoint
from limes.training.parallel.boxes import Box, Part, PartsReader, save_parts
from limes.training.ranks import Ranks

pytestmark = pytest.mark.slow

ALONE = RankLayout()


def run(pool: RankPool, layout: RankLayout, function, *args):
    """What the first rank, or this process alone, gives."""
    return function(Ranks.alone(), *args) if layout == ALONE else pool.run(layout, function, *args)[0]


@pytest.mark.parametrize("tied", [True, False])
def test_any_number_of_ranks_goes_on_from_any(pool: RankPool, tmp_path: Path, tied: bool) -> None:
    assert RESUMED["algorithm"]["ref_update_interval"] == 1  # the reference is in the checkpoint too
    options = {"tied": tied}
    chains = {
        "ranks": [RankLayout(1, 2, 1, 1), ALONE, RankLayout(1, 2, 1, 2)],
        "others": [RankLayout(1, 1, 2, 2), RankLayout(2, 2, 1, 1), ALONE],
    }
    for name in ("straight", *chains):
        (tmp_path / name).mkdir()
    wanted = train_and_save(Ranks.alone(), tmp_path / "straight", 0, 3, torch.float64, options)
    for name, layouts in chains.items() if tied else [("ranks", chains["ranks"])]:
        for start, layout in enumerate(layouts):
            found = run(pool, layout, train_and_save, tmp_path / name, start, start + 1, torch.float64, options)
        assert list(found) == list(wanted)
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, wanted[key], rtol=1e-9, atol=1e-9, msg=key)
    straight, ranks = (read_train_records(tmp_path / name, 0) for name in ("straight", "ranks"))
    assert straight.keys() == ranks.keys()
    for index, record in straight.items():
        assert record.advantages == pytest.approx(ranks[index].advantages, abs=1e-9)
        assert record.log_probs == pytest.approx(ranks[index].log_probs, abs=1e-9)


def test_straight_and_resumed_are_the_same_bits_on_the_same_ranks(pool: RankPool, tmp_path: Path) -> None:
    layout = RankLayout(1, 2, 1, 1)
    straight = pool.run(layout, train_and_save, tmp_path, 0, 2, torch.float32, {})[0]
    pool.run(layout, train_and_save, tmp_path, 0, 1, torch.float32, {})
    resumed = pool.run(layout, train_and_save, tmp_path, 1, 2, torch.float32, {})[0]
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_a_checkpoint_of_many_ranks_is_a_model_folder_of_transformers(pool: RankPool, tmp_path: Path) -> None:
    weights = pool.run(RankLayout(1, 2, 1, 2), train_and_save, tmp_path, 0, 1, torch.float32, {})[0]
    folder = tmp_path / "1" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.float32
    assert type(model).__name__ == "LlamaForCausalLM"
    named = dict(model.named_parameters())
    assert {name for name in weights if not name.startswith("critic.")} == set(named)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in named.items())
    assert AutoTokenizer.from_pretrained(folder).chat_template
    (tmp_path / "1" / "optimizer-00002-of-00004.safetensors").unlink()
    with pytest.raises(AssertionError, match="it has 3 of the 4 optimizer files"):
        pool.run(RankLayout(1, 2, 1, 1), train_and_save, tmp_path, 1, 2, torch.float32, {})
    with pytest.raises(ValueError, match="it has 3 of the 4 optimizer files"):
        train_and_save(Ranks.alone(), tmp_path, 1, 2, torch.float32, {})


def test_large_models_are_written_into_several_files(tmp_path: Path) -> None:
    model = tiny_model(tied=False)
    model.config.save_pretrained(tmp_path)
    checkpoint.write_weights(tmp_path, model.named_parameters(), max_bytes=20_000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


@pytest.mark.parametrize("options", [{"tied": True}, {"family": "qwen3", "tied": False}], ids=str)
def test_rank_0_loads_and_hands_out(pool: RankPool, tmp_path: Path, options: dict) -> None:
    save_tiny(tmp_path, num_kv_heads=4, **options)
    wanted, _, scores = load_folder(Ranks.alone(), tmp_path, {"dtype": "float32"})
    for sizes in ((1, 2, 1, 1), (2, 1, 1, 2)):
        whole: dict[int, torch.Tensor] = {}
        for weights, dtype, own in pool.run(RankLayout(*sizes), load_folder, tmp_path, {"dtype": "float32"}):
            assert dtype == torch.float32
            assert list(weights) == list(wanted)
            assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
            whole |= own
        assert whole.keys() == scores.keys()
        for index, values in whole.items():
            torch.testing.assert_close(values, scores[index], rtol=1e-5, atol=1e-5)


def test_short_types_compute_short_and_keep_wide_masters(pool: RankPool, tmp_path: Path) -> None:
    save_tiny(tmp_path, num_kv_heads=4)
    short = {"dtype": "bfloat16"}
    _, _, scores = load_folder(Ranks.alone(), tmp_path, short)
    for weights, dtype, own in pool.run(RankLayout(1, 1, 1, 2), load_folder, tmp_path, short):
        assert dtype == torch.bfloat16
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
        for index, values in own.items():
            torch.testing.assert_close(values, scores[index], rtol=0.05, atol=0.3)


def test_a_folder_that_cannot_be_loaded_is_named_with_the_rank(pool: RankPool, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    for error in pool.run(RankLayout(1, 2, 1, 1), load_folder, tmp_path, {}):
        assert error.startswith(f"loading model.path = {tmp_path} failed on 1 of 2 ranks; rank 0: ")


@pytest.mark.parametrize("bucket_bytes", [1, 5_000, 1 << 30])
def test_hand_over_gives_whole_tensors_on_every_rank(pool: RankPool, bucket_bytes: int) -> None:
    specs, wanted = source_of(Ranks.alone(), torch.float64, bucket_bytes)
    for found_specs, found in pool.run(RankLayout(1, 2, 1, 2), source_of, torch.float64, bucket_bytes):
        assert found_specs == specs
        assert list(found) == list(wanted)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-10, atol=1e-10, msg=name)


def test_parts_are_read_back_whichever_way_they_were_cut(tmp_path: Path) -> None:
    whole = torch.arange(35.0).view(7, 5)
    cut = [((0, 3), (0, 2)), ((3, 7), (0, 2)), ((0, 7), (2, 5))]
    for i, bounds in enumerate(cut):
        part = Box(bounds).within(whole)
        save_parts(tmp_path / f"{i}.safetensors", {"w": Part(part, Box(bounds), (7, 5)), "none": Part.whole(part[:0])})
    with PartsReader(sorted(tmp_path.iterdir())) as reader:
        assert reader.shapes == {"w": (7, 5)}
        assert torch.equal(reader.read("w"), whole)
        assert torch.equal(reader.read("w", Box(((2, 5), (1, 4)))), whole[2:5, 1:4])
    with (
        PartsReader([tmp_path / "0.safetensors"]) as reader,
        pytest.raises(ValueError, match="w: the files hold 6 of the 35 numbers"),
    ):
        reader.read("w")
