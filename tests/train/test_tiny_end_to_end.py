"""A tiny model through the whole system: engine, grader, trainer, checkpoints, the commands."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from limes.evaluate import run_eval
from limes.records import Sample, Status
from limes.run import read_metrics, read_samples, read_train_records
from limes.sampling import run_sample
from limes.train import run_train

pytestmark = pytest.mark.slow


def samples_of(run: Path, rollout_id: int) -> list[tuple]:
    return [(s.index, s.tokens, s.rollout_log_probs, s.reward) for s in read_samples(run / "rollouts", rollout_id)]


def test_a_run_learns_from_its_own_tokens_and_leaves_everything_behind(settings, tmp_path: Path) -> None:
    assert run_train(settings(run__name="a", eval__interval=2, run__num_shown_samples=2)) == 0
    run = tmp_path / "runs" / "a"
    lines = list(read_metrics(run / "metrics.jsonl"))
    assert [line["step"] for line in lines if "eval/reward_mean" in line] == [0, 2]
    for rollout_id in range(3):
        samples = {sample.index: sample for sample in read_samples(run / "rollouts", rollout_id)}
        records = read_train_records(run / "rollouts", rollout_id)
        assert records.keys() == samples.keys()
        assert {v for s in samples.values() for v in s.weight_versions} == {rollout_id + 1}
    assert max(line["train/logprob_abs_diff"] for line in lines if "train/logprob_abs_diff" in line) < 1e-5
    assert (run / "reward.png").exists()
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["000002"]


def test_the_same_seed_is_the_same_run_and_a_checkpoint_goes_on_as_if_nothing_was(settings, tmp_path: Path) -> None:
    assert run_train(settings(run__name="straight", rollout__num_rollout=3, checkpoint__save_interval=2)) == 0
    runs = tmp_path / "runs"
    checkpoint = runs / "straight" / "checkpoints" / "000001"
    assert run_train(settings(run__name="resumed", checkpoint__load=str(checkpoint))) == 0
    assert samples_of(runs / "resumed", 2) == samples_of(runs / "straight", 2)
    assert not (runs / "resumed" / "rollouts" / "000001.samples.jsonl").exists()


def test_a_finished_checkpoint_has_nothing_left_to_do(settings, tmp_path: Path) -> None:
    """U97."""
    assert run_train(settings(run__name="done", rollout__num_rollout=1)) == 0
    checkpoint = tmp_path / "runs" / "done" / "checkpoints" / "000000"
    with pytest.raises(ValueError, match=r"nothing is left to do; raise rollout\.num_rollout"):
        run_train(settings(run__name="again", rollout__num_rollout=1, checkpoint__load=str(checkpoint)))


def test_a_stop_token_that_the_model_does_not_know_is_refused_before_anything_is_sampled(settings) -> None:
    with pytest.raises(ValueError, match=r"rollout\.stop_token_ids holds 9999, and the model knows ids 0 \.\. 101"):
        run_train(settings(run__name="unknown", rollout__stop_token_ids=[9999]))


def test_equal_rewards_move_nothing(settings, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """All equal after a step that built momentum: the weights stay the same bits and the step says so."""
    assert run_train(settings(run__name="before", rollout__num_rollout=1)) == 0
    checkpoint = tmp_path / "runs" / "before" / "checkpoints" / "000000"
    resumed = settings(run__name="after", checkpoint__load=str(checkpoint), reward__kind="tiny_graders:equal")
    assert run_train(resumed) == 0
    after = tmp_path / "runs" / "after" / "checkpoints" / "000002"
    name = Path("model") / "model.safetensors"
    assert (after / name).read_bytes() == (checkpoint / name).read_bytes()
    assert "rollout 2: no signal" in capsys.readouterr().err


def test_broken_grading_costs_its_samples_and_nothing_else(settings, tmp_path: Path) -> None:
    assert run_train(settings(run__name="b", reward__kind="tiny_graders:broken", rollout__num_rollout=1)) == 0
    run = tmp_path / "runs" / "b"
    samples: list[Sample] = read_samples(run / "rollouts", 0)
    unscored = {sample.index for sample in samples if sample.reward is None}
    assert unscored == {1, 5, 9, 13}
    assert read_train_records(run / "rollouts", 0).keys() == {sample.index for sample in samples} - unscored
    assert all(sample.status in (Status.COMPLETED, Status.TRUNCATED) for sample in samples)
    metrics = next(line for line in read_metrics(run / "metrics.jsonl") if "rollout/grader_errors" in line)
    assert metrics["rollout/grader_errors/RuntimeError"] == 4


def test_over_sampling_with_a_filter_is_the_same_run_twice(settings, tmp_path: Path) -> None:
    """Timing of the engine's thread differs between the two; nothing else may."""
    options = {"rollout__over_sampling_batch_size": 6, "rollout__dynamic_sampling_filter": "nonzero_std"}
    for name in ("one", "two"):
        assert run_train(settings(run__name=name, **options)) == 0
    runs = tmp_path / "runs"
    for rollout_id in range(3):
        assert samples_of(runs / "one", rollout_id)[:16] == samples_of(runs / "two", rollout_id)[:16]


