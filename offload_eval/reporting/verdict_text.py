"""The verdict in words: what each strategy buys and costs, which to choose, and from where on offload pays."""

import math
from collections.abc import Iterable, Sequence
from typing import Final, get_args

import msgspec

from offload_eval.core.limits import TimedBatch
from offload_eval.core.verdict import Basis, Choice, Family, Goal, Situation, Standing, Verdict
from offload_eval.reporting.break_even_text import batch_lines, context_lines, objective_words
from offload_eval.reporting.capacity_tables import length_words
from offload_eval.reporting.display import one_line, show_ms, show_number, show_percent, show_sessions_of
from offload_eval.reporting.sourced import Lead, Part, Source

FAMILIES: Final[tuple[Family, ...]] = get_args(Family)
_GOAL_WORDS: Final[dict[Goal, str]] = {"sessions": "most sessions", "tokens_per_s": "most tokens/s"}
_COUNTED: Final[dict[Basis, str]] = {
    "search": "found by search",
    "cells": "extrapolated from one batch's peak",
    "traces": "by trace, nothing was run",
}
_DIGITS: Final = 3
_REASON_CHARACTERS: Final = 160


def overview(verdict: Verdict) -> list[list[Part]]:
    """What holds over all lengths: who is best where, and the context length from which offload gives more."""
    said = [_over_lengths(goal, verdict) for goal in get_args(Goal)] if len(verdict.situations) > 1 else []
    return [line for line in said if line] + context_lines(verdict)


def situation_lines(situation: Situation, verdict: Verdict) -> list[list[Part]]:
    """What was found at one combination of lengths; what is not known is left out."""
    lines = (
        *(_choice_line(choice, situation, verdict) for choice in situation.choices),
        _unmet_line(situation, verdict),
        _sessions_line(situation),
        _price_line(situation, verdict),
        _fidelity_line(situation),
        *batch_lines(situation, verdict),
    )
    return [line for line in lines if line]


def answer(verdict: Verdict) -> list[list[Part]]:
    """The verdict in a few lines: over all lengths, or of the only one; of break-evens that of the best strategy."""
    if len(verdict.situations) == 1:
        (situation,) = verdict.situations
        best = max(situation.break_evens, key=lambda each: each.best_ratio, default=None)
        shown = msgspec.structs.replace(situation, break_evens=() if best is None else (best,))
        return situation_lines(shown, verdict)
    contexts = max(verdict.break_evens, key=lambda each: each.best_ratio or math.inf, default=None)
    lines = overview(msgspec.structs.replace(verdict, break_evens=() if contexts is None else (contexts,)))
    return lines or [["No strategy has a batch at any combination of lengths that is known to fit."]]


def situation_title(situation: Situation) -> str:
    """The lengths, and the workloads that have them."""
    names = [name for name in situation.workloads if name != situation.lengths.label]
    return length_words(situation.lengths) + (f" ({', '.join(names)})" if names else "")


def show_standing(standing: Standing) -> str:
    """Sessions of a standing, and whether there may be more; None is not known."""
    if standing.sessions is None:
        return ""
    return f"{standing.sessions:,}{' or more' if standing.is_least else ''}"


def _over_lengths(goal: Goal, verdict: Verdict) -> list[Part]:
    best: dict[str, list[tuple[Situation, Choice]]] = {}
    for situation in verdict.situations:
        for choice in situation.choices:
            if choice.goal == goal and choice.strategy is not None:
                best.setdefault(choice.strategy, []).append((situation, choice))
    if not best:
        return []
    objectives = objective_words(verdict)
    under = f", under {objectives}" if objectives else ""
    line: list[Part] = [Lead(f"{_GOAL_WORDS[goal].capitalize()} without loss"), f"{under}: "]
    for number, (strategy, won) in enumerate(best.items()):
        where = (
            f"at all {len(won)} combinations of lengths"
            if len(won) == len(verdict.situations) and all(choice.in_gpu != "unknown" for _, choice in won)
            else f"at {', '.join(_place(situation, choice) for situation, choice in won)}"
        )
        line += [
            f"{'; ' if number else ''}{strategy} {where}{_gain_words([choice for _, choice in won])}",
            Source(tuple(run_id for _, choice in won for run_id in (*choice.run_ids, *choice.in_gpu_run_ids))),
        ]
    rest = [
        length_words(situation.lengths)
        for situation in verdict.situations
        if not any(choice.goal == goal and choice.strategy is not None for choice in situation.choices)
    ]
    return [*line, f". At {', '.join(rest)} nothing is known of it." if rest else "."]


