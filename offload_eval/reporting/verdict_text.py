"""The verdict in words: what each strategy buys and costs, which to choose, and from where on offload pays."""

import math
from collections.abc import Iterable, Sequence
from typing import Final, get_args

import msgspec

from offload_eval.core.limits import Lengths, TimedBatch
from offload_eval.core.verdict import (
    BatchBreakEven,
    Choice,
    ContextBreakEven,
    Family,
    Goal,
    Situation,
    Standing,
    Verdict,
)
from offload_eval.reporting.capacity_tables import length_words
from offload_eval.reporting.display import one_line, show_ms, show_number, show_percent
from offload_eval.reporting.sourced import Lead, Part, Source

FAMILIES: Final[tuple[Family, ...]] = get_args(Family)
_GOAL_WORDS: Final[dict[Goal, str]] = {"sessions": "most sessions", "tokens_per_s": "most tokens/s"}
_DIGITS: Final = 3
_REASON_CHARACTERS: Final = 160


def overview(verdict: Verdict) -> list[list[Part]]:
    """What holds over all lengths: who is best where, and the context length from which offload gives more."""
    said = [_over_lengths(goal, verdict.situations) for goal in get_args(Goal)] if len(verdict.situations) > 1 else []
    return [line for line in said if line] + _context_lines(verdict)


def situation_lines(situation: Situation, verdict: Verdict) -> list[list[Part]]:
    """What was found at one combination of lengths; what is not known is left out."""
    lines = (
        *(_choice_line(choice, situation, verdict) for choice in situation.choices),
        _unmet_line(situation, verdict),
        _sessions_line(situation),
        _price_line(situation),
        _fidelity_line(situation),
        *_break_even_lines(situation),
    )
    return [line for line in lines if line]


def answer(verdict: Verdict) -> list[list[Part]]:
    """The verdict in a few lines: over all lengths, or of the only one; of break-evens that of the best strategy."""
    if len(verdict.situations) == 1:
        (situation,) = verdict.situations
        best = max(situation.break_evens, key=lambda each: each.best_ratio, default=None)
        return situation_lines(
            msgspec.structs.replace(situation, break_evens=() if best is None else (best,)), verdict
        )
    contexts = max(verdict.break_evens, key=lambda each: each.best_ratio or math.inf, default=None)
    return overview(msgspec.structs.replace(verdict, break_evens=() if contexts is None else (contexts,)))


def situation_title(situation: Situation) -> str:
    """The lengths, and the workloads that have them."""
    names = [name for name in situation.workloads if name != situation.lengths.label]
    return length_words(situation.lengths) + (f" ({', '.join(names)})" if names else "")


def objective_words(verdict: Verdict) -> str:
    """The stated limits of TTFT and TPOT, such as `TPOT at most 250 ms`; empty where none is stated."""
    stated = (("TTFT", verdict.ttft_limit_s), ("TPOT", verdict.tpot_limit_s))
    return " and ".join(f"{name} at most {seconds * 1000:g} ms" for name, seconds in stated if seconds is not None)


def _over_lengths(goal: Goal, situations: Sequence[Situation]) -> list[Part]:
    best: dict[str, list[tuple[Lengths, Choice]]] = {}
    for situation in situations:
        for choice in situation.choices:
            if choice.goal == goal:
                best.setdefault(choice.strategy, []).append((situation.lengths, choice))
    if not best:
        return []
    line: list[Part] = [Lead(f"{_GOAL_WORDS[goal].capitalize()} without loss"), ": "]
    for number, (strategy, won) in enumerate(best.items()):
        where = (
            f"at all {len(won)} combinations of lengths"
            if len(best) == 1
            else f"at {', '.join(length_words(lengths) for lengths, _ in won)}"
        )
        gains = [choice.over_in_gpu for _, choice in won if choice.over_in_gpu is not None]
        line += [
            f"{'; ' if number else ''}{strategy} {where}{_gain_words(gains)}",
            Source(tuple(run_id for _, choice in won for run_id in (*choice.run_ids, *choice.in_gpu_run_ids))),
        ]
    return [*line, "."]


