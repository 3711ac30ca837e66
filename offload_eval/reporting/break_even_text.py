"""Break-evens in sentences."""

from collections.abc import Sequence

from offload_eval.core.verdict import BatchBreakEven, ContextBreakEven, Situation, Verdict
from offload_eval.reporting.display import show_sessions_of
from offload_eval.reporting.sourced import Lead, Part, Source


def objective_words(verdict: Verdict) -> str:
    """The stated limits of TTFT and TPOT, such as `TPOT at most 250 ms`; empty where none is stated."""
    stated = (("TTFT", verdict.ttft_limit_s), ("TPOT", verdict.tpot_limit_s))
    return " and ".join(f"{name} at most {seconds * 1000:g} ms" for name, seconds in stated if seconds is not None)


def context_lines(verdict: Verdict) -> list[list[Part]]:
    """One line for each strategy that gives more from some length on, and one for those that do not."""
    never = [each for each in verdict.break_evens if each.wins_from is None]
    lines = [_context_line(each, verdict) for each in verdict.break_evens if each.wins_from is not None]
    groups = [[each for each in never if each.is_searched is searched] for searched in (True, False)]
    return [*lines, *(_never_line(group, verdict) for group in groups if group)]


def batch_lines(situation: Situation, verdict: Verdict) -> list[list[Part]]:
    """Of a search, batch by batch; of cells what was timed, and what fuller batches would have to take."""
    if not situation.break_evens:
        return []
    if situation.basis == "search":
        return [_batch_line(each, verdict) for each in situation.break_evens]
    needed = _needed_line(situation)
    return [_as_timed_line(situation.break_evens, verdict), *([needed] if needed else [])]


def _context_line(found: ContextBreakEven, verdict: Verdict) -> list[Part]:
    assert found.wins_from is not None
    if found.wins_from == found.tokens[0]:
        where = f"at every one of {len(found.tokens)} contexts, {found.tokens[0]:,} to {found.tokens[-1]:,} tokens"
    else:
        below = max(tokens for tokens in found.tokens if tokens < found.wins_from)
        from_there = f"from {found.wins_from:,} tokens on, up to {found.tokens[-1]:,}"
        at_last = f"at {found.wins_from:,} tokens, the longest context"
        where = f"{at_last if found.wins_from == found.tokens[-1] else from_there}, and not at {below:,}"
    best = "" if found.best_ratio is None else f"; at best {_best_of(found)}"
    words = f"{_as_timed(found)}: {found.strategy}{_way(found)} gives more tokens/s than the in-GPU cache {where}"
    return [
        Lead("Break-even in context"),
        f"{words}{_under(verdict)}{_alone(found)}{best}",
        Source(found.run_ids),
        ".",
    ]


def _never_line(found: Sequence[ContextBreakEven], verdict: Verdict) -> list[Part]:
    line: list[Part] = [
        Lead("Break-even in context"),
        f"{_as_timed(found[0])}: not at the longest context{_under(verdict)}, for",
    ]
    for number, each in enumerate(found):
        best = _alone(each) + ("" if each.best_ratio is None else f"; at best {_best_of(each)}")
        span = f" ({each.tokens[0]:,} to {each.tokens[-1]:,} tokens{best})"
        line += [f"{',' if number else ''} {each.strategy}{_way(each)}{span}", Source(each.run_ids)]
    return [*line, "."]


def _as_timed(found: ContextBreakEven) -> str:
    return "" if found.is_searched else ", at the batches that ran and not at full ones"


def _alone(found: ContextBreakEven) -> str:
    if not found.without_in_gpu:
        return ""
    return f"; the in-GPU cache has no batch at {', '.join(f'{tokens:,}' for tokens in found.without_in_gpu)} tokens"


def _best_of(found: ContextBreakEven) -> str:
    return f"{found.best_ratio:.2f}x of the in-GPU cache's, at {found.best_at:,} tokens"


def _way(found: ContextBreakEven) -> str:
    how = [
        *([] if found.prefill_chunk_tokens is None else [f"prefilled {found.prefill_chunk_tokens:,} at once"]),
        *([] if found.attn_implementation is None else [found.attn_implementation]),
    ]
    return f" ({', '.join(how)})" if how else ""


def _under(verdict: Verdict) -> str:
    objectives = objective_words(verdict)
    return f", under {objectives}" if objectives else ""


def _batch_line(found: BatchBreakEven, verdict: Verdict) -> list[Part]:
    best = f"at most {found.best_ratio:.2f}x of it, at {show_sessions_of(found.best_at)}"
    if found.wins_from is None:
        words = (
            f": {found.strategy} gives no more tokens/s than the in-GPU cache's best at its largest timed batch, "
            f"{show_sessions_of(found.loses_up_to or 0)}; {best}"
        )
    else:
        below = "" if found.loses_up_to is None else f", and not at {found.loses_up_to:,}"
        words = (
            f": {found.strategy} gives more tokens/s than the in-GPU cache's best from "
            f"{show_sessions_of(found.wins_from)} on{below}; {best}"
        )
    return [Lead("Break-even in batch"), f"{_under(verdict)}{words}", Source(found.run_ids), "."]


def _as_timed_line(found: Sequence[BatchBreakEven], verdict: Verdict) -> list[Part]:
    line: list[Part] = [
        Lead("Break-even"),
        f"{_under(verdict)}: at the batches that ran, each at its best, of the in-GPU cache's tokens/s",
    ]
    for number, each in enumerate(found):
        line += [f"{',' if number else ''} {each.strategy} gives {each.best_ratio:.2f}x", Source(each.run_ids)]
    return [*line, "."]


def _needed_line(situation: Situation) -> list[Part]:
    """How much longer a step may take where a strategy without loss admits more sessions than the in-GPU cache."""
    in_gpu = situation.in_gpu_standing
    slower = {each.strategy for each in situation.break_evens if each.wins_from is None}
    full = [each for each in situation.standings if each.strategy in slower and each.sessions and each.is_lossless]
    most = max(full, key=lambda each: each.sessions or 0, default=None)
    ratio = None if most is None else situation.over_in_gpu(most)
    if most is None or in_gpu is None or ratio is None or ratio <= 1:
        return []
    return [
        f"Full, and prefill aside, {most.strategy} gives more tokens/s only if a step of its {most.sessions:,} "
        f"sessions takes less than {ratio:.2f}x one of the in-GPU cache's {in_gpu.sessions:,}",
        Source((*most.session_run_ids, *in_gpu.session_run_ids)),
        ": offload-eval capacity times both.",
    ]
