"""What lies between two runs of one experiment: every figure beside its counterpart, and what is concluded."""

from typing import Final, Literal

from offload_eval.core.base import Strict
from offload_eval.core.judgement import Interval
from offload_eval.core.records import Phase

Verdict = Literal[
    "worse",
    "better",
    "likely_worse",
    "likely_better",
    "missing",
    "new",
    "changed",
    "undecided",
    "same",
]
"""Of the candidate. likely: by complete separation of few trials, which no test can confirm. changed: another value,
smaller than the least effect or without a better side. undecided: too few trials to tell. same: equal, or no
difference was shown. missing, new: on one side only."""
Value = bool | int | float | str | None
"""A figure, a state, or None where that side has none."""
RAISED: Final[tuple[Verdict, ...]] = ("worse", "better", "likely_worse", "likely_better", "missing", "new")
"""Verdicts that claim a difference that counts."""
WORSE: Final[tuple[Verdict, ...]] = ("worse", "likely_worse", "missing")
BETTER: Final[tuple[Verdict, ...]] = ("better", "likely_better")
STATUS: Final = "status"
"""Metric of a change of state."""


class Change(Strict, frozen=True, kw_only=True):
    """One figure, or the state, of one cell or limit on both sides."""

    metric: str
    title: str
    """The metric in words, without its unit."""
    unit: str
    """Of both values: s, bytes, tokens/s, tokens, nats, sessions, copies, ratio, or what the values are."""
    workload: str
    strategy: str
    baseline: Value
    """A median where there are several trials."""
    candidate: Value
    ratio: float | None = None
    """candidate / baseline, both numbers; None where the baseline is 0 or either is no number."""
    verdict: Verdict
    lower_is_better: bool | None = None
    """None: neither side is."""
    test: Literal["status", "exact", "sampled", "ranks"]
    """exact: by value. sampled: by value, beyond what such readings vary by. ranks: rank-sum test over trials."""
    p: float | None = None
    """Two-sided, of the rank-sum test; None where there is none."""
    adjusted_p: float | None = None
    """Holm's, over all tests of the comparison that could have shown anything."""
    baseline_interval: Interval | None = None
    candidate_interval: Interval | None = None
    disturbance: str = ""
    """What was seen around the trials of a time that has nothing to do with the code; it leaves the time undecided."""
    note: str = ""
    """Why the verdict is what it is, where the values do not say."""
    baseline_run_id: str | None = None
    candidate_run_id: str | None = None


class Condition(Strict, frozen=True, kw_only=True):
    """Something that was otherwise in the candidate: a version, a model, a budget, the machine."""

    name: str
    baseline: str
    candidate: str


class MemoryPart(Strict, frozen=True, kw_only=True):
    """One named part of a peak on both sides."""

    part: str
    baseline_bytes: int
    candidate_bytes: int


class MemoryChange(Strict, frozen=True, kw_only=True):
    """A device peak that is another one, taken apart. The parts up to `unexplained` sum to the peak allocated."""

    workload: str
    strategy: str
    phase: Phase
    peak: Literal["allocated", "traced"]
    """Which peak the parts sum to; traced: the cell has not run on both sides."""
    baseline_bytes: int
    candidate_bytes: int
    parts: tuple[MemoryPart, ...]
    """Those that differ. `allocator` and `context` lie beyond the peak allocated."""


class RunComparison(Strict, frozen=True, kw_only=True):
    """A candidate run held against a baseline run."""

    baseline: str
    """The run directory's name."""
    candidate: str
    mismatches: tuple[Condition, ...] = ()
    """Hardware, rung or structure of the model that differs: what is compared is not the same thing."""
    conditions: tuple[Condition, ...] = ()
    """All else that differs, which a comparison is made to see."""
    changes: tuple[Change, ...] = ()
    """Changes of state first, then every figure of every pair, also those that are the same."""
    memory: tuple[MemoryChange, ...] = ()
    num_pairs: int = 0
    """Cells and limits that are on both sides."""
    trials_to_decide: int = 0
    """Trials on each side with which a rank-sum test of every timed figure could decide."""
    num_tests: int = 0
    """Rank-sum tests in the family that p values are adjusted for."""
