"""Figures of one run of a cell, and their ratios to those of another."""

from offload_eval.analysis.capacity import Admitted, analytic_sessions, sessions_by_peak, worst_peak_bytes
from offload_eval.analysis.cells import bytes_moved_per_token, mean_kl_nats
from offload_eval.analysis.statistics import median_of, summarize_throughput, summarize_tpot, summarize_ttft
from offload_eval.core.history import Figures, Ratios
from offload_eval.core.limits import CapacityLimit
from offload_eval.core.records import RunRecord

_SESSIONS = ("sessions_by_trace", "sessions_by_peak", "sessions_limit")


def figures_of(record: RunRecord, traced: Admitted | None, limit: CapacityLimit | None) -> Figures:
    """A cell's figures: medians over its trials, sessions on every rung that looked.

    Args:
        record: The cell that ran.
        traced: What its trace admits.
        limit: What a search found at its lengths for its strategy.
    """
    return Figures(
        analytic_sessions=analytic_sessions(record),
        sessions_by_trace=None if traced is None else traced.sessions,
        sessions_by_peak=sessions_by_peak(record),
        sessions_limit=None if limit is None else limit.measured,
        ttft_s=median_of(summarize_ttft(record)),
        tpot_s=median_of(summarize_tpot(record)),
        tokens_per_s=median_of(summarize_throughput(record)),
        peak_bytes=worst_peak_bytes(record),
        bytes_moved_per_token=bytes_moved_per_token(record),
        mean_kl_nats=mean_kl_nats(record),
    )


def limit_figures(limit: CapacityLimit) -> Figures:
    """A limit's sessions. Its times are of another batch in every run, so that they are no series."""
    return Figures(analytic_sessions=limit.analytic, sessions_by_trace=limit.traced, sessions_limit=limit.measured)


def ratios_of(now: Figures, before: Figures, *, same_budget: bool) -> Ratios:
    """Each figure over the earlier one; sessions only under the same budget."""
    names = [name for name in Ratios.__struct_fields__ if same_budget or name not in _SESSIONS]
    return Ratios(**{name: _ratio(getattr(now, name), getattr(before, name)) for name in names})


def _ratio(now: float | None, before: float | None) -> float | None:
    return None if now is None or not before else now / before
