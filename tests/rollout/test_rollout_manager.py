"""The rollout manager with a fake engine and grader on real prompts: rollouts, evaluation, memory, state, endings."""

import asyncio
import io
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from rollout_fakes import HANG, STOP, FakeEngine, FakeGrader, fake_sampler

from limes.config import Config, load_config
from limes.data import DataCursor, EncodedPrompt, EncodedPrompts
from limes.engine.protocol import EngineError, FinishReason, GenerateRequest, GenerateResult
from limes.records import Sample, Status
from limes.rollout import NoGroupsLeft, RolloutManager, manager
from limes.rollout.evaluation import EvalSet, default_ks, eval_seed
from limes.rollout.filters import load_filter
from limes.run import Console, read_samples

PROMPTS = [EncodedPrompt([100 + i, 7], f"prompt {i}", i, {}, row_index=i) for i in range(9)]
BASE = {"rollout.num_rollout": 5, "rollout.batch_size": 3, "rollout.n_samples_per_prompt": 2, "eval.num_prompts": 4}


class Stage:
    """A manager and everything around it."""

    def __init__(
        self, folder: Path, engine: FakeEngine | None = None, grader: FakeGrader | None = None, **overrides: object
    ) -> None:
        self.config: Config = load_config(None, BASE | overrides)
        self.engine = engine or FakeEngine()
        self.grader = grader or FakeGrader()
        self.err = io.StringIO()
        self.folder = folder
        self.cursor = DataCursor(
            EncodedPrompts(PROMPTS, 0, 2, "f", "p"),
            seed=self.config.run.seed,
            shuffle=True,
            n_samples_per_prompt=self.config.rollout.n_samples_per_prompt,
        )
        timeout = {"timeout_s": self.config.rollout.sample_timeout_s}
        n_samples = self.config.eval.n_samples_per_prompt
        self.manager = RolloutManager(
            self.config,
            engine=self.engine,
            grader=self.grader,
            sampler=fake_sampler(self.engine, self.grader, **timeout),
            eval_sampler=fake_sampler(self.engine, self.grader, purpose="eval", **timeout),
            cursor=self.cursor,
            keep=load_filter(self.config.rollout.dynamic_sampling_filter, reward_key=None, leave_out_truncated=False),
            questions=EvalSet(PROMPTS[:4], n_samples, default_ks(n_samples), eval_seed(self.config.run.seed)),
            samples_folder=folder,
            console=Console(out=io.StringIO(), err=self.err),
        )


@pytest.fixture
def stage(tmp_path: Path) -> Callable[..., Stage]:
    return lambda *args, **overrides: Stage(tmp_path, *args, **overrides)


def everything(samples: list[Sample]) -> list[tuple]:
    return [(s.index, s.group_index, s.tokens, s.rollout_log_probs, s.reward, s.label, s.status) for s in samples]


def test_a_rollout_is_a_shard_and_a_file_of_the_same_samples(stage: Callable[..., Stage]) -> None:
    s = stage()
    (shard,) = asyncio.run(s.manager.generate(3))
    assert (shard.rollout_id, len(shard.samples), shard.partition) == (3, 6, [0, 1, 2, 3, 4, 5])
    assert shard.group_ids == [0, 0, 1, 1, 2, 2]
    assert everything(read_samples(s.folder, 3)) == everything(shard.samples)


def test_what_the_engine_sampled_is_what_trains(stage: Callable[..., Stage]) -> None:
    """P6: ids and log-probs of every sampled token appear exactly once with mask 1."""
    sent: dict[int, GenerateResult] = {}

    class Recording(FakeEngine):
        async def generate(self, request, on_token=None):
            result = await super().generate(request)
            sent[request.key.sample_index] = result
            return result

    (shard,) = asyncio.run(stage(Recording()).manager.generate(0))
    trained = {
        position: (sample.response_tokens, sample.rollout_log_probs, sample.loss_mask)
        for position, sample in zip(shard.partition, shard.samples, strict=True)
    }
    assert trained == {p: (r.token_ids, r.log_probs, [1] * len(r.token_ids)) for p, r in sent.items()}
    assert shard.num_trained_tokens == [len(sent[p].token_ids) for p in range(6)]


