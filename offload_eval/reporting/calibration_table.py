"""How peaks follow the batch: the fitted plane of each strategy and phase, and how far it is to be trusted."""

from typing import Any, Final

import pandas as pd

from offload_eval.core.policy import AdmissionPolicy, Calibration, PhaseFit
from offload_eval.reporting.display import MISSING, show_count, show_number, show_percent
from offload_eval.reporting.markdown import bullets, render_table
from offload_eval.reporting.tables import COUNT, REAL, TEXT, typed_frame
from offload_eval.units import format_bytes

READING: Final = (
    "peak = weights + runtime + a * sessions * tokens + b * sessions + c * prefill tokens, no coefficient below zero, "
    "fitted to the peak of every batch that ran to its end. tokens: of a session when the phase ends; prefill tokens: "
    "of all sessions, as many as are prefilled at once. Left out: the worst error of a batch predicted from all "
    "others, over its peak beyond the weights. Reserve: covers the worst peak above the plane, in whole MiB."
)
_COEFFICIENTS: Final = ("bytes_per_session_token", "bytes_per_session", "bytes_per_prefill_token")
_FIT_FIELDS: Final[dict[str, str]] = {
    "phase": TEXT,
    "weights_bytes": COUNT,
    "runtime_bytes": REAL,
    **dict.fromkeys(_COEFFICIENTS, REAL),
    "points": COUNT,
    "worst_residual_bytes": REAL,
    "worst_above_bytes": REAL,
    "leave_one_out_ratio": REAL,
}
CALIBRATION_COLUMNS: Final[dict[str, str]] = {
    "strategy": TEXT,
    **_FIT_FIELDS,
    "reserve_bytes": COUNT,
    "not_told_apart": TEXT,
    "flags": TEXT,
}
_TITLES: Final = (
    "strategy",
    "phase",
    "batches",
    "runtime",
    "a (B)",
    "b",
    "c (B)",
    "worst residual",
    "left out",
    "reserve",
)


def calibration_frame(policy: AdmissionPolicy) -> pd.DataFrame:
    """One row for each strategy and phase; bytes."""
    return typed_frame((_frame_row(*each) for each in _fits(policy)), CALIBRATION_COLUMNS)


def render_calibrations(policy: AdmissionPolicy) -> str:
    """The planes, and what speaks against them; empty where none could be fitted."""
    fits = _fits(policy)
    if not fits:
        return ""
    table = render_table(list(_TITLES), [_row(*each) for each in fits], "llrrrrrrrr")
    return "\n\n".join(block for block in (bullets([READING]), table, bullets(_notes(policy))) if block)


def _fits(policy: AdmissionPolicy) -> list[tuple[str, Calibration, PhaseFit]]:
    calibrated = [(each.strategy.label, each.calibration) for each in policy.strategies if each.calibration]
    return [(label, calibration, fit) for label, calibration in calibrated for fit in calibration.fits]


def _row(label: str, calibration: Calibration, fit: PhaseFit) -> list[str]:
    left_out = fit.leave_one_out_ratio
    return [
        label,
        fit.phase,
        show_count(fit.points),
        format_bytes(round(fit.runtime_bytes)),
        show_number(fit.bytes_per_session_token),
        format_bytes(round(fit.bytes_per_session)),
        show_number(fit.bytes_per_prefill_token),
        format_bytes(round(fit.worst_residual_bytes)),
        MISSING if left_out is None else show_percent(left_out),
        format_bytes(calibration.reserve_bytes),
    ]


def _notes(policy: AdmissionPolicy) -> list[str]:
    """Flags, and what was not told apart, are among the assumptions of the policy."""
    return list(policy.assumptions)


def _frame_row(label: str, calibration: Calibration, fit: PhaseFit) -> dict[str, Any]:
    return {
        "strategy": label,
        **{name: getattr(fit, name) for name in _FIT_FIELDS},
        "reserve_bytes": calibration.reserve_bytes,
        "not_told_apart": "; ".join(fit.not_told_apart) or None,
        "flags": "; ".join(fit.flags) or None,
    }