def _gain_words(gains: Sequence[float]) -> str:
    if not gains or max(gains) == 1:
        return ""
    low, high = f"{min(gains):.2f}x", f"{max(gains):.2f}x"
    return f", {low if low == high else f'{low} to {high}'} of the in-GPU cache"


def _context_lines(verdict: Verdict) -> list[list[Part]]:
    """One line for each strategy that gives more from some length on, and one for those that do not."""
    never = [each for each in verdict.break_evens if each.wins_from is None]
    lines = [_context_line(each, verdict) for each in verdict.break_evens if each.wins_from is not None]
    groups = [[each for each in never if each.is_searched is searched] for searched in (True, False)]
    return [*lines, *(_never_line(group, verdict) for group in groups if group)]


def _context_line(found: ContextBreakEven, verdict: Verdict) -> list[Part]:
    assert found.wins_from is not None
    if found.wins_from == found.tokens[0]:
        where = f"at every one of {len(found.tokens)} contexts, {found.tokens[0]:,} to {found.tokens[-1]:,} tokens"
    else:
        below = max(tokens for tokens in found.tokens if tokens < found.wins_from)
        where = f"from {found.wins_from:,} tokens on, and not at {below:,}"
    words = f": {found.strategy}{_way(found)} gives more tokens/s than the in-GPU cache {where}{_under(verdict)}"
    best = "" if found.best_ratio is None else f"; at best {_best_of(found)}"
    return [Lead("Break-even in context"), _as_timed(found) + words + best, Source(found.run_ids), "."]


def _never_line(found: Sequence[ContextBreakEven], verdict: Verdict) -> list[Part]:
    line: list[Part] = [
        Lead("Break-even in context"),
        f"{_as_timed(found[0])}: never, up to the longest context{_under(verdict)}, for",
    ]
    for number, each in enumerate(found):
        span = f" ({each.tokens[0]:,} to {each.tokens[-1]:,} tokens; at best {_best_of(each)})"
        line += [f"{',' if number else ''} {each.strategy}{_way(each)}{span}", Source(each.run_ids)]
    return [*line, "."]


def _as_timed(found: ContextBreakEven) -> str:
    return "" if found.is_searched else ", at the batches that ran and not at full ones"


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


def _sessions_line(situation: Situation) -> list[Part]:
    counted = [each for each in situation.standings if _count(each) is not None]
    if not counted:
        return [Lead("Sessions"), f": none is known. {_refusals(situation.standings)}".rstrip()]
    in_gpu = _in_gpu(situation)
    line: list[Part] = [Lead("Sessions"), f"{_how_counted(counted)}: "]
    families = [(family, [each for each in situation.standings if each.family == family]) for family in FAMILIES]
    for number, (family, own) in enumerate(each for each in families if each[1]):
        line.append("; " if number else "")
        line += _family_part(family, own, in_gpu)
    return [*line, "."]


def _family_part(family: Family, own: Sequence[Standing], in_gpu: Standing | None) -> list[Part]:
    known = [each for each in own if _count(each) is not None]
    if not known:
        reason = one_line(own[0].refusal, _REASON_CHARACTERS).rstrip(".") or "not run"
        return [f"{family} ({', '.join(each.strategy for each in own)}) none: {reason}"]
    best = max(known, key=lambda each: _count(each) or 0)
    count, base = _count(best) or 0, None if in_gpu is None or best is in_gpu else _count(in_gpu)
    more = "" if not best.is_searched or best.is_exact or best.sessions is None else " or more"
    gain = f", {count / base:.2f}x of in-GPU," if base else ""
    host = " (host memory decides)" if best.ledger == "host" else ""
    analytic = "" if best.analytic is None else f" against {best.analytic:,} by arithmetic"
    words = f"{family} {count:,}{more} under {best.strategy}{gain}{host}{analytic}"
    return [words, Source(best.session_run_ids)]


def _count(standing: Standing) -> int | None:
    """Sessions as they ran; by trace where nothing was run."""
    return standing.traced if standing.evidence == "traced" else standing.sessions


