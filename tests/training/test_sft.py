"""Supervised fine-tuning in the trainer: the cross-entropy of given tokens, however the batch is cut."""

import copy
import math

import pytest
import torch
from training_cases import exact_policy, make_config, parameters_after, worker_for

from limes.data.conversations import MESSAGE_WEIGHT
from limes.records import Sample, Status
from limes.rollout.sft import supervised_shards
from limes.training.forward import PackedForward
from limes.training.sft import SftObjective, sft_batch

SFT = {"loss": "sft"}
WEIGHTS = (1.0, 0.5, 2.0, 1.0, 3.0, 0.25)


def answers() -> list[Sample]:
    """Answers with weights; the second of each conversation begins with all of the first."""
    samples = []
    for index, weight in enumerate(WEIGHTS):
        conversation, turn = divmod(index, 2)
        first = [3, 10 + conversation, 2, 4, 30, 31 + conversation, 2]
        tokens = first if turn == 0 else [*first, 3, 12, 2, 4, 40, 41, 42 + conversation, 2]
        length = (3, 4)[turn]
        samples.append(
            Sample(
                index,
                conversation,
                tokens=tokens,
                response_length=length,
                loss_mask=[1] * length,
                rollout_log_probs=[math.nan] * length,
                weight_versions=[0] * length,
                status=Status.COMPLETED,
                metadata={MESSAGE_WEIGHT: weight},
            )
        )
    return samples


def config_of(aggregation: str = "token_mean", **trainer: object):
    rollout = {"batch_size": 4, "n_samples_per_prompt": 1}
    return make_config(algorithm=SFT | {"aggregation": aggregation}, rollout=rollout, trainer={"lr": 1e-2} | trainer)


def cross_entropy(policy, samples: list[Sample], aggregation: str) -> torch.Tensor:
    """The same loss by transformers' own forward and torch's cross-entropy, a sample at a time."""
    from tiny import tiny_model

    plain = tiny_model(dtype=torch.float64)
    plain.load_state_dict(policy.model.state_dict())
    sums, counts = [], []
    for sample in samples:
        logits = plain(input_ids=torch.tensor([sample.tokens])).logits[0]
        start = sample.prompt_length
        losses = torch.nn.functional.cross_entropy(
            logits[start - 1 : -1], torch.tensor(sample.tokens[start:]), reduction="none"
        )
        sums.append(losses.sum() * sample.metadata[MESSAGE_WEIGHT])
        counts.append(len(losses))
    if aggregation == "token_mean":
        return torch.stack(sums).sum() / sum(counts)
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    return torch.stack(means).mean()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_the_loss_is_transformers_cross_entropy(aggregation: str) -> None:
    policy, samples = exact_policy(), answers()
    config = config_of(aggregation)
    expected = float(cross_entropy(policy, samples, aggregation).detach())
    report = worker_for(policy, config).train(0, supervised_shards(0, samples)[0])
    assert report["train/loss"] == pytest.approx(expected, rel=1e-12)
    assert report["train/nll"] > 0
    assert "train/logprob_abs_diff" not in report
    assert "train/ess" not in report
    assert "train/skipped" not in report


def gradient(config, shards) -> tuple[float, torch.Tensor]:
    """Loss and gradient of one step over the parts that ranks would have, each cut into micro-batches."""
    policy = exact_policy()
    objective = SftObjective(config)
    forward = PackedForward(policy, temperature=1.0, head_chunk=5, share_prefixes=config.trainer.share_prefixes)
    loss = 0.0
    for shard in shards:
        batch = sft_batch(shard, policy.device)
        total = objective.total([n for n in shard.num_trained_tokens if n], batch)
        for indices in worker_for(policy, config)._cut(batch):
            part = batch.select(indices)
            result = objective(part, forward(part.samples), total)
            result.loss.backward()
            loss += float(result.loss.detach())
    return loss, torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
@pytest.mark.parametrize("cut", [{"max_tokens_per_micro_batch": 1}, {"share_prefixes": False}, {}])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_neither_loss_nor_gradient_depends_on_the_cut(aggregation: str, cut: dict, num_ranks: int) -> None:
    whole = gradient(config_of(aggregation), supervised_shards(0, answers()))
    parts = gradient(config_of(aggregation, **cut), supervised_shards(0, answers(), num_ranks))
    assert parts[0] == pytest.approx(whole[0], rel=1e-10)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-9, atol=1e-10)


def test_the_order_of_answers_is_irrelevant() -> None:
    whole = gradient(config_of(), supervised_shards(0, answers()))
    turned = gradient(config_of(), supervised_shards(0, answers()[::-1]))
    torch.testing.assert_close(turned[1], whole[1], rtol=1e-9, atol=1e-10)


def test_several_steps_need_no_old_log_probs() -> None:
    policy = exact_policy()
    before = parameters_after(policy)
    worker = worker_for(policy, config_of(num_steps_per_rollout=2))
    worker.train(0, supervised_shards(0, answers())[0])
    assert worker.num_steps_done == 2
    assert not torch.equal(parameters_after(policy), before)


def test_weights_pull_and_the_denominator_counts_tokens() -> None:
    samples = answers()
    doubled = copy.deepcopy(samples)
    for sample in doubled:
        sample.metadata[MESSAGE_WEIGHT] *= 2
    single, double = (gradient(config_of(), supervised_shards(0, part)) for part in (samples, doubled))
    assert double[0] == pytest.approx(2 * single[0], rel=1e-12)
    torch.testing.assert_close(double[1], 2 * single[1], rtol=1e-10, atol=1e-12)