def test_settings_shape_the_rewards_that_train_and_not_those_that_are_written(stage: Callable[..., Stage]) -> None:
    """U119: of 8 tokens allowed, answers of 8 that were cut and of 6 and 4 that ended, all with the reward 1."""
    lengths = {0: 8, 1: 6, 2: 4}

    def answer(request: GenerateRequest) -> list[int]:
        length = lengths[request.key.sample_index % 3]
        return [50] * length if length == 8 else [*[50] * (length - 1), STOP]

    overlong = {"rollout.max_response_len": 8, "algorithm.overlong_buffer": 4, "algorithm.overlong_penalty": 2.0}
    for truncated, cut in (("keep", -1.0), ("zero", -2.0), ("mask", None)):
        s = stage(FakeEngine(answer), FakeGrader(lambda sample: 1.0), **overlong, **{"algorithm.truncated": truncated})
        (shard,) = asyncio.run(s.manager.generate(0))
        assert shard.rewards == [cut, 0.0, 1.0] * 2
        assert {sample.reward for sample in read_samples(s.folder, 0)} == {1.0}


def test_several_ranks_share_a_rollout(stage: Callable[..., Stage]) -> None:
    shards = asyncio.run(stage().manager.generate(0, num_ranks=2))
    assert sorted(position for shard in shards for position in shard.partition) == list(range(6))
    for shard in shards:
        assert shard.partition
        assert [sample.group_index for sample in shard.samples] == [shard.group_ids[p] for p in shard.partition]


def test_every_prompt_is_used_once_an_epoch(stage: Callable[..., Stage]) -> None:
    """U88: 9 prompts x 2 samples are 18 generations an epoch."""
    s = stage()
    for rollout_id in range(3):
        asyncio.run(s.manager.generate(rollout_id))
    asked = [request.prompt_ids[0] for request in s.engine.requests]
    assert sorted(asked) == sorted(2 * [100 + i for i in range(9)])


def test_the_seed_reaches_the_engine(stage: Callable[..., Stage]) -> None:
    """U87: same run seed, same run; another seed, another run."""

    def run(seed: int) -> list[tuple]:
        (shard,) = asyncio.run(stage(**{"run.seed": seed, "data.shuffle": False}).manager.generate(0))
        return everything(shard.samples)

    assert run(1) == run(1)
    assert [line[2] for line in run(1)] != [line[2] for line in run(2)]


def test_dropped_groups_are_written_down_but_do_not_train(stage: Callable[..., Stage]) -> None:
    grader = FakeGrader(lambda sample: 1.0 if sample.group_index == 0 else float(sample.index % 2))
    s = stage(None, grader, **{"rollout.dynamic_sampling_filter": "nonzero_std"})
    (shard,) = asyncio.run(s.manager.generate(0))
    written = read_samples(s.folder, 0)
    assert sorted(set(shard.group_ids)) == [1, 2, 3]
    assert [sample.index for sample in written if sample.metadata.get("dropped")] == [0, 1]
    assert s.manager.report().metrics["rollout/dropped/all_rewards_1"] == 1


def test_a_filter_that_leaves_nothing_ends_the_rollout_with_its_reasons(stage: Callable[..., Stage]) -> None:
    """U37."""
    settings = {"rollout.dynamic_sampling_filter": "nonzero_std", "rollout.max_refill_rounds": 2}
    s = stage(None, FakeGrader(lambda sample: 1.0), **settings)
    with pytest.raises(NoGroupsLeft, match=r"dropped 6 groups and kept 0 of 3; reasons: all rewards 1: 6"):
        asyncio.run(s.manager.generate(0))


def test_failures_are_counted_and_explained(stage: Callable[..., Stage]) -> None:
    """U77."""
    engine = FakeEngine(answer=lambda r: EngineError("lost page") if r.key.sample_index == 1 else [11, STOP])
    s = stage(engine)
    (shard,) = asyncio.run(s.manager.generate(0))
    report = s.manager.report()
    assert shard.partition == [0, 2, 3, 4, 5]
    assert report.metrics["rollout/failed/EngineError"] == 1
    assert report.remarks[0] == "1 of 6 answers failed: 1 x EngineError: lost page"


def test_a_rollout_of_failures_goes_on_while_the_engine_lives(stage: Callable[..., Stage]) -> None:
    s = stage(FakeEngine(answer=lambda request: EngineError("flaky")))
    (shard,) = asyncio.run(s.manager.generate(0))
    assert shard.samples == []
    assert "nothing to train on" in s.manager.report().remarks[-1]


