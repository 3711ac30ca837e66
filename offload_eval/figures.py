"""Figures of a run for notebooks and scripts, each as a `matplotlib.figure.Figure` in the looks of the report.

The run is what `offload_eval.load_run` gives. matplotlib is imported by the first figure; pyplot is not, and none of
matplotlib's settings is changed. Where a run has no data for a figure, an `InputError` says what is missing.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from offload_eval.analysis.cells import cell_records
from offload_eval.analysis.compare_pairs import RunSide
from offload_eval.analysis.compare_runs import compare_runs
from offload_eval.analysis.grid import in_order, largest_workload
from offload_eval.analysis.history import KeptRun, make_history
from offload_eval.core.records import RunRecord
from offload_eval.errors import InputError
from offload_eval.loaded_run import Run
from offload_eval.reporting.figures.compare_ratios import draw_compare_ratios
from offload_eval.reporting.figures.fidelity_by_size import draw_fidelity_by_size
from offload_eval.reporting.figures.history_trends import draw_history_trends
from offload_eval.reporting.figures.memory_ledger import draw_memory_ledger
from offload_eval.reporting.figures.paper import on_paper
from offload_eval.reporting.figures.price_of_sessions import draw_price_of_sessions
from offload_eval.reporting.figures.sessions_by_length import draw_sessions_by_length
from offload_eval.reporting.figures.style import house_style
from offload_eval.reporting.figures.token_latencies import draw_token_latencies
from offload_eval.reporting.figures.transfers_hidden import draw_transfers_hidden

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from offload_eval.reporting.figures.drawing import Drawing

__all__ = [
    "compare_ratios",
    "fidelity_by_size",
    "history_trends",
    "memory_ledger",
    "price_of_sessions",
    "sessions_by_length",
    "token_latencies",
    "transfers_hidden",
]


def memory_ledger(run: Run, workload: str | None = None) -> "Figure":
    """Device memory of each strategy part by part, by arithmetic, traced and of the run, in binary units.

    Args:
        run: Of `load_run`.
        workload: Label of the workload; None: the one with most tokens, as in the report.

    Raises:
        InputError: No such workload, or no cell of it was traced or ran.
    """
    with house_style():
        drawing = draw_memory_ledger(_cells(run, workload))
        return _figure(run, drawing, "no memory: no cell of this workload was traced, and none had its peak looked at")


def fidelity_by_size(run: Run, workload: str | None = None) -> "Figure":
    """Mean KL to the baseline (nats) over the device bytes of a session's KV cache, a mark for each strategy.

    Args:
        run: Of `load_run`.
        workload: As of `memory_ledger`.

    Raises:
        InputError: No such workload, or no strategy was held against a baseline.
    """
    with house_style():
        drawing = draw_fidelity_by_size(_cells(run, workload))
        return _figure(run, drawing, "no fidelity: no strategy of this workload was held against a baseline")


def token_latencies(run: Run, workload: str | None = None) -> "Figure":
    """Latency of each decode step (ms), the median of the trials, a line for each strategy.

    Args:
        run: Of `load_run`.
        workload: As of `memory_ledger`.

    Raises:
        InputError: No such workload, or no token of it was timed.
    """
    with house_style():
        drawing = draw_token_latencies(_cells(run, workload))
        return _figure(run, drawing, "no latencies: no cell of this workload was timed")


def transfers_hidden(run: Run, workload: str | None = None) -> "Figure":
    """How long a decode step's copies keep the link busy (ms), what of it is waited for and what is hidden.

    Args:
        run: Of `load_run`.
        workload: As of `memory_ledger`.

    Raises:
        InputError: No such workload, no strategy of it used the link, or the run's hardware profile is missing.
    """
    with house_style():
        drawing = draw_transfers_hidden(_cells(run, workload), run.hardware)
        return _figure(run, drawing, "no transfers: no strategy of this workload copied over the link and was timed")


def sessions_by_length(run: Run) -> "Figure":
    """Sessions that each strategy admits over the context's length in tokens: analytic, traced and as it ran.

    Raises:
        InputError: No capacity search came to a limit at two lengths.
    """
    with house_style():
        missing = "no capacity search" if not run.limits else "one length"
        reason = f"{missing}: limits of at least two lengths make a line, see `offload-eval capacity`"
        return _figure(run, draw_sessions_by_length(run.limits), reason)


def price_of_sessions(run: Run) -> "Figure":
    """TPOT (ms) over the sessions of a batch, a panel for each combination of lengths of a capacity search.

    Raises:
        InputError: No capacity search timed a batch.
    """
    with house_style():
        drawing = draw_price_of_sessions(run.experiment, run.records)
        return _figure(run, drawing, "no capacity search: nothing was timed, see `offload-eval capacity`")


def compare_ratios(baseline: Run, candidate: Run, *, allow_mismatch: bool = False) -> "Figure":
    """A candidate's figures over the baseline's with what the trials leave open, as in `offload-eval compare`.

    Args:
        baseline: What the candidate is held against.
        candidate: What is judged.
        allow_mismatch: Compare runs of other hardware, another rung or another structure of the model all the same.

    Raises:
        InputError: The runs are not alike, neither has a finished cell, or no figure is on both sides.
    """
    names = [str(run.path) for run in (baseline, candidate)]
    sides = [_side(run, name) for run, name in zip((baseline, candidate), names, strict=True)]
    comparison = compare_runs(*sides, allow_mismatch=allow_mismatch)
    with house_style():
        return _figure(candidate, draw_compare_ratios(comparison), f"no figure in common with {names[0]}")


def history_trends(runs: Iterable[Run]) -> "list[Figure]":
    """TPOT (ms), device peak and sessions of each strategy from run to run, as in `offload-eval history`.

    Args:
        runs: In any order; they are held against one another by their start.

    Returns:
        A figure for each workload that was run more than once, the largest step first, six at most.

    Raises:
        InputError: No cell is in two of the runs.
    """
    kept = [KeptRun(str(run.path), run.experiment, run.records) for run in runs]
    with house_style():
        drawings = draw_history_trends(make_history(kept))
        if not drawings:
            listed = ", ".join(run.path for run in kept) or "none"
            raise InputError(f"no history: no cell is in two of the runs ({listed}); give two runs of one experiment")
        return [on_paper(drawing.figure) for drawing in drawings]


def _figure(run: Run, drawing: "Drawing | None", missing: str) -> "Figure":
    if drawing is None:
        raise InputError(f"{run.path}: {missing}")
    return on_paper(drawing.figure)


def _side(run: Run, name: str) -> RunSide:
    return RunSide(name=name, experiment=run.experiment, records=tuple(run.records))


def _cells(run: Run, workload: str | None) -> list[RunRecord]:
    """Records of one workload's cells and their traces; of no name that with most tokens, as in the report.

    Raises:
        InputError: The run has no cell, or none of a workload of this label.
    """
    records = in_order(run.experiment, cell_records(run.records))
    labels = list(dict.fromkeys(record.spec.workload.label for record in records))
    if not labels:
        raise InputError(f"{run.path}: no cell was traced or ran")
    asked = largest_workload(records) if workload is None else workload
    if asked not in labels:
        raise InputError(f"workload: {asked!r} is not in {run.path}; allowed: {', '.join(labels)}")
    return [record for record in records if record.spec.workload.label == asked]