def test_evaluation_of_a_checkpoint_repeats_that_of_its_run(settings, tmp_path: Path, capsys) -> None:
    common = {"rollout__num_rollout": 2, "eval__interval": 2, "eval__n_samples_per_prompt": 2}
    assert run_train(settings(run__name="trained", **common)) == 0
    runs = tmp_path / "runs"
    folder = str(runs / "trained" / "checkpoints" / "000001")
    again = settings(run__name="eval", model__path=folder, **(common | {"rollout__num_rollout": 0}))
    assert run_eval(again, k=(1, 2)) == 0
    assert "pass@2" in capsys.readouterr().out
    first, second = (read_samples(runs / name / "rollouts", at, "eval") for name, at in (("trained", 2), ("eval", 0)))
    assert [s.tokens for s in first] == [s.tokens for s in second]


def test_eval_only_training_evaluates_the_checkpoint(settings, tmp_path: Path) -> None:
    assert run_train(settings(run__name="evalonly", rollout__num_rollout=0)) == 0
    run = tmp_path / "runs" / "evalonly"
    assert [file.name for file in (run / "rollouts").iterdir()] == ["000000.eval.jsonl"]
    assert list((run / "checkpoints").iterdir()) == []


def test_sampling_streams_one_answer_that_its_seed_decides(settings, capsys: pytest.CaptureFixture) -> None:
    answers = []
    for seed in (1, 1, 2):
        assert run_sample(settings(run__seed=seed, rollout__num_rollout=0), prompt="hello") == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]
    assert len(answers[0]) > 1


MOMENTS = ["load model", "evaluate before rollout 0: started", "generate rollout 0: started", " 0/200", " 3/200"]


@pytest.mark.parametrize(
    ("moment", "sent", "code"),
    [*((moment, signal.SIGINT, 130) for moment in MOMENTS)]
    + [(moment, signal.SIGTERM, 143) for moment in ("loading PyTorch", *MOMENTS[2:4])],
)
def test_ctrl_c_and_sigterm_leave_nothing_half_done(
    place: Path, tmp_path: Path, moment: str, sent: signal.Signals, code: int
) -> None:
    """One line, exit code 130 or 143, no half-written file, no process left."""
    command = [sys.executable, "-c", "import sys; from limes.cli import main; sys.exit(main())", "train"]
    flags = {
        "model.path": place / "model",
        "data.prompt_data": place / "data.jsonl",
        "rollout.num_rollout": 200,
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 4,
        "rollout.max_response_len": 12,
        "reward.kind": "math",
        "eval.interval": 1,
        "checkpoint.save_interval": 1,
        "run.dir": tmp_path,
        "run.name": "r",
        "run.num_shown_samples": 0,
    }
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    process = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if moment in line:
            break
    process.send_signal(sent)
    rest = process.stdout.read().splitlines()
    assert process.wait() == code
    assert sum("interrupted" in line for line in rest) == 1
    assert not any("Traceback" in line for line in rest)
    left = [path.name for path in tmp_path.rglob("*") if path.suffix in (".tmp", ".unfinished")]
    assert left == []
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
