"""Intervals around means of samples that come in groups."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist

Z = NormalDist().inv_cdf(0.975)


def clustered_half_width(values: Sequence[float], clusters: Sequence[Hashable]) -> float | None:
    """Half width of the 95% interval of the mean of `values`, when values of one cluster depend on each other.

    Answers to one prompt are alike, so 8 answers to each of 8 prompts say less than 64 prompts would: the variance is
    that of the clusters' summed deviations, and Student's t has as many degrees of freedom as clusters less one.

    Returns:
        None with fewer than two clusters, which say nothing about the spread between prompts.
    """
    sums: dict[Hashable, float] = {}
    mean = math.fsum(values) / len(values) if values else 0.0
    for value, cluster in zip(values, clusters, strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + value - mean
    num = len(sums)
    if num < 2:
        return None
    variance = num / (num - 1) * math.fsum(total * total for total in sums.values()) / len(values) ** 2
    return student_t(num - 1) * math.sqrt(variance)


def proportion_interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean of independent values between 0 and 1, such as one pass@k estimate a prompt.

    Wilson's interval with the number of yes/no trials that would spread as the values do, so that it keeps a width
    where every value is 0 or every value is 1.
    """
    num = len(values)
    assert num > 0, "an interval of nothing"
    mean = min(max(math.fsum(values) / num, 0.0), 1.0)
    variance = math.fsum((value - mean) ** 2 for value in values) / num / max(num - 1, 1)
    trials = mean * (1 - mean) / variance if variance > 0 else num
    centre = (mean + Z * Z / (2 * trials)) / (1 + Z * Z / trials)
    half = Z / (1 + Z * Z / trials) * math.sqrt(mean * (1 - mean) / trials + Z * Z / (4 * trials * trials))
    return max(0.0, min(centre - half, mean)), min(1.0, max(centre + half, mean))


def student_t(freedom: int) -> float:
    """The 97.5% quantile of Student's t, to 0.2%."""
    if freedom < 3:
        return {1: 12.7062, 2: 4.3027}[freedom]
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
        (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92160,
    )
    return Z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
