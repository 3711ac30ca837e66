"""Timed figures beside their counterpart: a rank-sum test over the trials, and a least effect.

A difference is *worse* or *better* where Holm's adjusted p, over all tests of the comparison, is below `LEVEL` and the
medians lie `LEAST_EFFECT` apart. With few trials no test gets there: of three against three p is never below 0.1. What
may then be said is *likely*: all trials of one side are beyond all of the other, the medians are `LIKELY_EFFECT`
apart, and they are at least as far apart as the wider side is wide; below `SEPARATED_TRIALS` a side the gap between
the sides is. Equal samples of three do so less than once in 100 figures where trials vary by 10 % and more (standard
deviation), once in 500 where they vary by 5 %, and not at all by 2 % (simulated, log-normal). All else that could not
have been decided is *undecided*, and so is a time that swap or busy cores are in.
"""

from collections.abc import Sequence
from statistics import median
from typing import Final

import msgspec

from offload_eval.analysis.compare_metrics import TIMED_METRICS, TimedMetric
from offload_eval.analysis.rank_test import holm, rank_sum_p, smallest_p, trials_to_decide
from offload_eval.analysis.rules_conditions import CONTENDED_RATIO
from offload_eval.analysis.statistics import median_of, summarize
from offload_eval.analysis.swap import is_swapped
from offload_eval.core.comparison import Change, Verdict
from offload_eval.core.records import RunRecord

LEVEL: Final = 0.05
LEAST_EFFECT: Final = 0.05
"""The larger median over the smaller, less 1; of an exposed time, its share of TTFT or TPOT."""
LIKELY_EFFECT: Final = 0.10
LIKELY_TRIALS: Final = 3
"""On each side, for anything to be likely."""
SEPARATED_TRIALS: Final = 5
"""On each side, from which on complete separation is rare by itself: 1 in 126 of equal samples."""


class TimedPair(msgspec.Struct, frozen=True):
    """The trials of one timed figure on both sides."""

    metric: TimedMetric
    baseline: RunRecord
    candidate: RunRecord
    before: list[float]
    after: list[float]

    @property
    def can_decide(self) -> bool:
        """Whether the test could be below the level at all; where not, it takes no part in the family."""
        sizes = len(self.before), len(self.after)
        return min(sizes) > 0 and smallest_p(*sizes) < LEVEL

    @property
    def effect(self) -> float:
        """How far the medians are apart, at least 0."""
        old, new = median(self.before), median(self.after)
        if self.metric.scale is None:
            return ratio - 1 if (ratio := _larger_over_smaller(old, new)) is not None else 0.0
        scale = self.metric.scale(self.baseline)
        return abs(new - old) / scale if scale else 0.0

    @property
    def is_worse(self) -> bool:
        """Whether the candidate's median is on the bad side."""
        return (median(self.after) > median(self.before)) == self.metric.lower_is_better

    @property
    def is_likely(self) -> bool:
        """Whether the samples are so far apart that few trials are enough to point at it."""
        trials = min(len(self.before), len(self.after))
        lower, higher = sorted((self.before, self.after), key=median)
        gap = min(higher) - max(lower)
        if trials < LIKELY_TRIALS or gap <= 0 or self.effect < LIKELY_EFFECT:
            return False
        width = max(max(lower) - min(lower), max(higher) - min(higher))
        return (gap if trials < SEPARATED_TRIALS else median(higher) - median(lower)) >= width


def _larger_over_smaller(old: float, new: float) -> float | None:
    """None where both are 0, or no time at all."""
    smaller, larger = sorted((old, new))
    if smaller > 0:
        return larger / smaller
    return None if larger <= 0 else float("inf")


def compare_times(pairs: Sequence[tuple[RunRecord, RunRecord]]) -> tuple[list[Change], int, int]:
    """Holds every timed figure of every pair side by side.

    Returns:
        The changes, by pair, how many tests are in the family, and with how many trials a side each could decide.
    """
    timed = [
        TimedPair(metric, baseline, candidate, metric.samples(baseline), metric.samples(candidate))
        for baseline, candidate in pairs
        for metric in TIMED_METRICS
    ]
    seen = [pair for pair in timed if pair.before or pair.after]
    tests = [index for index, pair in enumerate(seen) if pair.can_decide]
    p_values = [rank_sum_p(pair.before, pair.after) for pair in seen]
    adjusted = dict(zip(tests, holm([p_values[index] or 0.0 for index in tests]), strict=True))
    # With enough trials everything that has any on both sides would be tested.
    needed = trials_to_decide(sum(bool(pair.before and pair.after) for pair in seen), LEVEL)
    changes = [_change(pair, p_values[index], adjusted.get(index), needed) for index, pair in enumerate(seen)]
    return changes, len(tests), needed


def _change(pair: TimedPair, p: float | None, adjusted_p: float | None, needed: int) -> Change:
    before, after = summarize(pair.before), summarize(pair.after)
    old, new = median_of(before), median_of(after)
    verdict, note = _verdict(pair, p, adjusted_p, needed)
    disturbance = _disturbance(pair)
    if disturbance and verdict not in ("missing", "new"):
        verdict, note = "undecided", disturbance
    return Change(
        metric=pair.metric.name,
        title=pair.metric.title,
        unit=pair.metric.unit,
        workload=pair.baseline.spec.workload.label,
        strategy=pair.baseline.spec.strategy.label,
        baseline=old,
        candidate=new,
        ratio=new / old if new is not None and old else None,
        verdict=verdict,
        lower_is_better=pair.metric.lower_is_better,
        test="ranks",
        p=p,
        adjusted_p=adjusted_p,
        baseline_interval=before,
        candidate_interval=after,
        disturbance=disturbance,
        note=note,
        baseline_run_id=pair.baseline.run_id,
        candidate_run_id=pair.candidate.run_id,
    )


def _disturbance(pair: TimedPair) -> str:
    """What makes times longer and says nothing of the code: swap, and on an emulated device busy cores."""
    sides = (("baseline", pair.baseline), ("candidate", pair.candidate))
    swapped = [side for side, record in sides if is_swapped(record)]
    contended = [side for side, record in sides if _is_contended(record)]
    said = [
        *([f"swap was in use in the {' and the '.join(swapped)}: the time is the disk's"] if swapped else []),
        *([f"other processes wanted the cores in the {' and the '.join(contended)}"] if contended else []),
    ]
    return "; ".join(said)


def _is_contended(record: RunRecord) -> bool:
    """On a device of its own, busy cores are a finding of the run, but not what computes."""
    return record.evidence == "emulated" and (record.conditions.contention_ratio or 0) > CONTENDED_RATIO


def _verdict(pair: TimedPair, p: float | None, adjusted_p: float | None, needed: int) -> tuple[Verdict, str]:
    if p is None:
        return ("new", "not timed in the baseline") if not pair.before else ("missing", "not timed any more")
    if adjusted_p is not None and adjusted_p < LEVEL:
        if pair.effect >= LEAST_EFFECT:
            return ("worse" if pair.is_worse else "better"), ""
        return "same", f"shown, but less than {LEAST_EFFECT:.0%} apart".replace("%", " %")
    if pair.is_likely:
        how = "all trials of one side are beyond all of the other; too few for a test"
        return ("likely_worse" if pair.is_worse else "likely_better"), how
    if adjusted_p is None or min(len(pair.before), len(pair.after)) < needed:
        trials = f"{len(pair.before)} against {len(pair.after)} trials"
        return "undecided", f"not decidable with so few trials ({trials}); {needed} on each side can be"
    return "same", ""
