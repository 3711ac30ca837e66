"""Sessions that each strategy admits against the context's length, by arithmetic, traced and as it ran."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

from offload_eval.core.limits import CapacityLimit, Lengths
from offload_eval.reporting.capacity_tables import are_traced, length_words, rung_run, show_gain, show_sessions
from offload_eval.reporting.figures.drawing import Drawing
from offload_eval.reporting.figures.style import INK, add_legend, looks_of, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RUNGS: Final[dict[str, Literal["-", "--", ":"]]] = {"analytic": "--", "traced": ":", "measured": "-"}
"""Field of a limit and how its line is drawn."""


def draw_sessions_by_length(limits: Sequence[CapacityLimit]) -> Drawing | None:
    """Draws the limits that differ in their length alone: of the way of prefilling with most lengths.

    Where nothing was run there is no line of that rung.

    Returns:
        None for fewer than two lengths.
    """
    groups: dict[tuple[object, object], list[CapacityLimit]] = {}
    for limit in limits:
        groups.setdefault((limit.lengths.prefill_chunk_tokens, limit.lengths.attn_implementation), []).append(limit)
    shown = max(groups.values(), key=_num_lengths, default=[])
    if _num_lengths(shown) < 2:
        return None
    return Drawing("sessions", "Sessions against context length by strategy", _caption(shown), sessions_figure(shown))


def sessions_figure(limits: Sequence[CapacityLimit]) -> "Figure":
    """One line for each strategy and rung over prompt and output tokens."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import StrMethodFormatter

    figure, (panel,) = new_figure(1, 1, 4.2)
    looks = looks_of([limit.label for limit in limits])
    for label, look in looks.items():
        own = sorted(
            (limit for limit in limits if limit.label == label), key=lambda limit: context_tokens(limit.lengths)
        )
        for rung, dashes in _rungs(limits).items():
            points = [
                (context_tokens(each.lengths), count) for each in own if (count := getattr(each, rung)) is not None
            ]
            marker = "" if rung == "analytic" else look.marker
            filled = "full" if rung == "measured" else "none"  # a traced mark is a ring around the measured one
            size = 6 if rung == "measured" else 10
            panel.plot(
                *_columns(points),
                color=look.colour,
                linestyle=dashes,
                marker=marker,
                fillstyle=filled,
                markersize=size,
            )
    panel.set_xscale("log", base=2)
    if any(0 in (limit.measured, limit.traced, limit.analytic) for limit in limits):
        panel.set_yscale("symlog", linthresh=1)
        panel.set_ylim(bottom=0)
    else:
        panel.set_yscale("log")
    panel.set_xticks(sorted({context_tokens(limit.lengths) for limit in limits}))
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panel.minorticks_off()
    panel.set(xlabel="context of a session, prompt and output (tokens)", ylabel="sessions (count)")
    handles = [Line2D([], [], color=look.colour, marker=look.marker) for look in looks.values()]
    rungs = _rungs(limits)
    handles += [Line2D([], [], color=INK, linestyle=dashes) for dashes in rungs.values()]
    names = [rung_run(limits) if rung == "measured" else rung for rung in rungs]
    add_legend(figure, handles, [*(look.name for look in looks.values()), *names])
    return figure


def _rungs(limits: Sequence[CapacityLimit]) -> dict[str, Literal["-", "--", ":"]]:
    return {rung: dashes for rung, dashes in RUNGS.items() if rung != "measured" or not are_traced(limits)}


def context_tokens(lengths: Lengths) -> int:
    """Tokens of a session when it ends."""
    return lengths.prompt_tokens + lengths.output_tokens


def _num_lengths(limits: Sequence[CapacityLimit]) -> int:
    return len({context_tokens(limit.lengths) for limit in limits if limit.sessions is not None})


def _columns(points: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [length for length, _ in points], [count for _, count in points]


def _caption(limits: Sequence[CapacityLimit]) -> str:
    """Who gains most over the in-GPU cache, and where; without such a cache, who admits most at the longest length."""
    compared = [limit for limit in limits if limit.gain_over_in_gpu is not None and not limit.is_in_gpu]
    if compared:
        best = max(compared, key=lambda limit: limit.gain_over_in_gpu or 0.0)
        gain = f", {show_gain(best)} of the in-GPU cache, the most of any strategy and length shown"
    else:
        known = [limit for limit in limits if limit.sessions is not None]
        best = max(known, key=lambda limit: (context_tokens(limit.lengths), limit.sessions or 0))
        gain = ", the most at this length"
    return (
        f"{best.label} admits {show_sessions(best)} sessions at {length_words(best.lengths)} ({best.evidence}){gain}."
    )
