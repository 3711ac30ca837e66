"""Whether two small samples differ: an exact rank-sum test, and Holm's correction for many of them."""

from collections.abc import Sequence
from functools import lru_cache
from math import comb, erfc, sqrt
from typing import Final

EXACT_SAMPLES: Final = 24
"""Both samples together: up to here every split is counted; beyond, the normal approximation is taken."""


def rank_sum_p(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Two-sided p of the Wilcoxon rank-sum (Mann-Whitney) test.

    Nothing is assumed about the distribution but that, where both samples are of the same one, every split of the
    values is as likely as any other. Equal values share their mean rank, and the count is over the very ranks that
    are there, so that ties are exact as well. p is the share of all splits whose rank sum lies at least as far from
    its mean as the one that was seen.

    Returns:
        None where either sample is empty.

    Source: Lehmann, Nonparametrics, 1975, sections 1.2 and 1.4; beyond `EXACT_SAMPLES` its normal approximation with
    continuity and tie correction.
    """
    if not first or not second:
        return None
    doubled = _doubled_ranks([*first, *second])
    seen = sum(doubled[: len(first)])
    if len(doubled) <= EXACT_SAMPLES:
        return _exact_p(tuple(sorted(doubled)), len(first), seen)
    return _normal_p(doubled, len(first), seen)


def smallest_p(first: int, second: int) -> float:
    """The smallest p that samples of these sizes can have: both extreme splits of all C(first + second, first)."""
    return min(1.0, 2 / comb(first + second, first))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusts p values so that the chance of any false one below a level stays below it, however they depend.

    Returns:
        In the order given; never below the value itself, never above 1.

    Source: Holm, A simple sequentially rejective multiple test procedure, 1979.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, highest = [1.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def trials_to_decide(num_tests: int, level: float) -> int:
    """Trials on each side with which the smallest p of a test can pass Holm's first step among `num_tests`."""
    trials = 1
    while smallest_p(trials, trials) * max(1, num_tests) >= level:
        trials += 1
    return trials


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the mid-rank of each value: a whole number also where values tie."""
    ordered = sorted(values)
    below = {value: index for index, value in reversed(list(enumerate(ordered)))}
    upto = {value: index + 1 for index, value in enumerate(ordered)}
    return [below[value] + 1 + upto[value] for value in values]


@lru_cache(maxsize=256)
def _splits(doubled: tuple[int, ...], size: int) -> dict[int, int]:
    """How many subsets of a size have each sum."""
    counts: list[dict[int, int]] = [{0: 1}, *({} for _ in range(size))]
    for rank in doubled:
        for chosen in range(size, 0, -1):
            into = counts[chosen]
            for total, ways in counts[chosen - 1].items():
                into[total + rank] = into.get(total + rank, 0) + ways
    return counts[size]


def _exact_p(doubled: tuple[int, ...], size: int, seen: int) -> float:
    splits = _splits(doubled, size)
    # Times the number of samples, so that the mean is a whole number too.
    mean, num = size * sum(doubled), len(doubled)
    far = sum(ways for total, ways in splits.items() if abs(total * num - mean) >= abs(seen * num - mean))
    return far / comb(num, size)


def _normal_p(doubled: Sequence[int], size: int, seen: int) -> float:
    num, other = len(doubled), len(doubled) - size
    mean = sum(doubled) / num
    variance = size * other / (num * (num - 1)) * sum((rank - mean) ** 2 for rank in doubled)
    if variance == 0:
        return 1.0
    # Ranks are doubled: a whole rank is 2, half of one the continuity correction of 1.
    distance = max(0.0, abs(seen - size * mean) - 1)
    return erfc(distance / sqrt(variance) / sqrt(2))
