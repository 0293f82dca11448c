"""Metrics reduce to the same numbers however the work was cut."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limes.run import METRICS, Last, Max, Mean, Min, Sum, combine, reduce
from limes.run.metrics import check_name

WHOLE = st.integers(-1000, 1000).map(float)


def test_maximum_of_ranks_stays_a_maximum_and_means_are_weighted():
    ranks = [
        {"train/peak": Max(10), "train/mean": Mean(1 * 6.0, 1)},
        {"train/peak": Max(30), "train/mean": Mean(3 * 2.0, 3)},
    ]
    assert reduce(ranks) == {"train/peak": 30.0, "train/mean": 3.0}


@given(st.lists(WHOLE, min_size=1, max_size=20), st.data())
def test_any_cut_gives_the_same_numbers(values: list[float], data: st.DataObject):
    def part(chunk: list[float]) -> dict:
        return {
            "train/mean": Mean(sum(chunk), len(chunk)),
            "train/sum": Sum(sum(chunk)),
            "train/max": Max(max(chunk)),
            "train/min": Min(min(chunk)),
            "train/last": Last(chunk[-1]),
        }

    cuts = sorted(data.draw(st.sets(st.integers(1, len(values) - 1)))) if len(values) > 1 else []
    parts = [part(values[a:b]) for a, b in zip([0, *cuts], [*cuts, len(values)], strict=True)]
    whole = {
        "train/mean": sum(values) / len(values),
        "train/sum": sum(values),
        "train/max": max(values),
        "train/min": min(values),
        "train/last": values[-1],
    }
    assert reduce(parts) == whole
    assert reduce([combine(parts[:1]), combine(parts[1:])]) == whole


def test_a_part_may_lack_a_metric_and_an_empty_mean_is_left_out():
    assert reduce([{"eval/a": Sum(1)}, {}, {"eval/b": Mean(0, 0)}]) == {"eval/a": 1.0}
    assert reduce([]) == {}


@pytest.mark.parametrize("kind", [Max, Min])
@pytest.mark.parametrize("order", [1, -1])
def test_nan_is_not_lost_in_an_extreme(kind: type, order: int):
    parts = [{"train/x": kind(math.nan)}, {"train/x": kind(1.0)}][::order]
    assert math.isnan(reduce(parts)["train/x"])


def test_reductions_that_disagree():
    with pytest.raises(ValueError, match="'train/x': reduced by Max, but got a Mean"):
        combine([{"train/x": Max(1)}, {"train/x": Mean(1, 1)}])
    with pytest.raises(ValueError, match="'perf/step_time_s': reduced by Max, but got a Sum"):
        combine([{"perf/step_time_s": Sum(1)}])
    with pytest.raises(ValueError, match="got a float"):
        combine([{"train/loss": 1.0}])  # type: ignore[dict-item]


@pytest.mark.parametrize("name", ["loss", "train/", "training/loss", "/x"])
def test_names_without_a_known_family(name: str):
    with pytest.raises(ValueError, match="family"):
        combine([{name: Sum(1)}])


def test_the_registry_is_fixed_and_says_what_grad_norm_is():
    assert all(check_name(key) for key in METRICS)
    assert "before clipping" in METRICS["train/grad_norm"].help
    with pytest.raises(TypeError):
        METRICS["train/x"] = METRICS["train/loss"]  # type: ignore[index]
