"""Words and numbers of whole runs: every metric that is declared is written, one of a thing is no plural."""

import json
import re
from pathlib import Path

import pytest

from limes.config import batch_algebra
from limes.config.reward import RewardConfig
from limes.evaluate import run_eval
from limes.run import read_metrics
from limes.run.metrics import METRICS
from limes.train import run_train

pytestmark = pytest.mark.slow

PLURAL_OF_ONE = re.compile(r"(?<![\d.])1 (?:[a-z-]+ )?(?:rollout|prompt|answer|sample|step|token|group|kind)s\b")


def test_every_declared_metric_is_written_by_some_run(settings, place: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "say 1"}, {"role": "assistant", "content": "1"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    runs = {
        "corrected": {
            "algorithm__correction": "tis",
            "algorithm__eps_clip_c": 3.0,
            "algorithm__use_opsm": True,
            "trainer__num_steps_per_rollout": 2,
            "algorithm__kl_loss_coef": 0.1,
            "teacher__path": str(place / "model"),
            "eval__interval": 1,
        },
        "decoupled": {"algorithm__use_decoupled_loss": True, "trainer__num_steps_per_rollout": 2},
        "critic": {"algorithm__advantage_estimator": "ppo"},
        "skipped": {"reward__kind": "tiny_graders:equal"},
        "given": {
            "algorithm__loss": "sft",
            "reward__kind": RewardConfig().kind,
            "data__prompt_data": str(tmp_path / "chat.jsonl"),
            "data__input_key": "messages",
            "data__label_key": "",
            "rollout__batch_size": 1,
            "rollout__n_samples_per_prompt": 1,
            "eval__interval": 1,
        },
    }
    written = set()
    for name, options in runs.items():
        assert run_train(settings(run__name=name, **({"rollout__num_rollout": 1} | options))) == 0
        for line in read_metrics(tmp_path / "runs" / name / "metrics.jsonl"):
            written |= {re.sub(r"(pass_at_)\d+$", r"\1k", key) for key in line}
    assert set(METRICS) - written == set()


def test_one_of_a_thing_is_no_plural(settings, place: Path, capsys: pytest.CaptureFixture) -> None:
    one = settings(
        run__num_shown_samples=1,
        data__prompt_data=f"{place / 'data.jsonl'}@[0:1]",
        rollout__num_rollout=1,
        rollout__batch_size=1,
        rollout__n_samples_per_prompt=1,
        rollout__max_response_len=1,
        algorithm__singletons="raw",
        eval__num_prompts=1,
        eval__interval=1,
    )
    assert run_train(one) == 0
    told = capsys.readouterr()
    algebra = "\n".join(" ".join(row) for row in batch_algebra(one.config, 1).rows())
    text = "\n".join([told.out, told.err, algebra])
    assert "1 rollout of 1 prompt x 1 answer (1 sample in 1 optimizer step), 1 rollout an epoch" in text
    assert PLURAL_OF_ONE.findall(text) == []


def test_an_evaluation_alone_comes_before_no_rollout(settings, capsys: pytest.CaptureFixture) -> None:
    assert run_eval(settings(rollout__num_rollout=0)) == 0
    told = capsys.readouterr().err
    assert "evaluate: started" in told
    assert "\nevaluation: reward" in told
    assert "rollout 0" not in told


def test_spans_know_their_rollout_and_no_other_number(settings, tmp_path: Path) -> None:
    assert run_train(settings(run__name="a", run__num_shown_samples=2, eval__interval=1, rollout__num_rollout=1)) == 0
    about: dict[str, set] = {}
    for line in (tmp_path / "runs" / "a" / "spans.jsonl").read_text().splitlines():
        span = json.loads(line)
        about.setdefault(span["name"], set()).add(span.get("rollout_id"))
    assert about["rollout.show_samples"] == {None}
    assert about["rollout.eval"] == {0, 1}
    of_rollout = {"rollout.generate", "rollout.save", "actor.train", "actor.save_model"}
    assert {name: about[name] for name in of_rollout} == {name: {0} for name in of_rollout}


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ("nowhere", r"nowhere': no such folder; name one such as runs/<name>/checkpoints/000010"),
        ("runs/a", r"runs/a': not a checkpoint; did you mean .*/runs/a/checkpoints/000000\?"),
        ("runs/a/checkpoints", r"checkpoints': not a checkpoint; did you mean .*/000000\?"),
        ("runs/a/checkpoints/000007", r"000007': no such folder; did you mean .*/000000\?"),
        ("runs/a/checkpoints/000000", r"is from after rollout 0 .*nothing is left to do"),
        ("torn", r"torn: not a checkpoint, it lacks model, optimizer\.safetensors, trainer\.json"),
    ],
)
def test_a_checkpoint_that_cannot_be_gone_on_from_is_refused_before_anything_is_loaded(
    settings, tmp_path: Path, inside: str, message: str
) -> None:
    whole = tmp_path / "runs" / "a" / "checkpoints" / "000000"
    for folder in (whole, tmp_path / "torn"):
        folder.mkdir(parents=True)
        (folder / "rollout.json").write_text('{"rollout_id": 0, "cursor": {}}')
    changes = {"model__path": "/no/model/is/looked/for", "data__prompt_data": "nor/data.jsonl", "run__name": "b"}
    num_rollout = 1 if inside.endswith("000000") else 9
    wrong = settings(checkpoint__load=str(tmp_path / inside), rollout__num_rollout=num_rollout, **changes)
    with pytest.raises(ValueError, match=message):
        run_train(wrong)
    assert not (tmp_path / "runs" / "b").exists()
