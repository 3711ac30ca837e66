"""Bounds of a price on a hardware profile, for what was traced and not run."""

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd

from offload_eval.analysis.bounded_price import WAYS
from offload_eval.analysis.probes import lengths_of
from offload_eval.core.latency import Resource
from offload_eval.core.limits import Lengths
from offload_eval.core.price import BoundedPrice
from offload_eval.reporting.capacity_tables import length_words
from offload_eval.reporting.display import MISSING, show_count, show_ms, show_number, show_sessions_of
from offload_eval.reporting.markdown import Verbatim, bullets, code, render_table, section
from offload_eval.reporting.sourced import Lead, Part, Source, plain
from offload_eval.reporting.tables import COUNT, REAL, TEXT, typed_frame
from offload_eval.units import format_bytes

_FIGURES: Final = ("ttft_s", "tpot_s", "tokens_per_s")
_LENGTHS: Final = ("prompt_tokens", "output_tokens", "prefill_chunk_tokens")
PRICE_COLUMNS: Final[dict[str, str]] = {
    **dict.fromkeys(_LENGTHS, COUNT),
    "attn_implementation": TEXT,
    "workload": TEXT,
    "strategy": TEXT,
    "family": TEXT,
    "is_lossless": "boolean",
    "evidence": TEXT,
    "sessions": COUNT,
    "hardware": TEXT,
    "calibrated": "boolean",
    **{f"{way}_{name}": REAL for way in WAYS for name in _FIGURES},
    "h2d_bytes_per_step": COUNT,
    "d2h_bytes_per_step": COUNT,
    "limited_by": TEXT,
    "run_id": TEXT,
}
_DIGITS: Final = 3
_WAITS: Final[dict[Resource, str]] = {"compute": "computing", "memory": "device memory", "h2d": "H2D", "d2h": "D2H"}
READING: Final = (
    "Nothing here was timed. Each cell is ideal / scheduled / serial: TTFT and TPOT are lower bounds and tokens/s "
    "upper bounds, where computing and copying overlap perfectly, as far as the strategy's own order lets them, and "
    "not at all. On hardware with the profile's figures no run is faster than ideal; how much slower it is, a bound "
    "does not say."
)


def price_frame(prices: Sequence[BoundedPrice]) -> pd.DataFrame:
    """One row for each priced batch; SI units."""
    return typed_frame((_frame_row(price) for price in prices), PRICE_COLUMNS)


def price_title(prices: Sequence[BoundedPrice]) -> str:
    """Says whose figures the bounds are from."""
    first = prices[0]
    how = "calibrated" if first.calibrated else "from documents"
    return f"Price by bounds, not measured: profile {first.hardware}, {how}"


def render_prices(prices: Sequence[BoundedPrice]) -> str:
    """A table for each combination of lengths, and what the bounds assume; empty without a price."""
    if not prices:
        return ""
    groups = _by_lengths(prices)
    tables = [
        section(
            f"Bounds: {length_words(lengths)}",
            bullets([plain(line) for line in [comparison_line(group, lengths)] if line]),
            _table(group),
            level=3,
        )
        for lengths, group in groups.items()
    ]
    assumed = list(dict.fromkeys(said for price in prices for said in price.assumptions))
    return "\n\n".join([READING, *tables, section("What the bounds assume", bullets(assumed), level=3)])


def price_line(prices: Sequence[BoundedPrice], lengths: Lengths) -> list[Part]:
    """The bounds of every strategy's best case at some lengths, in a sentence; empty without a price."""
    own = _by_lengths(prices).get(lengths, [])
    if not own:
        return []
    line: list[Part] = [
        Lead("Price by bounds"),
        f", not measured (profile {own[0].hardware}; everything overlaps): ",
    ]
    for number, price in enumerate(own):
        tokens, tpot = show_number(price.ideal.tokens_per_s, _DIGITS), show_ms(price.ideal.tpot_s, _DIGITS)
        sessions = show_sessions_of(price.sessions)
        words = f"{price.strategy} at most {tokens} tokens/s, a TPOT of at least {tpot} ms ({sessions})"
        line += [f"{'; ' if number else ''}{words}", Source((price.run_id,))]
    return [*line, "."]


def comparison_line(prices: Sequence[BoundedPrice], lengths: Lengths) -> list[Part]:
    """The offloading strategy of the most tokens/s beside the in-GPU cache, where all overlaps; empty without both.

    One that loses something has its own part, where it gives more than those that lose nothing.
    """
    own = _by_lengths(prices).get(lengths, [])
    in_gpu = _most_tokens_per_s([price for price in own if price.family == "in-GPU"])
    offloads = [price for price in own if price.family == "offload"]
    lossless = _most_tokens_per_s([price for price in offloads if price.is_lossless])
    best = _most_tokens_per_s(offloads)
    if best is None or in_gpu is None:
        return []
    line: list[Part] = [Lead("At the bounds"), ", "]
    for number, price in enumerate(dict.fromkeys(each for each in (lossless, best) if each is not None)):
        line += ["; " if number else "", f"{price.strategy}{'' if price.is_lossless else ', which loses something,'} "]
        line += [f"gives at most {_tokens_words(price)}", Source((price.run_id,))]
        if not number:
            line += [f" against {_tokens_words(in_gpu)} in-GPU", Source((in_gpu.run_id,))]
        tokens_ratio = price.ideal.tokens_per_s / in_gpu.ideal.tokens_per_s
        line.append(f": {tokens_ratio:.2f}x the tokens/s for {price.sessions / in_gpu.sessions:.2f}x the sessions")
    return [*line, ". Ratios of bounds are no bounds of what a run's ratio would be."]