def _place(situation: Situation, choice: Choice) -> str:
    words = length_words(situation.lengths)
    return f"{words} (the in-GPU cache being unknown)" if choice.in_gpu == "unknown" else words


def _gain_words(won: Sequence[Choice]) -> str:
    """The range of what was won over the in-GPU cache, where that is known at each of the lengths."""
    gains = [choice.over_in_gpu for choice in won if choice.over_in_gpu is not None]
    if len(gains) < len(won) or max(gains) == 1:
        return ""
    low, high = f"{min(gains):.2f}x", f"{max(gains):.2f}x"
    return f", {low if low == high else f'{low} to {high}'} of the in-GPU cache"


def _choice_line(choice: Choice, situation: Situation, verdict: Verdict) -> list[Part]:
    line: list[Part] = [
        Lead(f"Choose for {_GOAL_WORDS[choice.goal]}"),
        f"{_terms(situation.basis, verdict)}: ",
    ]
    if choice.strategy is None or choice.value is None:
        line.append("no strategy without loss has a batch" if not choice.unknown else "none without loss is known")
    else:
        least = " or more" if choice.is_least else ""
        line += [f"{choice.strategy}, {_value(choice.goal, choice.value)}{least}{_at(choice)}", Source(choice.run_ids)]
        line += _beside_in_gpu(choice)
    if choice.lossy is not None and choice.lossy_value is not None:
        value = _value(choice.goal, choice.lossy_value)
        line += [f". Where its loss is acceptable: {choice.lossy}, {value}", Source(choice.lossy_run_ids)]
        loss = next(each.fidelity for each in situation.standings if each.strategy == choice.lossy)
        line.append(" (its loss was not measured here)" if loss is None else "")
    if choice.unknown and choice.strategy:
        line.append(f". Not known of {', '.join(_unknown(name, situation) for name in choice.unknown)}")
    return [*line, "."]


def _unknown(name: str, situation: Situation) -> str:
    reason = next(each.reason for each in situation.standings if each.strategy == name)
    return f"{name} ({one_line(reason, _REASON_CHARACTERS).rstrip('.')})" if reason else name


def _terms(basis: Basis, verdict: Verdict) -> str:
    objectives = objective_words(verdict)
    if basis == "traces":
        return ", by trace" + (f", {objectives} being untested" if objectives else "")
    return f" under {objectives}" if objectives else ", no SLO being stated"


def _beside_in_gpu(choice: Choice) -> list[Part]:
    if choice.in_gpu == "chosen":
        return [f", the in-GPU cache: no other strategy without loss was seen to have {_more(choice.goal)}"]
    if choice.in_gpu == "none":
        return ["; the in-GPU cache has none"]
    if choice.over_in_gpu is None:
        return []
    least = "at least " if choice.is_least else ""
    return [f", {least}{choice.over_in_gpu:.2f}x of the in-GPU cache", Source(choice.in_gpu_run_ids)]


def _more(goal: Goal) -> str:
    return "more" if goal == "sessions" else "5 % more"


def _at(choice: Choice) -> str:
    return "" if choice.batch_size is None else f" at {show_sessions_of(choice.batch_size)}"


def _value(goal: Goal, value: float) -> str:
    return show_sessions_of(int(value)) if goal == "sessions" else f"{show_number(value, _DIGITS)} tokens/s"


def _unmet_line(situation: Situation, verdict: Verdict) -> list[Part]:
    """Strategies that were timed, and never within the objectives; and those whose times are a disk's."""
    unmet = [each.strategy for each in situation.standings if each.num_timed and each.fastest is None]
    swapped = [each.strategy for each in situation.standings if each.num_swapped and not each.num_timed]
    said = [f"Never within {objective_words(verdict)}: {', '.join(unmet)}."] if unmet else []
    said += (
        [f"Timed only while the machine swapped, which counts for nothing: {', '.join(swapped)}."] if swapped else []
    )
    if (
        objective_words(verdict)
        and situation.basis == "search"
        and not any(each.num_timed or each.num_swapped for each in situation.standings)
    ):
        said = [f"Nothing was timed, so that it is not known what keeps {objective_words(verdict)}."]
    return [" ".join(said)] if said else []


def _sessions_line(situation: Situation) -> list[Part]:
    counted = [each for each in situation.standings if each.sessions is not None]
    if not counted:
        return [Lead("Sessions"), f": none is known. {_reasons(situation.standings)}".rstrip()]
    rungs = ", ".join(dict.fromkeys(each.evidence for each in counted if each.evidence is not None))
    line: list[Part] = [Lead("Sessions"), f" ({rungs}; {_COUNTED[situation.basis]}): "]
    families = [(family, [each for each in situation.standings if each.family == family]) for family in FAMILIES]
    for number, (family, own) in enumerate(each for each in families if each[1]):
        line += ["; " if number else "", *_family_part(family, own, situation)]
    return [*line, "."]


