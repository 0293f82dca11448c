"""What the ranks of the tests do: replay one rollout through training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from critic_cases import ppo_config
from tiny import exact_rms_norm, tiny_model, tiny_tokenizer
from training_cases import NoEngine, make_config, make_shard, shard_of

from limes.config import Config
from limes.config.model import ModelConfig
from limes.models.policy import Policy, make_policy
from limes.models.value_head import ValueModel, make_value_model
from limes.records import TrainShard
from limes.training.critic import CriticWorker
from limes.training.forward import PackedForward
from limes.training.parallel import models
from limes.training.parallel.build import load_policy_on, weight_source
from limes.training.parallel.models import shard_policy, shard_value_model
from limes.training.parallel.sharding import whole_tensors
from limes.training.ranks import Ranks
from limes.training.worker import TrainWorker
from limes.weights.source import checked_tensors

KV_HEADS = 4  # tensor parallel over 4 ranks deals them out
STEPS = {"trainer": {"lr": 1e-2, "max_tokens_per_micro_batch": 60, "clip_grad": 0.5}}


def ranked_policy(dtype: torch.dtype, **options: Any) -> Policy:
    """The same on every rank."""
    model = tiny_model(dtype=dtype, **{"num_kv_heads": KV_HEADS, **options})
    return make_policy(model, tiny_tokenizer())


def ranked_critic(dtype: torch.dtype) -> ValueModel:
    """The same on every rank."""
    model = make_value_model(tiny_model(dtype=dtype, num_kv_heads=KV_HEADS).model)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.head.weight, std=0.3)
    return model


def spread(policy: Policy, ranks: Ranks) -> Policy:
    """On many ranks, or as it is."""
    return policy if ranks.is_alone else shard_policy(policy, ranks)


def spread_critic(model: ValueModel, ranks: Ranks) -> ValueModel:
    """On many ranks, or as it is."""
    return model if ranks.is_alone else shard_value_model(model, ranks)


def weights_of(policy: Any, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Whole copies by name."""
    if ranks.is_alone:
        named = policy.model.named_parameters() if isinstance(policy, Policy) else policy.named_parameters()
        return {name: parameter.detach().clone() for name, parameter in named}
    return {name: tensor.clone() for name, tensor in whole_tensors(policy.sharded, dtype=None, bucket_bytes=10_000)}


def cut_shard(shard: TrainShard, ranks: Ranks, how: str) -> TrainShard:
    """One rank's part of a whole rollout, in one of several uneven ways."""
    num, rank = ranks.dp_size, ranks.dp_rank
    places = list(range(len(shard.samples)))
    if how == "turn":
        own = places[rank::num]
    elif how == "empty":  # the last rank has none, if there is another
        own = places[rank :: num - 1] if rank < num - 1 else []
        own = places if num == 1 else own
    else:  # all but one for the first rank
        own = places[num - 1 :] if rank == 0 else [rank - 1]
    return TrainShard(
        shard.rollout_id,
        [shard.samples[i] for i in own],
        own,
        shard.rewards,
        shard.group_ids,
        shard.num_trained_tokens,
    )


def rollouts(config: Config, **options: Any) -> list[TrainShard]:
    """Two, with unequal rewards, and a log-prob missing in the first."""
    policy = ranked_policy(torch.float64, **options)
    made = [make_shard(policy, config, seed) for seed in (0, 1)]
    made[1].rollout_id = 1
    made[0].samples[2].rollout_log_probs[-1] = float("nan")
    return made