def test_a_dead_engine_ends_the_run_with_its_cause(stage: Callable[..., Stage]) -> None:
    engine = FakeEngine(answer=lambda request: EngineError("gone"))
    engine.error = "MemoryError: KV cache"
    s = stage(engine)
    with pytest.raises(EngineError, match="MemoryError: KV cache"):
        asyncio.run(s.manager.generate(0))
    with pytest.raises(EngineError, match="MemoryError: KV cache"):
        asyncio.run(s.manager.eval(0))


def test_progress_counts_finished_samples(stage: Callable[..., Stage]) -> None:
    s = stage()
    asyncio.run(s.manager.generate(0))
    assert "generate rollout 0: done, 6/6" in s.err.getvalue()


def test_evaluation_asks_each_prompt_n_times_and_reports_pass_at_k(stage: Callable[..., Stage]) -> None:
    right = {0: [1, 1], 1: [1, 0], 2: [0, 0], 3: [0, 0]}
    grader = FakeGrader(lambda sample: float(right[sample.group_index][sample.index % 2]))
    s = stage(None, grader, **{"eval.n_samples_per_prompt": 2})
    metrics = asyncio.run(s.manager.eval(4)).metrics
    assert (metrics["eval/prompts"], metrics["eval/samples"]) == (4, 8)
    assert metrics["eval/pass_at_1"] == metrics["eval/reward_mean"] == 3 / 8
    assert metrics["eval/pass_at_2"] == 0.5
    assert metrics["eval/pass_at_2_low"] < 0.5 < metrics["eval/pass_at_2_high"]
    assert [sample.label for sample in read_samples(s.folder, 4, "eval")] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_prompts_with_too_few_scored_answers_are_outside_pass_at_k(stage: Callable[..., Stage]) -> None:
    grader = FakeGrader(lambda sample: None if sample.index in (0, 2, 3) else 1.0)
    s = stage(None, grader, **{"eval.n_samples_per_prompt": 2})
    metrics = asyncio.run(s.manager.eval(0)).metrics
    assert (metrics["eval/pass_at_1"], metrics["eval/pass_at_2"], metrics["eval/unscored"]) == (1.0, 1.0, 3)


def test_evaluation_noise_is_its_own_and_the_same_each_time(stage: Callable[..., Stage]) -> None:
    s = stage()

    async def main() -> None:
        await s.manager.eval(0)
        await s.manager.generate(0)
        await s.manager.eval(1)

    asyncio.run(main())
    keys = [request.key for request in s.engine.requests]
    before, training, after = keys[:4], keys[4:10], keys[10:]
    assert before == after
    assert not {key.seed for key in before} & {key.seed for key in training}


def test_evaluation_moves_no_training_prompt(stage: Callable[..., Stage]) -> None:
    s = stage()
    asyncio.run(s.manager.eval(0))
    assert s.cursor.state_dict()["offset"] == 0


def test_shown_answers_are_the_same_questions_with_the_same_noise(stage: Callable[..., Stage]) -> None:
    s = stage()

    async def main() -> tuple[list[Sample], list[Sample]]:
        return await s.manager.show_samples(3), await s.manager.show_samples(3)

    first, second = asyncio.run(main())
    assert everything(first) == everything(second)
    assert [sample.label for sample in first] == [0, 1, 2]


@pytest.mark.parametrize("seed", range(50))
def test_evaluation_seeds_differ_from_run_seeds(seed: int) -> None:
    assert eval_seed(seed) > 50
    assert eval_seed(seed) < 2**31
    assert len({eval_seed(other) for other in range(51)}) == 51


def test_memory_goes_and_comes_back_in_order(stage: Callable[..., Stage]) -> None:
    s = stage()

    async def main() -> None:
        await s.manager.offload(["cuda_graph", "kv_cache"])
        await s.manager.offload(["kv_cache"])
        await s.manager.onload_weights()
        await s.manager.onload_kv()
        await s.manager.onload_kv()

    asyncio.run(main())
    assert s.engine.calls == [
        "offload ['cuda_graph', 'kv_cache']",
        "offload []",
        "onload ['kv_cache']",
        "onload ['cuda_graph']",
    ]
    assert s.engine.resident == {"weights", "kv_cache", "cuda_graph"}