def _family_part(family: Family, own: Sequence[Standing], situation: Situation) -> list[Part]:
    known = [each for each in own if each.sessions is not None]
    if not known:
        return [f"{family} not known ({_reasons(own).rstrip('.')})"]
    best = max(known, key=lambda each: each.sessions or 0)
    gain = None if best.strategy == situation.in_gpu else situation.over_in_gpu(best)
    gained = "" if gain is None else f", {'at least ' if best.is_least else ''}{gain:.2f}x of in-GPU"
    host = ", by the arithmetic of host memory" if best.by_host_arithmetic else ""
    host = ", where host memory decides" if not host and best.ledger == "host" else host
    kept = best.sessions if best.under_slo is None else best.under_slo.sessions
    within = "" if kept == best.sessions else f", {kept:,} of them within the objectives"
    analytic = "" if best.analytic is None else f", against {best.analytic:,} by arithmetic"
    loses = "" if best.is_lossless or family == "quantization" else ", which loses something"
    words = f"{family} {show_standing(best)} under {best.strategy}{loses}{gained}{host}{within}{analytic}"
    return [words, Source(best.session_run_ids)]


def _price_line(situation: Situation, verdict: Verdict) -> list[Part]:
    """TPOT and throughput of each family's fastest strategy, at its best batch, beside the in-GPU cache's."""
    timed = [each for each in situation.standings if each.fastest is not None]
    if not timed:
        return []
    in_gpu = situation.in_gpu_standing
    base = None if in_gpu is None else in_gpu.fastest
    objectives = objective_words(verdict)
    within = f" within {objectives}" if objectives else ""
    rungs = ", ".join(dict.fromkeys(each.evidence for each in timed if each.evidence is not None))
    line: list[Part] = [Lead("Price"), f" ({rungs}), each at its batch with most tokens/s{within}: "]
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
    ratios = (
        ""
        if base is None or base is batch
        else f", {batch.tokens_per_s / base.tokens_per_s:.2f}x the tokens/s and {batch.tpot_s / base.tpot_s:.2f}x the "
        "TPOT of the in-GPU cache"
    )
    return f"{tokens} tokens/s at a TPOT of {tpot} ms ({show_sessions_of(batch.sessions)}){ratios}"


def _fidelity_line(situation: Situation) -> list[Part]:
    """Strategies that are bit-equal together, then each that is not; other lengths by the workload's name."""
    known = [each for each in situation.standings if each.fidelity is not None]
    if not known:
        return []
    equal = [each for each in known if each.fidelity and each.fidelity.bit_equal]
    others = [each for each in known if each.fidelity and not each.fidelity.bit_equal]
    line: list[Part] = [Lead("Output"), ": "]
    if equal:
        line += [
            f"bit-equal under {', '.join(f'{each.strategy}{elsewhere(each, situation)}' for each in equal)}",
            Source(tuple(each.fidelity.run_id for each in equal if each.fidelity)),
        ]
    for number, each in enumerate(others):
        assert each.fidelity is not None
        found = each.fidelity
        floor = (
            "" if found.noise_floor_nats is None else f" (noise floor {show_number(found.noise_floor_nats, _DIGITS)})"
        )
        line += [
            f"{'; ' if number or equal else ''}mean KL {show_number(found.mean_kl_nats, _DIGITS)} nats{floor}, top-1 "
            f"{show_percent(found.top1_agreement_ratio)} under {each.strategy}{elsewhere(each, situation)}",
            Source((found.run_id,)),
        ]
    return [*line, "."]


def elsewhere(standing: Standing, situation: Situation) -> str:
    """Names the workload of a fidelity that is of other lengths; empty where it is of the same."""
    fidelity = standing.fidelity
    return "" if fidelity is None or fidelity.workload in situation.workloads else f" on {fidelity.workload}"


def _reasons(standings: Iterable[Standing]) -> str:
    """Why nothing is known, each reason once with those it holds for."""
    reasons: dict[str, list[str]] = {}
    for each in standings:
        if each.reason:
            reasons.setdefault(one_line(each.reason, _REASON_CHARACTERS).rstrip("."), []).append(each.strategy)
    return " ".join(f"{', '.join(names)}: {reason}." for reason, names in reasons.items())