def _how_counted(counted: Sequence[Standing]) -> str:
    rungs = ", ".join(dict.fromkeys(each.evidence for each in counted if each.evidence is not None))
    if any(each.is_searched for each in counted):
        return f" ({rungs}; found by search)"
    return f" ({rungs}; extrapolated from one batch's peak)"


def _price_line(situation: Situation) -> list[Part]:
    """TPOT and throughput of each family's fastest strategy, at its best batch, beside the in-GPU cache's."""
    timed = [each for each in situation.standings if each.fastest is not None]
    if not timed:
        return []
    in_gpu = _in_gpu(situation)
    base = None if in_gpu is None else in_gpu.fastest
    line: list[Part] = [Lead("Price"), ", each at its batch with most tokens/s: "]
    families = [[each for each in timed if each.family == family] for family in FAMILIES]
    for number, own in enumerate(each for each in families if each):
        best = max(own, key=lambda each: each.fastest.tokens_per_s if each.fastest else 0.0)
        assert best.fastest is not None
        line += [
            f"{'; ' if number else ''}{best.strategy} {_priced(best.fastest, base)}",
            Source((best.fastest.run_id,)),
        ]
    return [*line, "."]


def _priced(batch: TimedBatch, base: TimedBatch | None) -> str:
    tokens, tpot = show_number(batch.tokens_per_s, _DIGITS), show_ms(batch.tpot_s, _DIGITS)
    sessions = f"{batch.sessions:,} session{'' if batch.sessions == 1 else 's'}"
    ratios = (
        ""
        if base is None or base is batch
        else f", {batch.tokens_per_s / base.tokens_per_s:.2f}x the tokens/s and {batch.tpot_s / base.tpot_s:.2f}x the "
        "TPOT of the in-GPU cache"
    )
    return f"{tokens} tokens/s at a TPOT of {tpot} ms ({sessions}){ratios}"


def _fidelity_line(situation: Situation) -> list[Part]:
    """Strategies that are bit-equal together, then each that is not."""
    known = [each for each in situation.standings if each.fidelity is not None]
    if not known:
        return []
    equal = [each for each in known if each.fidelity and each.fidelity.bit_equal]
    others = [each for each in known if each.fidelity and not each.fidelity.bit_equal]
    line: list[Part] = [Lead("Output"), ": "]
    if equal:
        line += [
            f"bit-equal under {', '.join(each.strategy for each in equal)}",
            Source(tuple(each.fidelity.run_id for each in equal if each.fidelity)),
        ]
    for number, each in enumerate(others):
        assert each.fidelity is not None
        found = each.fidelity
        where = "" if found.workload in situation.workloads else f" on {found.workload}"
        floor = f" (noise floor {show_number(found.noise_floor_nats, _DIGITS)})" if found.noise_floor_nats else ""
        line += [
            f"{'; ' if number or equal else ''}mean KL {show_number(found.mean_kl_nats, _DIGITS)} nats{floor}, top-1 "
            f"{show_percent(found.top1_agreement_ratio)} under {each.strategy}{where}",
            Source((found.run_id,)),
        ]
    return [*line, "."]


def _choice_line(choice: Choice, situation: Situation, verdict: Verdict) -> list[Part]:
    objectives = objective_words(verdict)
    under = f" under {objectives}" if objectives else ", no SLO being stated"
    line: list[Part] = [
        Lead(f"Choose for {_GOAL_WORDS[choice.goal]}"),
        f"{under}: {choice.strategy}, {_value(choice.goal, choice.value)}{_at(choice)}",
        Source(choice.run_ids),
    ]
    if choice.strategy == situation.in_gpu:
        line.append(", the in-GPU cache: no strategy without loss has " + _more(choice.goal))
    elif choice.over_in_gpu is not None:
        line += [f", {choice.over_in_gpu:.2f}x of the in-GPU cache", Source(choice.in_gpu_run_ids)]
    else:
        line.append("; the in-GPU cache has none" if situation.in_gpu else "")
    if choice.lossy is not None and choice.lossy_value is not None:
        value = _value(choice.goal, choice.lossy_value)
        line += [f". Where its loss is acceptable: {choice.lossy}, {value}", Source(choice.lossy_run_ids)]
        loss = next(each.fidelity for each in situation.standings if each.strategy == choice.lossy)
        line.append(" (its loss was not measured here)" if loss is None else "")
    return [*line, "."]


