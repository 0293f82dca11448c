"""Supervised fine-tuning of a tiny model through the whole system."""

import json
from pathlib import Path

import pytest
import torch
from tiny import save_tiny, tiny_model

from limes.config import Resolved, load_config
from limes.evaluate import run_eval
from limes.run import read_metrics, read_samples, read_train_records
from limes.train import run_train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    save_tiny(folder / "model")
    rows = []
    for letter, other in ("ab", "bc", "cd", "da"):
        messages = [{"role": "user", "content": letter}, {"role": "assistant", "content": other * 3}]
        messages += [{"role": "user", "content": "again"}, {"role": "assistant", "content": other, "weight": 0.5}]
        rows.append({"messages": messages})
    rows.append({"messages": [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y"}]})
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def settings(place: Path, tmp_path: Path):
    def make(**values: object) -> Resolved:
        base = {
            "model.path": str(place / "model"),
            "data.prompt_data": str(place / "data.jsonl"),
            "data.input_key": "messages",
            "data.label_key": "",
            "algorithm.loss": "sft",
            "rollout.num_rollout": 3,
            "rollout.batch_size": 2,
            "rollout.n_samples_per_prompt": 1,
            "rollout.max_response_len": 8,
            "eval.temperature": 0.0,
            "trainer.lr": 3e-3,
            "run.dir": str(tmp_path / "runs"),
            "run.num_shown_samples": 0,
        }
        named = {name.replace("__", "."): value for name, value in values.items()}
        return Resolved(load_config(None, base | named), {})

    return make


def numbers_of(run: Path) -> list[dict]:
    """Metrics of each step, merged."""
    steps: dict[int, dict] = {}
    for line in read_metrics(run / "metrics.jsonl"):
        steps.setdefault(line["step"], {}).update(line)
    return [steps[step] for step in sorted(steps)]


def plain_loss(folder: Path, samples) -> float:
    """transformers' forward in float64, token by token, weighted by message."""
    model = tiny_model(dtype=torch.float64)
    from transformers import AutoModelForCausalLM

    model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict())
    total, num = 0.0, 0
    for sample in samples:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([sample.tokens])).logits[0]
        start = sample.prompt_length
        targets = torch.tensor(sample.tokens[start:])
        loss = torch.nn.functional.cross_entropy(logits[start - 1 : -1], targets, reduction="sum")
        total += float(loss) * sample.metadata["message_weight"]
        num += len(targets)
    return total / num


def test_a_run_trains_on_the_answers_of_the_data(settings, place: Path, tmp_path: Path, capsys) -> None:
    assert run_train(settings(run__name="a", eval__interval=2)) == 0
    run = tmp_path / "runs" / "a"
    steps = numbers_of(run)
    samples = read_samples(run / "rollouts", 0)
    assert steps[0]["train/loss"] == pytest.approx(plain_loss(place / "model", samples), rel=1e-5)
    assert [s["rollout/conversations"] for s in steps[:3]] == [2, 2, 2]
    assert [s["rollout/epoch"] for s in steps[:3]] == [0, 0, 1]
    assert steps[0]["eval/nll"] > steps[2]["eval/nll"]
    assert {s.metadata["message_weight"] for s in samples} == {1.0, 0.5}
    assert all(s.tokens[-1] == 2 and set(s.loss_mask) == {1} and s.reward is None for s in samples)
    assert read_train_records(run / "rollouts", 0).keys() == {s.index for s in samples}
    first_epoch = {s.group_index for r in (0, 1) for s in read_samples(run / "rollouts", r)}
    assert first_epoch == {0, 1, 2, 3}
    output = capsys.readouterr()
    assert "1 conversation left out for going over 256 tokens; none is cut" in output.err
    assert "nats/token" in output.out


def test_a_checkpoint_goes_on_as_if_nothing_was(settings, tmp_path: Path) -> None:
    assert run_train(settings(run__name="straight", checkpoint__save_interval=2)) == 0
    runs = tmp_path / "runs"
    checkpoint = runs / "straight" / "checkpoints" / "000001"
    assert run_train(settings(run__name="resumed", checkpoint__load=str(checkpoint))) == 0
    last, again = numbers_of(runs / "straight")[2], numbers_of(runs / "resumed")[0]
    assert again["step"] == 2
    for name in ("train/loss", "train/nll", "train/grad_norm", "rollout/tokens", "rollout/epoch"):
        assert again[name] == last[name], name
    weights = [
        (runs / name / "checkpoints" / "000002" / "model" / "model.safetensors").read_bytes()
        for name in ("straight", "resumed")
    ]
    assert weights[0] == weights[1]


def test_the_engine_gives_the_answers_that_were_learnt(settings, tmp_path: Path, capsys) -> None:
    learns = settings(
        run__name="b",
        rollout__num_rollout=None,
        rollout__num_epoch=60,
        rollout__batch_size=4,
        trainer__lr=1e-2,
        run__num_shown_samples=4,
    )
    assert run_train(learns) == 0
    run = tmp_path / "runs" / "b"
    losses = [step["train/nll"] for step in numbers_of(run)]
    assert losses[-1] < 0.05 < losses[0]
    after = capsys.readouterr().out.partition("answers after training:")[2]
    found = [line.split()[-1] for line in after.splitlines() if line.strip().startswith("answered")]
    assert found == ["b", "c", "d", "a"]
    checkpoint = str(run / "checkpoints" / "000059")
    again = settings(run__name="eval", model__path=checkpoint, rollout__num_rollout=0, run__num_shown_samples=1)
    assert run_eval(again) == 0
    assert "nats a token" in capsys.readouterr().out


def test_labels_are_answers_too(settings, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {i}", "label": str(i)} for i in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data__prompt_data": str(tmp_path / "pairs.jsonl"), "data__input_key": "prompt", "data__label_key": "label"}
    assert run_train(settings(run__name="c", rollout__num_rollout=1, **data)) == 0
    samples = read_samples(tmp_path / "runs" / "c" / "rollouts", 0)
    assert all(s.response_length == 2 and s.response in "0123" for s in samples)


def test_data_without_answers_is_refused_before_anything_runs(settings, tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")
    with pytest.raises(ValueError, match=r"row 0 of .*asked\.jsonl: it has no answer to learn"):
        run_train(settings(data__prompt_data=str(tmp_path / "asked.jsonl")))