def test_a_saved_manager_goes_on_with_the_same_prompts_and_answers(stage: Callable[..., Stage], tmp_path: Path) -> None:
    """Surplus prompts of over-sampling wait in the saved state too."""
    settings = {"rollout.over_sampling_batch_size": 5}

    async def straight() -> list[list[tuple]]:
        s = stage(**settings)
        return [everything((await s.manager.generate(i))[0].samples) for i in range(4)]

    async def resumed() -> list[list[tuple]]:
        first, second = stage(**settings), stage(**settings)
        found = [everything((await first.manager.generate(i))[0].samples) for i in range(2)]
        first.manager.save(1, tmp_path)
        assert second.manager.load(tmp_path) == 1
        return found + [everything((await second.manager.generate(i))[0].samples) for i in (2, 3)]

    assert asyncio.run(straight()) == asyncio.run(resumed())


def test_a_state_of_other_data_starts_over_and_says_so(stage: Callable[..., Stage], tmp_path: Path) -> None:
    """U94."""
    first, second = stage(), stage(**{"run.seed": 7})
    asyncio.run(first.manager.generate(0))
    first.manager.save(0, tmp_path)
    second.manager.load(tmp_path)
    assert second.cursor.state_dict()["offset"] == 0
    assert "seed was 42 and is 7" in second.err.getvalue()


@pytest.mark.parametrize("text", [None, "", "{}", '{"rollout_id": 3}', "[1]"])
def test_a_folder_without_state_is_refused_by_name(
    stage: Callable[..., Stage], tmp_path: Path, text: str | None
) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    if text is not None:
        (folder / "rollout.json").write_text(text)
    with pytest.raises(ValueError, match=r"checkpoint\.load = .*old.*no usable rollout\.json"):
        stage().manager.load(folder)


def test_disposing_ends_a_rollout_in_flight_and_closes_everything(stage: Callable[..., Stage]) -> None:
    s = stage(FakeEngine(answer=lambda request: HANG))

    async def main() -> None:
        rollout = asyncio.create_task(s.manager.generate(0))
        while len(s.engine.requests) < 6:
            await asyncio.sleep(0)
        await s.manager.dispose()
        async with asyncio.timeout(30):
            with pytest.raises(asyncio.CancelledError):
                await rollout

    asyncio.run(main())
    assert s.engine.calls[-1] == "close"
    assert s.engine.calls.count("close") == 1
    assert s.grader.closed == 1
    assert set(s.engine.aborted) == {request.request_id for request in s.engine.requests}
    assert not (s.folder / "000000.samples.jsonl").exists()


def test_disposing_closes_the_grader_though_the_engine_fails_to(stage: Callable[..., Stage]) -> None:
    class Stuck(FakeEngine):
        async def close(self) -> None:
            raise EngineError("thread is gone")

    s = stage(Stuck())
    with pytest.raises(EngineError, match="thread is gone"):
        asyncio.run(s.manager.dispose())
    assert s.grader.closed == 1


def test_disposing_does_not_wait_for_an_engine_in_a_long_step(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the middle of training: its thread ends alone, whatever it waits for, and nobody is kept."""
    step, ended = threading.Event(), threading.Event()

    class Busy(FakeEngine):
        async def close(self) -> None:
            await asyncio.to_thread(step.wait)
            ended.set()

    monkeypatch.setattr(manager, "BUSY_ENGINE_S", 0.01)
    s = stage(Busy())
    asyncio.run(s.manager.dispose())
    assert not ended.is_set()
    assert s.grader.closed == 1
    step.set()
    assert ended.wait(30)


def test_an_answer_that_the_engine_gave_up_does_not_train(stage: Callable[..., Stage]) -> None:
    class Giving(FakeEngine):
        async def generate(self, request, on_token=None):
            if request.key.sample_index == 2:
                return GenerateResult(request.request_id, [11], [-1.0], [0], FinishReason.ABORT)
            return await super().generate(request)

    s = stage(Giving())
    (shard,) = asyncio.run(s.manager.generate(0))
    assert 2 not in shard.partition
    assert read_samples(s.folder, 0)[2].status is Status.ABORTED
    assert s.manager.report().metrics["rollout/aborted"] == 1
