"""A comparison of two runs as Markdown. The same comparison gives the same text."""

from collections.abc import Sequence
from typing import Final

from offload_eval.analysis.compare_metrics import BYTES_RATIO, KL_NATS, KL_RATIO, SAMPLED_BYTES_RATIO
from offload_eval.analysis.compare_times import (
    LEAST_EFFECT,
    LEVEL,
    LIKELY_EFFECT,
    LIKELY_TRIALS,
    SEPARATED_TRIALS,
)
from offload_eval.analysis.rank_test import EXACT_SAMPLES
from offload_eval.core.comparison import RAISED, STATUS, Change, Condition, MemoryChange, RunComparison
from offload_eval.core.gate import GateLine, GateResult
from offload_eval.reporting.compare_values import (
    VERDICT_WORDS,
    by_weight,
    headline,
    sentence,
    show_change,
    show_p,
    show_ratio,
    undecided_words,
)
from offload_eval.reporting.display import MISSING, one_line
from offload_eval.reporting.markdown import Verbatim, bullets, paragraph, render_table, section
from offload_eval.units import format_bytes

NOTE_CHARACTERS: Final = 300


def render_comparison(comparison: RunComparison, gate: GateResult | None = None) -> str:
    """Renders the whole comparison, the verdict first.

    Args:
        comparison: Of two runs.
        gate: What became of a gate; None: there was none.

    Returns:
        Markdown in which no name and no error text can break a table or add markup.
    """
    mark = mismatch_mark(comparison)
    changes = comparison.changes
    states = [change for change in changes if change.metric == STATUS]
    figures = [change for change in changes if change.metric != STATUS]
    counted = [change for change in figures if change.verdict not in ("same", "undecided")]
    timed = [change for change in figures if change.test == "ranks"]
    blocks = [
        section(
            f"{comparison.candidate} against {comparison.baseline}",
            *([_strong(mark)] if mark else []),
            paragraph(headline(comparison)),
            paragraph(undecided_words(comparison)),
            level=1,
        ),
        *([section("Gate", _gate_words(gate), _marked(mark, render_gate(gate.lines)))] if gate else []),
        section("Verdict", bullets(verdict_lines(comparison)) or "No verdict was raised."),
        section("Changes of state", _marked(mark, render_states(states)) or "None."),
        section("Figures that changed", _marked(mark, render_changes(counted)) or "None."),
        section("Times", _marked(mark, render_times(timed)) or "No cell was timed on both sides."),
        section("Why memory changed", *_memory_blocks(comparison.memory, mark)),
        section("What else is otherwise", _marked(mark, render_conditions(comparison.conditions)) or "Nothing."),
        section("How it was decided", bullets(method(comparison))),
    ]
    return "\n\n".join(blocks) + "\n"


def mismatch_mark(comparison: RunComparison) -> str:
    """What the runs do not share although they should, in one line; empty where they are alike."""
    if not comparison.mismatches:
        return ""
    listed = "; ".join(f"{each.name}: {each.baseline} -> {each.candidate}" for each in comparison.mismatches)
    return f"Not alike, compared with --allow-mismatch: {one_line(listed, 1000)}."


def verdict_lines(comparison: RunComparison) -> list[str]:
    """One line for each verdict that was raised, what counts against the candidate first."""
    raised = tuple(change for change in comparison.changes if change.verdict in RAISED)
    return [one_line(sentence(change), 2 * NOTE_CHARACTERS) for change in by_weight(raised)]


def render_states(changes: Sequence[Change]) -> str:
    """Cells and limits that end otherwise than they did, or are on one side only; empty without any."""
    titles = ["workload", "strategy", "what", "baseline", "candidate", "verdict", "why"]
    rows = [
        [
            change.workload,
            change.strategy,
            change.title,
            str(change.baseline or MISSING),
            str(change.candidate or MISSING),
            VERDICT_WORDS[change.verdict],
            one_line(change.note, NOTE_CHARACTERS),
        ]
        for change in by_weight(tuple(changes))
    ]
    return render_table(titles, rows, "lllllll") if rows else ""


def render_changes(changes: Sequence[Change]) -> str:
    """Figures with both values, their ratio and the verdict; empty without any."""
    titles = ["workload", "strategy", "metric (unit)", "baseline", "candidate", "ratio", "verdict", "why"]
    rows = []
    for change in by_weight(tuple(changes)):
        shown = show_change(change)
        values = [shown.label, shown.baseline, shown.candidate, show_ratio(change)]
        note = one_line(change.note, NOTE_CHARACTERS)
        rows.append([change.workload, change.strategy, *values, VERDICT_WORDS[change.verdict], note])
    return render_table(titles, rows, "lllrrrll") if rows else ""


