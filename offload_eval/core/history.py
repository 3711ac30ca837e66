"""The same cells over time: one row for each run of a cell, with what changed since the one before."""

from offload_eval.core.base import Strict
from offload_eval.core.records import Evidence, Status


class Figures(Strict, frozen=True, kw_only=True):
    """What a run of a cell came to. Absent is None: not looked at, or not reached."""

    analytic_sessions: int | None = None
    sessions_by_trace: int | None = None
    sessions_by_peak: int | None = None
    sessions_limit: int | None = None
    """The largest batch that a capacity search ran to its end, at the cell's lengths."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    """The higher of both phases' peaks of allocated device memory, weights included."""
    bytes_moved_per_token: float | None = None
    mean_kl_nats: float | None = None
    """Against the baseline's logits; the baseline has none."""


class Ratios(Strict, frozen=True, kw_only=True):
    """A run's figures over those of the run before it; 1.0 is equal. None where either is missing or that one is 0."""

    sessions_by_trace: float | None = None
    """Of sessions: None as well where the budget changed."""
    sessions_by_peak: float | None = None
    sessions_limit: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    tokens_per_s: float | None = None
    peak_bytes: float | None = None
    bytes_moved_per_token: float | None = None


class HistoryRow(Strict, frozen=True, kw_only=True):
    """One run of one cell."""

    series: str
    """Equal for runs of the same cell: of one experiment's name, one workload and a strategy of one label."""
    started_at_utc: str
    run_dir: str
    """Below the directory that was looked through."""
    run_id: str
    """Of the cell; of a limit without a cell that of its first probe."""
    experiment: str
    workload: str
    strategy: str
    model: str
    """The hub id, or a local model's file or folder name."""
    model_revision: str | None = None
    model_fingerprint: str
    machine: str
    """What its times depend on most: the accelerator; emulated, the CPU, its cores and the link's pace."""
    driver: str | None = None
    versions: dict[str, str]
    evidence: Evidence
    status: Status
    swapped: bool | None = None
    """Swap was in use around the cell: its times are the disk's."""
    figures: Figures
    before: str | None = None
    """run_dir of the earlier run that `changes` and `ratios` are against; None: there is none."""
    ratios: Ratios | None = None
    """None: no earlier run of the cell was made on the same kind of machine and the same rung."""
    changes: tuple[str, ...] = ()
    """What is otherwise than in `before`, as `name: old -> new`."""


class SkippedDirectory(Strict, frozen=True, kw_only=True):
    """A directory that looks like a run's and has nothing for a history."""

    path: str
    reason: str