def _at(choice: Choice) -> str:
    sessions = choice.batch_size
    return "" if sessions is None else f" at {sessions:,} session{'' if sessions == 1 else 's'}"


def _more(goal: Goal) -> str:
    return "more" if goal == "sessions" else "5 % more"


def _value(goal: Goal, value: float) -> str:
    if goal == "sessions":
        return f"{int(value):,} session{'' if value == 1 else 's'}"
    return f"{show_number(value, _DIGITS)} tokens/s"


def _unmet_line(situation: Situation, verdict: Verdict) -> list[Part]:
    """Strategies that were timed, and never within the objectives."""
    unmet = [each.strategy for each in situation.standings if each.num_timed and each.fastest is None]
    return [Lead(f"Never within {objective_words(verdict)}"), f": {', '.join(unmet)}."] if unmet else []


def _break_even_lines(situation: Situation) -> list[list[Part]]:
    """Of a search, batch by batch; of cells alone what was timed, and what fuller batches would have to take."""
    searched = {each.strategy for each in situation.standings if each.is_searched}
    lines = [_batch_line(each) for each in situation.break_evens if each.strategy in searched]
    rest = [each for each in situation.break_evens if each.strategy not in searched]
    return [*lines, *([_as_timed_line(rest)] if rest else []), _needed_line(situation, rest)]


def _batch_line(found: BatchBreakEven) -> list[Part]:
    best = f"at most {found.best_ratio:.2f}x, at {found.best_at:,} sessions"
    if found.wins_from is None:
        words = (
            f": none of {found.strategy}'s timed batches, up to {found.loses_up_to or 0:,} "
            f"sessions, gives more tokens/s than the in-GPU cache's best: {best}"
        )
    else:
        below = "" if found.loses_up_to is None else f", and not at {found.loses_up_to:,}"
        words = (
            f": {found.strategy} gives more tokens/s than the in-GPU cache's best from "
            f"{found.wins_from:,} sessions on{below}; {best}"
        )
    return [Lead("Break-even in batch"), words, Source(found.run_ids), "."]


def _as_timed_line(found: Sequence[BatchBreakEven]) -> list[Part]:
    line: list[Part] = [Lead("Break-even"), ": as timed, of the in-GPU cache's tokens/s"]
    for number, each in enumerate(found):
        line += [f"{',' if number else ''} {each.strategy} gives {each.best_ratio:.2f}x", Source(each.run_ids)]
    return [*line, "."]


def _needed_line(situation: Situation, found: Sequence[BatchBreakEven]) -> list[Part]:
    """How much longer a step may take where a strategy admits more sessions than the in-GPU cache: the most of any."""
    in_gpu, slower = _in_gpu(situation), {each.strategy for each in found if each.wins_from is None}
    full = [each for each in situation.standings if each.strategy in slower and each.sessions]
    most = max(full, key=lambda each: each.sessions or 0, default=None)
    if most is None or most.sessions is None or in_gpu is None or not in_gpu.sessions:
        return []
    ratio = most.sessions / in_gpu.sessions
    if ratio <= 1:
        return []
    return [
        f"Full, {most.strategy} gives more tokens/s only if a step of its {most.sessions:,} sessions takes less than "
        f"{ratio:.2f}x one of the in-GPU cache's {in_gpu.sessions:,}",
        Source((*most.session_run_ids, *in_gpu.session_run_ids)),
        ": offload-eval capacity times both.",
    ]


def _in_gpu(situation: Situation) -> Standing | None:
    return next((each for each in situation.standings if each.strategy == situation.in_gpu), None)


def _refusals(standings: Iterable[Standing]) -> str:
    return " ".join(
        f"{each.strategy}: {one_line(each.refusal, _REASON_CHARACTERS).rstrip('.')}."
        for each in standings
        if each.refusal
    )