def bounds_overview(prices: Sequence[BoundedPrice]) -> list[Part]:
    """Of offload without loss, of offload with loss and of quantization the best each, over all lengths.

    Returns:
        Ratios to the in-GPU cache at the bounds, as ranges; at a single combination of lengths, and where nothing can
        be held against the in-GPU cache, none.
    """
    groups = _by_lengths(prices)
    pairs: dict[str, list[tuple[BoundedPrice, BoundedPrice]]] = {}
    for group in groups.values():
        in_gpu = _most_tokens_per_s([price for price in group if price.family == "in-GPU"])
        for price in group if in_gpu is not None else []:
            if price.family != "in-GPU" and in_gpu is not None:
                pairs.setdefault(price.strategy, []).append((price, in_gpu))
    kinds = [
        _best_pairs([each for each in pairs.values() if (each[0][0].family, each[0][0].is_lossless) == kind])
        for kind in (("offload", True), ("offload", False), ("quantization", False))
    ]
    shown = [each for each in kinds if each is not None]
    if len(groups) < 2 or not shown:
        return []
    line: list[Part] = [Lead("At the bounds"), " of the profile, everything overlapping, against the in-GPU cache:"]
    for number, own in enumerate(shown):
        loses = "" if own[0][0].is_lossless else ", which loses something,"
        tokens = _range([price.ideal.tokens_per_s / base.ideal.tokens_per_s for price, base in own])
        sessions = _range([price.sessions / base.sessions for price, base in own])
        words = f"{own[0][0].strategy}{loses} gives {tokens} the tokens/s for {sessions} the sessions"
        line += [
            f"{';' if number else ''} {words}",
            Source(tuple(each.run_id for pair in own for each in pair)),
        ]
    return [*line, "."]


def _by_lengths(prices: Sequence[BoundedPrice]) -> dict[Lengths, list[BoundedPrice]]:
    groups: dict[Lengths, list[BoundedPrice]] = {}
    for price in prices:
        groups.setdefault(lengths_of(price.workload), []).append(price)
    return groups


def _best_pairs(
    candidates: Sequence[list[tuple[BoundedPrice, BoundedPrice]]],
) -> list[tuple[BoundedPrice, BoundedPrice]] | None:
    def ratio(own: list[tuple[BoundedPrice, BoundedPrice]]) -> float:
        return max(price.ideal.tokens_per_s / in_gpu.ideal.tokens_per_s for price, in_gpu in own)

    return max(candidates, key=ratio, default=None)


def _range(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.2f}x", f"{max(ratios):.2f}x"
    return low if low == high else f"{low} to {high}"


def _most_tokens_per_s(prices: Sequence[BoundedPrice]) -> BoundedPrice | None:
    return max(prices, key=lambda price: price.ideal.tokens_per_s, default=None)


def _tokens_words(price: BoundedPrice) -> str:
    tokens = show_number(price.ideal.tokens_per_s, _DIGITS)
    return f"{tokens} tokens/s at {show_sessions_of(price.sessions)}"


def _table(prices: Sequence[BoundedPrice]) -> str:
    titles = [
        "strategy",
        "sessions",
        "TTFT (s), at least",
        "TPOT (ms), at least",
        "tokens/s, at most",
        "H2D a step",
        "D2H a step",
        "a step waits for",
        "trace",
    ]
    return render_table(titles, [_row(price) for price in prices], "lrrrrrrll")


def _row(price: BoundedPrice) -> list[str]:
    bounds = [getattr(price, way) for way in WAYS]
    return [
        price.strategy,
        show_count(price.sessions),
        " / ".join(show_number(bound.ttft_s, _DIGITS) for bound in bounds),
        " / ".join(show_ms(bound.tpot_s, _DIGITS) for bound in bounds),
        " / ".join(show_number(bound.tokens_per_s, _DIGITS) for bound in bounds),
        format_bytes(price.h2d_bytes_per_step) if price.h2d_bytes_per_step else MISSING,
        format_bytes(price.d2h_bytes_per_step) if price.d2h_bytes_per_step else MISSING,
        _WAITS[price.limited_by],
        Verbatim(code(price.run_id)),
    ]


def _frame_row(price: BoundedPrice) -> dict[str, Any]:
    names = (
        "strategy",
        "family",
        "is_lossless",
        "evidence",
        "sessions",
        "hardware",
        "calibrated",
        "limited_by",
        "run_id",
    )
    moved = ("h2d_bytes_per_step", "d2h_bytes_per_step")
    bounds = {f"{way}_{name}": getattr(getattr(price, way), name) for way in WAYS for name in _FIGURES}
    lengths = {name: getattr(price.workload, name) for name in (*_LENGTHS, "attn_implementation")}
    return (
        {"workload": price.workload.label}
        | lengths
        | {name: getattr(price, name) for name in (*names, *moved)}
        | bounds
    )