def replay(
    ranks: Ranks, sections: dict[str, Any], how: str, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics of two rollouts, and the weights after."""
    config = settings(sections)
    policy = spread(ranked_policy(dtype, **options), ranks)
    worker = TrainWorker(policy, config, engine=NoEngine())
    critic = None
    if config.algorithm.advantage_estimator == "ppo":
        critic = CriticWorker(spread_critic(ranked_critic(dtype), ranks), config)
    shards = rollouts(config, **options)
    if config.algorithm.ref_update_interval:  # only now is the reference one that scored before it was updated
        shards.append(replace(shards[0], rollout_id=2))
    found = [train_once(worker, critic, cut_shard(shard, ranks, how)) for shard in shards]
    weights = weights_of(policy, ranks)
    if critic is not None:
        weights |= {f"critic.{name}": value for name, value in weights_of(critic.model, ranks).items()}
    return found, weights


def settings(sections: dict[str, Any]) -> Config:
    """Of a small run in several micro-batches."""
    is_ppo = sections.get("algorithm", {}).get("advantage_estimator") == "ppo"
    trainer = STEPS["trainer"] | sections.get("trainer", {})
    return (ppo_config if is_ppo else make_config)(**{**sections, "trainer": trainer})


def train_once(worker: TrainWorker, critic: CriticWorker | None, shard: TrainShard) -> dict[str, float]:
    """One rollout, the critic first."""
    if critic is None:
        return worker.train(shard.rollout_id, shard)
    kl = worker.compute_kl(shard.rollout_id, shard) if worker.config.algorithm.kl_coef else None
    values = critic.train(shard.rollout_id, shard, kl)
    return critic.report() | worker.train(shard.rollout_id, shard, values)


def replay_many(ranks: Ranks, cases: list[tuple[Any, ...]]) -> list[Any]:
    """Several in one go, in float64 throughout: models that are built anew too."""
    with exact_models():
        return [replay(ranks, *case) for case in cases]


@contextmanager
def exact_models() -> Iterator[None]:
    """Copies of models in float64 have exact norms, like `tiny_model`."""
    plain = models.on_meta

    def exact(kind: Any, settings: Any, dtype: torch.dtype, config: Any) -> Any:
        model = plain(kind, settings, dtype, config)
        for module in model.modules() if dtype == torch.float64 else ():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(exact_rms_norm, module)
        return model

    models.on_meta = exact
    try:
        yield
    finally:
        models.on_meta = plain


def nan_on_one_rank(ranks: Ranks, culprit: int) -> tuple[dict[str, float], bool, int]:
    """Metrics of a rollout whose gradient is not finite on one rank, whether weights stood still, and steps done."""
    config = settings({})
    policy = spread(ranked_policy(torch.float64), ranks)
    worker = TrainWorker(policy, config, engine=NoEngine())
    before = weights_of(policy, ranks)
    if ranks.rank == culprit:
        objective = worker._objective

        class Broken:
            def __getattr__(self, name: str) -> Any:
                return getattr(objective, name)

            def __call__(self, *args: Any) -> Any:
                part = objective(*args)
                return replace(part, loss=part.loss * float("nan"))

        worker._objective = Broken()  # type: ignore[assignment]
    metrics = worker.train(0, cut_shard(rollouts(config)[0], ranks, "turn"))
    after = weights_of(policy, ranks)
    return metrics, all(torch.equal(before[name], after[name]) for name in before), worker.num_steps_done


def no_signal(ranks: Ranks) -> dict[str, float]:
    """Metrics of a rollout of equal rewards."""
    config = settings({})
    shard = rollouts(config)[0]
    for sample in shard.samples:
        sample.reward = 1.0
    worker = TrainWorker(spread(ranked_policy(torch.float64), ranks), config, engine=NoEngine())
    return worker.train(0, cut_shard(shard_of(shard.samples), ranks, "turn"))


RESUMED = {
    "algorithm": {"advantage_estimator": "ppo", "kl_loss_coef": 0.1, "ref_update_interval": 1},
    "trainer": {"lr_schedule": "cosine", "lr_warmup_steps": 1, "weight_decay": 0.1},
    "critic": {"lr": 1e-2},
}


def train_and_save(
    ranks: Ranks, folder: Path, start: int, end: int, dtype: torch.dtype, options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Go on from `folder/<start>` until rollout `end`, and save that; the weights after."""
    config = settings(RESUMED)
    policy = spread(ranked_policy(dtype, seed=start, **options), ranks)
    worker = TrainWorker(policy, config, engine=NoEngine(), samples_folder=folder)
    critic = CriticWorker(spread_critic(ranked_critic(dtype), ranks), config)
    with exact_models():
        if start:
            worker.load(folder / str(start))
            critic.load(folder / str(start))
        for rollout_id in range(start, end):
            shard = replace(rollouts(config, **options)[rollout_id % 2], rollout_id=rollout_id)
            train_once(worker, critic, cut_shard(shard, ranks, "turn"))
        own = folder / str(end)
        own.mkdir(exist_ok=True)
        worker.save_model(end, own)
        critic.save_model(end, own)
    critic_weights = {f"critic.{name}": value for name, value in weights_of(critic.model, ranks).items()}
    return weights_of(policy, ranks) | critic_weights


def load_folder(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """What ranks make of a model folder: weights, types, and log-probs of a rollout; or the error."""
    config = ModelConfig(path=str(folder), **options)
    try:
        policy = load_policy_on(ranks, config)
    except ValueError as error:
        return str(error)
    made = settings({})
    shard = cut_shard(rollouts(made)[0], ranks, "turn")
    forward = PackedForward(policy, temperature=1.0, head_chunk=16)
    scores = forward.score(shard.samples, 40)
    parts = scores.split([sample.response_length for sample in shard.samples])
    by_index = {sample.index: part for sample, part in zip(shard.samples, parts, strict=True)}
    return weights_of(policy, ranks), policy.dtype, by_index


def source_of(ranks: Ranks, dtype: torch.dtype, bucket_bytes: int) -> Any:
    """Specs and tensors of the hand-over after a step."""
    config = settings({})
    policy = ranked_policy(dtype)
    spread_policy = policy if ranks.is_alone else shard_policy(policy, ranks)
    TrainWorker(spread_policy, config, engine=NoEngine()).train(0, cut_shard(rollouts(config)[0], ranks, "turn"))
    source = weight_source(spread_policy, bucket_bytes=bucket_bytes)
    return dict(source.specs), {name: tensor.clone() for name, tensor in checked_tensors(source, source.specs)}


def speak(ranks: Ranks) -> Any:
    """The places and the collectives of a rank."""
    one = torch.tensor([float(ranks.dp_rank + 1)])
    places = (ranks.dp_rank, ranks.cp_rank, ranks.tp_rank, ranks.shard_rank, ranks.replica_rank, ranks.speaks)
    told = ranks.from_first(f"rank {ranks.rank}"), float(ranks.broadcast(torch.tensor(float(ranks.rank))))
    try:
        with ranks.together("work"):
            if ranks.rank == ranks.size - 1:
                raise OSError("disk full")
        error = None
    except ValueError as caught:
        error = str(caught)
    return places, float(ranks.sum(one)), ranks.gather(ranks.rank), ranks.most(ranks.rank), told, error


def refused(ranks: Ranks, options: dict[str, Any]) -> str:
    """What is said of a model that cannot be cut."""
    try:
        shard_policy(make_policy(tiny_model(**options), tiny_tokenizer()), ranks)
    except ValueError as error:
        return str(error)
    return ""
