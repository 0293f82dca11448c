"""Evaluation of any model or checkpoint on any data: `limes eval`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TextIO

from limes.cluster.placement import create_placement_groups
from limes.cluster.roles import create_rollout_manager
from limes.config import Config, Resolved
from limes.driver import Roles, run_to_the_end
from limes.records import Sample
from limes.run import read_samples
from limes.run.tracking import Tracking

ROWS = (
    ("mean reward", "eval/reward_mean", "eval/reward_ci95", ".4f"),
    ("nats a token", "eval/nll", None, ".4f"),
    ("response length", "eval/response_len_mean", None, ".1f"),
    ("truncated", "eval/truncated_frac", None, ".1%"),
    ("unscored", "eval/unscored", None, ".0f"),
    ("grader errors", "eval/grader_errors", None, ".0f"),
    ("failed", "eval/failed", None, ".0f"),
    ("seconds", "perf/eval_time_s", None, ".1f"),
)


async def evaluate_model(config: Config, tracking: Tracking, *, k: Sequence[int] | None = None) -> None:
    """Answer the evaluation prompts and print rewards and pass@k with their 95% intervals."""
    cluster = config.cluster.model_copy(update={"debug_rollout_only": True})
    config = config.model_copy(update={"cluster": cluster})  # nobody trains
    placements = create_placement_groups(config, tracking)
    roles = Roles(tracking, placements)
    try:
        manager, _ = await create_rollout_manager(config, placements["rollout"], tracking, ks=k)
        roles.add(manager)
        await manager.onload_weights()
        await manager.onload_kv()
        metrics = await manager.eval(0)
        print_table(metrics, sys.stdout)
        num_shown = config.run.num_shown_samples
        if config.algorithm.is_supervised:  # the evaluation's answers are the data's
            answers = await manager.show_samples(num_shown)
        else:
            answers = first_of_each(read_samples(tracking.folder.rollouts, 0, "eval"))
        tracking.show("answers to the first prompts", answers[:num_shown])
    finally:
        await roles.dispose()


def first_of_each(samples: Sequence[Sample]) -> list[Sample]:
    """The first answer to each prompt."""
    firsts: dict[int, Sample] = {}
    for sample in samples:
        firsts.setdefault(sample.group_index, sample)
    return list(firsts.values())


def print_table(metrics: Mapping[str, float], out: TextIO) -> None:
    """One line a number, with its 95% interval where it has one."""
    rows = [("prompts", f"{metrics['eval/prompts']:.0f}", ""), ("answers", f"{metrics['eval/samples']:.0f}", "")]
    for name in metrics:
        k = name.removeprefix("eval/pass_at_")
        if k != name and k.isdecimal():
            low, high = metrics[f"{name}_low"], metrics[f"{name}_high"]
            rows.append((f"pass@{k}", f"{metrics[name]:.4f}", f"[{low:.4f}, {high:.4f}]"))
    for label, key, interval, form in ROWS:
        if key in metrics:
            half = metrics.get(interval) if interval else None
            rows.append((label, format(metrics[key], form), "" if half is None else f"+- {half:{form}}"))
    width = max(len(label) for label, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    for label, value, remark in rows:
        print(f"{label:<{width}}  {value:>{value_width}}  {remark}".rstrip(), file=out)
    out.flush()


def run_eval(resolved: Resolved, *, k: Sequence[int] | None = None) -> int:
    """Evaluate `model.path` on `eval.prompt_data` or `data.prompt_data`; returns the exit code.

    Args:
        k: the k of each pass@k; default: 1, 2, 4, ... up to `eval.n_samples_per_prompt`.
    """
    return run_to_the_end(partial(evaluate_model, k=k), resolved, default_name="eval")
