"""Limits of a capacity search: how many sessions, what stops the next one, and what a token costs there."""

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd

from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.limits import CapacityLimit, Lengths, TimedBatch
from offload_eval.reporting.display import MISSING, show_count, show_ms, show_number, show_share
from offload_eval.reporting.markdown import Verbatim, bullets, code, render_table, section
from offload_eval.reporting.tables import COUNT, REAL, TEXT, typed_frame
from offload_eval.units import format_bytes

_FIGURES: Final = ("sessions", "ttft_s", "tpot_s", "tokens_per_s")
_BATCHES: Final = ("at_limit", "at_in_gpu_limit", "in_gpu_at_limit", "under_slo")
LIMIT_COLUMNS: Final[dict[str, str]] = {
    "prompt_tokens": COUNT,
    "output_tokens": COUNT,
    "prefill_chunk_tokens": COUNT,
    "attn_implementation": TEXT,
    "kind": TEXT,
    "strategy": TEXT,
    "evidence": TEXT,
    "cap_bytes": COUNT,
    "analytic": COUNT,
    "analytic_ledger": TEXT,
    "traced": COUNT,
    "measured": COUNT,
    "failed_at": COUNT,
    "is_exact": "boolean",
    "probes": COUNT,
    "passes": COUNT,
    "repeats": COUNT,
    "in_gpu": COUNT,
    "gain_over_in_gpu": REAL,
    "limited_by": TEXT,
    "slo_failed_at": COUNT,
    "difference": TEXT,
    "refusal": TEXT,
    **{f"{batch}_{name}": COUNT if name == "sessions" else REAL for batch in _BATCHES for name in _FIGURES},
}
READING: Final = (
    "Lengths are prompt + output tokens. Sessions are one batch: all of the same lengths, prefilled together. More "
    "sessions are not more throughput"
)
_TIMED: Final = ": the second table has both strategies' price at their own limits and at the same batch."
_ONLY_TRACED: Final = (
    ". Nothing was run: the limits are the largest batches whose traced peaks fit. What an allocator rounds up and "
    "fragments comes on top, so that a card admits rather fewer."
)


def limits_frame(limits: Sequence[CapacityLimit]) -> pd.DataFrame:
    """One row for each strategy at each combination of lengths; SI units, NA where there is none."""
    return typed_frame((_frame_row(limit) for limit in limits), LIMIT_COLUMNS)


def render_limits(limits: Sequence[CapacityLimit], capacity: CapacitySpec) -> str:
    """The verdict in words, then for each combination of lengths the limits and their price."""
    blocks = [
        section(
            f"Limits: {length_words(lengths)}", bullets(limit_sentences(group)), *_tables(group, capacity), level=3
        )
        for lengths, group in by_lengths(limits).items()
    ]
    more = _TIMED if any(limit.at_limit for limit in limits) else _ONLY_TRACED if are_traced(limits) else "."
    return "\n\n".join(
        [READING + more, *blocks, section("How limits were found", bullets(_method(limits, capacity)), level=3)]
    )


def are_traced(limits: Sequence[CapacityLimit]) -> bool:
    """Whether nothing was run: all limits are of traces."""
    return all(limit.evidence == "traced" for limit in limits)


def rung_run(limits: Sequence[CapacityLimit]) -> str:
    """The rung of those that ran; traced where none did."""
    return next((limit.evidence for limit in limits if limit.evidence != "traced"), "traced")


def by_lengths(limits: Sequence[CapacityLimit]) -> dict[Lengths, list[CapacityLimit]]:
    """The limits of each combination of lengths."""
    groups: dict[Lengths, list[CapacityLimit]] = {}
    for limit in limits:
        groups.setdefault(limit.lengths, []).append(limit)
    return groups


def length_words(lengths: Lengths) -> str:
    """The lengths for a heading."""
    parts = [f"{lengths.prompt_tokens:,} + {lengths.output_tokens:,} tokens"]
    if lengths.prefill_chunk_tokens is not None:
        parts.append(f"prefilled {lengths.prefill_chunk_tokens:,} at once")
    if lengths.attn_implementation is not None:
        parts.append(lengths.attn_implementation)
    return ", ".join(parts)


def verdict_lines(limits: Sequence[CapacityLimit]) -> list[str]:
    """For each combination of lengths, who admits most sessions, and who gives most tokens/s at its own limit."""
    return [f"{length_words(lengths)}: {_best(group)}." for lengths, group in by_lengths(limits).items()]


def _best(group: Sequence[CapacityLimit]) -> str:
    admitted = [limit for limit in group if limit.measured]
    if not admitted:
        return "not one session runs under any strategy that was searched"
    most = max(admitted, key=lambda limit: (limit.measured or 0, limit.is_in_gpu))
    over = "" if most.is_in_gpu or most.gain_over_in_gpu is None else f", {show_gain(most)} of the in-GPU cache"
    words = f"most sessions under {most.label}, {show_measured(most)} ({most.evidence}{over})"
    timed = [(limit.label, limit.at_limit) for limit in admitted if limit.at_limit is not None]
    if not timed:
        return words
    label, fastest = max(timed, key=lambda each: each[1].tokens_per_s)
    speed = f"{show_number(fastest.tokens_per_s, 3)} at {fastest.sessions:,} sessions{_mark(fastest)}"
    return f"{words}; most tokens/s under {label}, {speed}"