def render_times(changes: Sequence[Change]) -> str:
    """Every timed figure with its medians, intervals and p values; empty without any."""
    titles = [
        "workload",
        "strategy",
        "metric (unit)",
        "baseline",
        "its interval",
        "candidate",
        "its interval",
        "ratio",
    ]
    titles += ["p", "adjusted p", "verdict", "why"]
    rows = []
    for change in changes:
        shown = show_change(change)
        rows.append(
            [
                change.workload,
                change.strategy,
                shown.label,
                shown.baseline,
                shown.baseline_interval,
                shown.candidate,
                shown.candidate_interval,
                show_ratio(change),
                show_p(change.p),
                show_p(change.adjusted_p),
                VERDICT_WORDS[change.verdict],
                one_line(change.note, NOTE_CHARACTERS),
            ]
        )
    return render_table(titles, rows, "lllrlrlrrrll") if rows else ""


def render_memory_change(change: MemoryChange) -> str:
    """The parts of one peak on both sides."""
    rows = [[part.part, *_sizes(part.baseline_bytes, part.candidate_bytes)] for part in change.parts]
    total = [f"peak {change.peak}", *_sizes(change.baseline_bytes, change.candidate_bytes)]
    return render_table(["part", "baseline", "candidate", "difference (bytes)"], [total, *rows], "lrrr")


def render_conditions(conditions: Sequence[Condition]) -> str:
    """What else is otherwise in the candidate; empty where nothing is."""
    rows = [
        [each.name, one_line(each.baseline, NOTE_CHARACTERS), one_line(each.candidate, NOTE_CHARACTERS)]
        for each in conditions
    ]
    return render_table(["what", "baseline", "candidate"], rows, "lll") if rows else ""


def render_gate(lines: Sequence[GateLine]) -> str:
    """Every line of a gate, broken ones first; empty without any."""
    order = ("broken", "undecided", "kept")
    ordered = sorted(lines, key=lambda line: order.index(line.outcome))
    rows = [
        [line.outcome, line.workload, line.strategy, line.metric, line.limit, one_line(line.message, NOTE_CHARACTERS)]
        for line in ordered
    ]
    return render_table(["outcome", "workload", "strategy", "metric", "limit", "seen"], rows, "llllll") if rows else ""


def gate_headline(gate: GateResult) -> str:
    """Whether a gate holds, in one sentence."""
    outcomes = [line.outcome for line in gate.lines]
    counts = [f"{outcomes.count(outcome):,} {outcome}" for outcome in ("broken", "undecided", "kept")]
    if outcomes and set(outcomes) == {"undecided"}:
        return f"The gate judged nothing: {', '.join(counts)}."
    return f"The gate is {'broken' if gate.broken else 'kept'}: {', '.join(counts)}."


def _gate_words(gate: GateResult) -> Verbatim:
    return paragraph(gate_headline(gate))


def method(comparison: RunComparison) -> list[str]:
    """How verdicts come about, with the numbers that decide."""
    return [
        "Cells are paired by workload, lengths, batch, prefill chunk, attention and all options of the strategy; "
        "limits of a capacity search by lengths and strategy. Figures are compared where both sides are ok.",
        "Counted bytes, copies, tokens and sessions: any change is listed; bytes are worse or better beyond "
        f"{_percent(BYTES_RATIO)} of the baseline, the others at once. RSS, reserved bytes and bytes in use vary by "
        f"themselves: beyond {_percent(SAMPLED_BYTES_RATIO)}. Mean KL: beyond {_percent(KL_RATIO)} and {KL_NATS:g} "
        "nats.",
        f"Times: a two-sided rank-sum test over trials, exact up to {EXACT_SAMPLES} of both sides; worse or better "
        f"where p is below {LEVEL:g} after Holm's correction over {comparison.num_tests:,} tests and the medians are "
        f"at least {_percent(LEAST_EFFECT)} apart (of an exposed time: of TTFT or TPOT).",
        f"Likely, where no test can decide: at least {LIKELY_TRIALS} trials a side, completely separated, medians "
        f"at least {_percent(LIKELY_EFFECT)} apart and as far as the wider side is wide; below {SEPARATED_TRIALS} "
        "trials the gap between the sides is that wide. Undecided: not decidable with so few trials, or swap or, on "
        "an emulated device, busy cores are in the time.",
        "Trials of one run share its conditions: a machine that was busy throughout one of them shifts all of its "
        "trials, and no test over them can tell that from slower code.",
    ]


def _percent(ratio: float) -> str:
    return f"{100 * ratio:g} %"


def _marked(mark: str, table: str) -> str:
    """A table under the mark of runs that are not alike."""
    return f"{_strong(mark)}\n\n{table}" if mark and table else table


def _strong(text: str) -> Verbatim:
    return Verbatim(f"**{paragraph(text)}**")


def _sizes(before: int, after: int) -> list[str]:
    return [format_bytes(before), format_bytes(after), f"{after - before:+,}"]


def _memory_blocks(changes: Sequence[MemoryChange], mark: str) -> list[str]:
    if not changes:
        return ["No peak is another one."]
    return [
        section(
            f"{change.workload} / {change.strategy}, {change.phase}",
            _marked(mark, render_memory_change(change)),
            level=3,
        )
        for change in changes
    ]
