"""Which strategy to choose at one combination of lengths."""

from collections.abc import Sequence
from typing import NamedTuple

from offload_eval.analysis.compare_times import LEAST_EFFECT
from offload_eval.core.verdict import Basis, Choice, Goal, InGpuState, Standing


def choose(
    standings: Sequence[Standing], in_gpu: Standing | None, basis: Basis, *, has_objectives: bool
) -> tuple[Choice, ...]:
    """Chooses for most sessions and for most tokens/s.

    Args:
        standings: Of all strategies, on one basis.
        in_gpu: That of the in-GPU cache.
        basis: Of all of them. Cells say nothing of the sessions under objectives: their batches are the experiment's.
        has_objectives: Whether a TTFT or TPOT is stated; what was not timed keeps none.

    Returns:
        A choice for each goal that anything is known of.
    """
    is_timed = has_objectives and basis != "traces"
    sessions = [] if is_timed and basis == "cells" else [_by_sessions(each, is_timed=is_timed) for each in standings]
    found = (
        _choice("sessions", sessions, in_gpu),
        _choice("tokens_per_s", [_by_throughput(each) for each in standings], in_gpu),
    )
    return tuple(choice for choice in found if choice is not None)


class _Score(NamedTuple):
    """What a strategy has by one goal."""

    standing: Standing
    value: float | None
    """None: not known; 0: it was seen to have none."""
    run_ids: tuple[str, ...] = ()
    batch_size: int | None = None
    is_least: bool = False


def _by_sessions(standing: Standing, *, is_timed: bool) -> _Score:
    if not is_timed:
        return _Score(standing, standing.sessions, standing.session_run_ids, is_least=standing.is_least)
    batch = standing.under_slo
    if batch is not None:
        return _Score(standing, batch.sessions, (batch.run_id,))
    return _Score(standing, 0 if standing.has_no_batch else None)


def _by_throughput(standing: Standing) -> _Score:
    batch = standing.fastest
    if batch is not None:
        return _Score(standing, batch.tokens_per_s, (batch.run_id,), batch.sessions)
    return _Score(standing, 0 if standing.has_no_batch else None)


def _choice(goal: Goal, scores: Sequence[_Score], in_gpu: Standing | None) -> Choice | None:
    """The best of those that lose nothing, and one that loses something where it does better still."""
    own = next((score for score in scores if score.standing is in_gpu), None)
    lossless = [score for score in scores if score.standing.is_lossless]
    best = _best(goal, lossless, own)
    lossy = _best(goal, [score for score in scores if not score.standing.is_lossless], None)
    if lossy is not None and best is not None and not _is_better(goal, lossy, best):
        lossy = None
    if best is None and lossy is None:
        return None
    return Choice(
        goal=goal,
        strategy=None if best is None else best.standing.strategy,
        value=None if best is None else best.value,
        is_least=best is not None and best.is_least,
        batch_size=None if best is None else best.batch_size,
        in_gpu=_in_gpu_state(best, own),
        over_in_gpu=_over(best, own),
        run_ids=() if best is None else best.run_ids,
        in_gpu_run_ids=() if own is None else own.run_ids,
        unknown=tuple(score.standing.strategy for score in lossless if score.value is None),
        lossy=None if lossy is None else lossy.standing.strategy,
        lossy_value=None if lossy is None else lossy.value,
        lossy_run_ids=() if lossy is None else lossy.run_ids,
    )


def _best(goal: Goal, scores: Sequence[_Score], in_gpu: _Score | None) -> _Score | None:
    """The highest, of equal ones the fastest; the in-GPU cache where no other is better by what counts."""
    best = max((score for score in scores if score.value), key=_rank, default=None)
    if best is None or in_gpu is None or not in_gpu.value or in_gpu not in scores:
        return best
    return best if _is_better(goal, best, in_gpu) else in_gpu


def _rank(score: _Score) -> tuple[float, float]:
    fastest = score.standing.fastest
    return score.value or 0, 0.0 if fastest is None else fastest.tokens_per_s


def _is_better(goal: Goal, one: _Score, other: _Score) -> bool:
    """Of tokens/s by as much as counts between two runs."""
    return (one.value or 0) > (other.value or 0) * (1 + (LEAST_EFFECT if goal == "tokens_per_s" else 0))


def _in_gpu_state(best: _Score | None, in_gpu: _Score | None) -> InGpuState:
    if in_gpu is None or in_gpu.value is None:
        return "unknown"
    if in_gpu.value == 0:
        return "none"
    return "chosen" if best is in_gpu else "less"


def _over(best: _Score | None, in_gpu: _Score | None) -> float | None:
    if best is None or in_gpu is None or not best.value or not in_gpu.value or in_gpu.is_least:
        return None
    return best.value / in_gpu.value