def limit_sentences(group: Sequence[CapacityLimit]) -> list[str]:
    """What each strategy admits and what stops it, and at what throughput, in a sentence or two."""
    return [_sentence(limit) for limit in group]


def _sentence(limit: CapacityLimit) -> str:
    if limit.sessions is None:
        return f"{limit.label} has no limit: {limit.refusal or 'it was not searched'}."
    said = [f"{limit.label} admits {show_sessions(limit)} sessions ({limit.evidence})"]
    if limit.analytic is not None:
        said.append(f"where the arithmetic says {show_analytic(limit)}")
    if limit.gain_over_in_gpu is not None and not limit.is_in_gpu:
        said.append(f"{show_gain(limit)} of the in-GPU cache")
    runs_out = "does not fit" if limit.evidence == "traced" else "runs out of"
    text = ", ".join(said) + (f"; the next one {runs_out} {limit.limited_by}" if limit.limited_by else "")
    return f"{text}.{_throughput(limit)}"


def _throughput(limit: CapacityLimit) -> str:
    own, in_gpu = limit.at_limit, limit.in_gpu_at_limit
    if own is None:
        return ""
    where = "At its limit" if limit.is_exact else f"At {own.sessions:,} sessions"
    text = f" {where} the batch gives {show_number(own.tokens_per_s, 3)} tokens/s{_mark(own)}"
    if in_gpu is None or limit.is_in_gpu:
        return f"{text} at a TPOT of {show_ms(own.tpot_s, 3)} ms."
    ratio = own.tokens_per_s / in_gpu.tokens_per_s
    return (
        f"{text}, {ratio:.2f} times the in-GPU cache's at its own limit{_mark(in_gpu)}, at a TPOT of "
        f"{show_ms(own.tpot_s, 3)} ms against {show_ms(in_gpu.tpot_s, 3)} ms."
    )


def _mark(timed: TimedBatch) -> str:
    return " (swapped)" if timed.swapped else ""


def show_analytic(limit: CapacityLimit) -> str:
    """Sessions by arithmetic; the device's ledger goes without saying."""
    return show_count(limit.analytic) + (" (host)" if limit.analytic_ledger == "host" else "")


def show_gain(limit: CapacityLimit) -> str:
    """Sessions over those of the in-GPU cache; of a range the least."""
    gain = limit.gain_over_in_gpu
    return MISSING if gain is None else f"{'' if limit.is_exact else 'at least '}{gain:.2f}x"


def show_under_objectives(limit: CapacityLimit) -> str:
    """The largest timed batch that kept the objectives, or the range up to the smallest that did not."""
    kept, over = limit.under_slo, limit.slo_failed_at
    if kept is None:
        return MISSING if over is None else f"fewer than {over:,}" if over > 1 else "0"
    if over is None or over == kept.sessions + 1:
        return f"{kept.sessions:,}"
    return f"{kept.sessions:,} to {over - 1:,}"


def show_measured(limit: CapacityLimit) -> str:
    """The limit as it ran, or the range that it was narrowed down to."""
    return MISSING if limit.measured is None else show_sessions(limit)


def show_sessions(limit: CapacityLimit) -> str:
    """The limit on its own rung, or the range that it was narrowed down to."""
    if limit.sessions is None:
        return MISSING
    if limit.is_exact:
        return f"{limit.sessions:,}"
    if limit.failed_at is None:
        return f"{limit.sessions:,} or more"
    return f"{limit.sessions:,} to {limit.failed_at - 1:,}"


def _tables(group: Sequence[CapacityLimit], capacity: CapacitySpec) -> list[str]:
    notes = [f"{limit.label}: {limit.difference}." for limit in group if limit.difference]
    if are_traced(group):
        titles = ["strategy", "analytic", "traced", "over in-GPU", "what stops the next one", "traces"]
        rows = [_traced_row(limit) for limit in group]
        return [render_table(titles, rows, "lrrrll"), bullets(notes)]
    rung = rung_run(group)
    titles = [
        "strategy",
        "analytic",
        "traced",
        rung,
        "passed",
        "next",
        "batches tried",
        "over in-GPU",
        "what stops it",
    ]
    rows = [_limit_row(limit) for limit in group]
    tables = [render_table(titles, rows, "lrrrrlrrl")]
    if any(limit.at_limit for limit in group):
        tables.append(render_table(*_price(group, capacity)))
    return [*tables, bullets(notes)]


def _traced_row(limit: CapacityLimit) -> list[str]:
    """Of a limit that nothing was run of, with the traces of it and of the next batch."""
    return [
        limit.label,
        show_analytic(limit),
        show_sessions(limit),
        show_gain(limit),
        limit.refusal or limit.limited_by or MISSING,
        Verbatim(", ".join(map(code, limit.traced_run_ids)) or MISSING),
    ]


