"""Do trainer and engine agree? |trainer - engine log-prob| of sampled tokens, before and after an update.

    python benchmarks/agreement.py

SmolLM2-135M in float32; 8 random prompts of 40 tokens, 8 answers of 32 tokens each, at temperatures 0.6, 1 and 1.7.
Engine and trainer hold the same tensors: the update is never copied.
"""

from __future__ import annotations

import asyncio

from machine import describe
from train_step import make_config, sample_rollout

from limes.config import load_config
from limes.models.load import load_policy
from limes.training.worker import TrainWorker


def main() -> None:
    """Print the differences."""
    print(describe())
    policy = load_policy(load_config(None, {"rollout.num_rollout": 1}).model)
    policy.end_token_ids = ()
    pointers = [parameter.data_ptr() for parameter in policy.model.parameters()]
    for temperature in (0.6, 1.0, 1.7):
        config = make_config(temperature)
        for when in ("before", "after"):
            shard, engine = sample_rollout(policy, config, 1)
            worker = TrainWorker(policy, config, engine=engine)
            metrics = worker.train(0, shard)
            asyncio.run(engine.close())
            print(
                f"temperature {temperature}, {when} an update: mean |trainer - engine log-prob| "
                f"{metrics['train/logprob_abs_diff']:.1e}, largest {metrics['train/logprob_abs_diff_max']:.1e}"
            )
    same = pointers == [parameter.data_ptr() for parameter in policy.model.parameters()]
    print(f"engine and trainer read the same memory throughout: {same}")


if __name__ == "__main__":
    main()
