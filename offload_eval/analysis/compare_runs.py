"""One run held against another: the same questions, asked twice, and what is otherwise the second time."""

from collections.abc import Sequence

from offload_eval.analysis.compare_memory import compare_traced_peaks, explain_changes, memories_of
from offload_eval.analysis.compare_metrics import VALUE_METRICS
from offload_eval.analysis.compare_pairs import RunSide, conditions, mismatches
from offload_eval.analysis.compare_states import compare_limits, compare_states, limits_of, paired_cells
from offload_eval.analysis.compare_times import compare_times
from offload_eval.analysis.compare_tokens import compare_tokens
from offload_eval.analysis.compare_values import compare_value
from offload_eval.core.comparison import Change, Condition, RunComparison
from offload_eval.core.records import RunRecord
from offload_eval.errors import InputError

Pair = tuple[RunRecord, RunRecord]


def compare_runs(baseline: RunSide, candidate: RunSide, *, allow_mismatch: bool = False) -> RunComparison:
    """Compares every cell and every limit that both runs have, and names what only one has.

    Cells whose figures are compared are `ok` on both sides; of the others the state is. Traces of both sides give the
    traced peaks, and take changed peaks apart.

    Args:
        baseline: What the candidate is held against.
        candidate: What is judged: worse and better are said of it.
        allow_mismatch: Compare runs of different hardware, rungs or models all the same; the result says so.

    Raises:
        InputError: The runs differ in these, or one has neither a finished cell or probe nor a limit by trace.
    """
    for side in (baseline, candidate):
        if not any(record.evidence != "traced" for record in side.records) and not limits_of(side):
            raise InputError(f"{side.name}: no cell has finished and no limit was traced: there is nothing to compare")
    unlike = mismatches(baseline, candidate)
    if unlike and not allow_mismatch:
        raise InputError(_refusal(baseline, candidate, unlike))
    pairs = paired_cells(baseline, candidate)
    if_ok = [(old, new) for old, new in pairs if old.status == new.status == "ok"]
    limit_states, limit_figures, num_limits = compare_limits(baseline, candidate)
    timed, num_tests, needed = compare_times(if_ok)
    values = [change for pair in if_ok for metric in VALUE_METRICS if (change := compare_value(metric, *pair))]
    tokens = compare_tokens(baseline, candidate, if_ok)
    explained = memories_of(baseline), memories_of(candidate)
    traced = compare_traced_peaks(*explained, pairs)
    figures = _in_order([*timed, *values, *tokens, *traced], pairs)
    return RunComparison(
        baseline=baseline.name,
        candidate=candidate.name,
        mismatches=unlike,
        conditions=conditions(baseline, candidate),
        changes=(*compare_states(baseline, candidate), *limit_states, *limit_figures, *figures),
        memory=explain_changes(*explained, pairs),
        num_pairs=len(pairs) + num_limits,
        trials_to_decide=needed,
        num_tests=num_tests,
    )


def _refusal(baseline: RunSide, candidate: RunSide, unlike: Sequence[Condition]) -> str:
    listed = "; ".join(f"{each.name}: {each.baseline} -> {each.candidate}" for each in unlike)
    return (
        f"{baseline.name} and {candidate.name} are not alike ({listed}); allowed: runs of the same hardware, rung and "
        "structure of the model; --allow-mismatch compares them all the same, and marks it"
    )


def _in_order(changes: Sequence[Change], pairs: Sequence[Pair]) -> list[Change]:
    """Cell by cell, in the order of the pairs; within a cell as they come."""
    places = {(old.spec.workload.label, old.spec.strategy.label): place for place, (old, _) in enumerate(pairs)}
    return sorted(changes, key=lambda change: places[change.workload, change.strategy])