def _limit_row(limit: CapacityLimit) -> list[str]:
    return [
        limit.label,
        show_analytic(limit),
        show_count(limit.traced),
        show_measured(limit),
        show_share(limit.passes, limit.repeats) if limit.measured else MISSING,
        MISSING if limit.failed_at is None else f"{limit.failed_at:,} failed",
        show_count(limit.probes),
        show_gain(limit),
        limit.refusal or limit.limited_by or MISSING,
    ]


def _price(group: Sequence[CapacityLimit], capacity: CapacitySpec) -> tuple[list[str], list[list[str]], str]:
    """Titles, rows and alignment of the price at each limit, and at the in-GPU limit."""
    names = ["sessions", "TTFT (ms)", "TPOT (ms)", "tokens/s"]
    batches = [("at_limit", ""), ("at_in_gpu_limit", "at in-GPU limit: ")]
    if capacity.has_objectives:
        batches.append(("under_slo", "under SLO: "))
    titles = ["strategy", *(f"{said}{name}" for _, said in batches for name in names)]
    rows = [
        [limit.label, *(cell for name, _ in batches for cell in _figures(getattr(limit, name)))] for limit in group
    ]
    return titles, rows, "l" + "r" * (len(titles) - 1)


def _cells(limit: CapacityLimit, name: str) -> list[str]:
    figures = _figures(getattr(limit, name))
    return [show_under_objectives(limit), *figures[1:]] if name == "under_slo" else figures


def _figures(timed: TimedBatch | None) -> list[str]:
    if timed is None:
        return [MISSING] * 4
    mark = _mark(timed)
    times = (show_ms(timed.ttft_s), show_ms(timed.tpot_s), show_number(timed.tokens_per_s))
    return [show_count(timed.sessions), *(f"{each}{mark}" for each in times)]


def _method(limits: Sequence[CapacityLimit], capacity: CapacitySpec) -> list[str]:
    caps = ", ".join(dict.fromkeys(format_bytes(limit.cap_bytes) for limit in limits if limit.cap_bytes))
    if are_traced(limits):
        return [
            f"The device has {caps or 'the budget'}: the budget less runtime and reserve. A trace follows one "
            "full-length generate() of the real code on tensors without data, and counts every byte that lives.",
            f"Traced: the largest batch of 1 to {capacity.most_sessions:,} whose peaks fit the device and, where the "
            "budget states host memory, whose cache fits that; it was traced, and so was the next one. On CUDA no "
            "more than the host's arithmetic admits: it counts each buffer as a pinned allocator rounds it, up to a "
            "power of two, which a trace does not see.",
            "Analytic: (budget - weights - runtime - reserve) // KV bytes of a session, an upper bound.",
        ]
    lines = [
        f"The device tier was held to {caps or 'the budget'}: the budget less runtime and reserve. A probe is one "
        "full-length generate() of a fresh batch under that cap; its sessions generate freely, and their prompts are "
        "pieces of one text, or random.",
        f"The search begins at the traced limit and tries at most {capacity.max_probes} batches of 1 to "
        f"{capacity.most_sessions:,}. A limit has passed each of its {capacity.repeats} runs, and the next batch has "
        "failed; where the tries or the time did not suffice, the range that is left is given.",
        "Analytic: (budget - weights - runtime - reserve) // KV bytes of a session, an upper bound. Traced: the "
        "largest batch whose peaks fit, by the real code on tensors without data.",
    ]
    if rung_run(limits) == "emulated":
        lines.append(
            "Emulated: the cap is a ledger over this CPU's tensors, exact to the byte; the times are this CPU's."
        )
    if capacity.timing_trials:
        lines.append(
            f"Times are medians of {capacity.timing_trials} runs of the batch with a clock and nothing else attached. "
            "All sessions start together, so TTFT is the whole batch's prefill; tokens/s has the prefill in it."
        )
    return [*lines, *_objectives(capacity)]


def _objectives(capacity: CapacitySpec) -> list[str]:
    stated = [
        f"{name} at most {seconds * 1000:g} ms"
        for name, seconds in (("TTFT", capacity.ttft_limit_s), ("TPOT", capacity.tpot_limit_s))
        if seconds is not None
    ]
    if not stated:
        return []
    return [
        f"Under SLO: the largest timed batch with median {' and '.join(stated)}, of at most {capacity.max_probes} "
        "timed, or the range that is left; its tokens/s is the goodput, since every session of it keeps them."
    ]


def _frame_row(limit: CapacityLimit) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(limit, name) for name in LIMIT_COLUMNS if hasattr(limit, name)}
    row |= {name: getattr(limit.lengths, name) for name in limit.lengths.__struct_fields__}
    row["strategy"] = limit.label
    for batch in _BATCHES:
        timed = getattr(limit, batch)
        if timed is not None:
            row |= {f"{batch}_{name}": getattr(timed, name) for name in _FIGURES}
    return row
