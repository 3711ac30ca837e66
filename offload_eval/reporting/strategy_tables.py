"""The tables of a report, formatted for people from the raw frames."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import pandas as pd

from offload_eval.analysis.capacity import analytic_bound
from offload_eval.analysis.statistics import itl_percentile_s, summarize_tpot, summarize_ttft
from offload_eval.analysis.swap import is_swapped
from offload_eval.core.judgement import Interval
from offload_eval.core.limits import CapacityLimit
from offload_eval.core.records import RunRecord
from offload_eval.reporting.detail_tables import fidelity_frame, host_frame
from offload_eval.reporting.display import (
    MISSING,
    byte_scale,
    mark_swapped,
    show_bytes,
    show_count,
    show_ms,
    show_number,
    show_share,
    show_text,
    show_yes_no,
)
from offload_eval.reporting.markdown import bullets, render_table, section
from offload_eval.reporting.plain_columns import Rows, plain_columns, plain_groups
from offload_eval.reporting.tables import analytic_frame, strategy_frame


class Column(NamedTuple):
    """A frame's column as a reader sees it."""

    name: str
    title: str
    """`{unit}` stands for the unit of a column of bytes."""
    show: Callable[[Any], str] | None = None
    """None: bytes, in one unit for the column."""
    optional: bool = False
    """Left out of a table in which no row has it."""
    mark: str | None = None
    """Another column, whose word follows each value in brackets; of one that is true or not, its name where it is.
    The device's ledger goes without saying."""
    sign: str | None = None
    """Follows in place of the brackets, where there is little room."""


CAPACITY_COLUMNS: Final = (
    Column("analytic_sessions", "analytic sessions", show_count, mark="analytic_ledger"),
    Column("sessions_by_trace", "sessions by trace", show_count, optional=True, mark="ledger_by_trace"),
    Column("sessions_by_peak", "sessions by peak", show_count, mark="ledger_by_peak"),
    Column("prefill_peak_bytes", "prefill peak ({unit})"),
    Column("decode_peak_bytes", "decode peak ({unit})"),
    Column("kv_device_bytes", "KV device ({unit})"),
    Column("kv_host_bytes", "KV host ({unit})"),
)
COST_COLUMNS: Final = (
    Column("ttft_s", "TTFT (ms)", show_ms, mark="swapped"),
    Column("tpot_s", "TPOT (ms)", show_ms, mark="swapped"),
    Column("tokens_per_s", "tokens/s", show_number, mark="swapped"),
    Column("bytes_moved_per_token", "moved/token ({unit})"),
    Column("exposed_s_per_token", "exposed/token (ms)", show_ms),
)
FIDELITY_COLUMNS: Final = (
    Column("mean_kl_nats", "mean KL", show_number),
    Column("max_kl_nats", "max KL", show_number),
    Column("noise_floor_nats", "noise floor", show_number),
    Column("top1_agreement_ratio", "top-1 (ratio)", show_number),
    Column("nll_change_nats", "NLL change", show_number),
    Column("first_divergence", "first divergence", show_text),
    Column("baseline_top1_margin_nats", "top-1 margin", show_number),
    Column("bit_equal", "bit-equal", show_yes_no),
)
"""What is not otherwise marked is in nats; the heading says so."""
HOST_COLUMNS: Final = (
    Column("peak_host_rss_bytes", "host RSS peak ({unit})"),
    Column("pinned_requested_bytes", "pinned asked ({unit})"),
    Column("pinned_allocated_bytes", "pinned allocated ({unit})"),
    Column("h2d_busy_s_per_step", "H2D busy/step (ms)", show_ms),
    Column("d2h_busy_s_per_step", "D2H busy/step (ms)", show_ms),
)
PRESSURE_COLUMNS: Final = (
    Column("peak_cgroup_bytes", "cgroup peak ({unit})"),
    Column("cgroup_limit_bytes", "cgroup limit ({unit})"),
    Column("cgroup_swap_bytes", "cgroup swap ({unit})"),
    Column("swap_in_bytes", "swapped in ({unit})"),
    Column("swap_out_bytes", "swapped out ({unit})"),
    Column("num_major_faults", "major faults", show_count),
    Column("num_minor_faults", "minor faults", show_count),
)
ALLOCATOR_COLUMNS: Final = (
    Column("prefill_peak_reserved_bytes", "prefill reserved ({unit})"),
    Column("decode_peak_reserved_bytes", "decode reserved ({unit})"),
    Column("prefill_peak_device_used_bytes", "prefill device used ({unit})"),
    Column("decode_peak_device_used_bytes", "decode device used ({unit})"),
    Column("num_alloc_retries", "alloc retries", show_count),
)
ANALYTIC_CARD_COLUMNS: Final = (
    Column("kv_device_peak_bytes_per_session", "KV device/session, most ({unit})"),
    Column("kv_host_bytes_per_session", "KV host/session ({unit})"),
    Column("h2d_bytes_per_step", "H2D/step ({unit})"),
    Column("d2h_bytes_per_step", "D2H/step ({unit})"),
    Column("analytic_sessions", "analytic sessions", show_count, mark="limiting_ledger"),
)
SWAPPED: Final = "swapped: swap was in use around these cells, so that their times are the disk's; see the findings."


def format_columns(rows: Rows, columns: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
    """Formats columns.

    Returns:
        Titles, and one list of texts for each row; a missing value is `-`.
    """
    formatted = [_format_column(rows, column) for column in columns]
    return [title for title, _ in formatted], [
        list(row) for row in zip(*(texts for _, texts in formatted), strict=True)
    ]


def _format_column(rows: Rows, column: Column) -> tuple[str, list[str]]:
    title, texts = _format_values(rows, column)
    if column.mark is None:
        return title, texts
    return title, [_marked(text, mark, column) for text, mark in zip(texts, rows[column.mark], strict=True)]


def _marked(text: str, mark: Any, column: Column) -> str:
    if not mark or mark == "device" or text == MISSING:
        return text
    return f"{text}{column.sign}" if column.sign else f"{text} ({mark if isinstance(mark, str) else column.mark})"


def _format_values(rows: Rows, column: Column) -> tuple[str, list[str]]:
    values = rows[column.name]
    if column.show is not None:
        return column.title, [column.show(value) for value in values]
    scale = byte_scale(values)
    return column.title.format(unit=scale.unit), [show_bytes(value, scale) for value in values]


def render_strategy_tables(records: Sequence[RunRecord]) -> str:
    """The strategy table, in parts, each for every workload; of what lies behind it only what is known.

    Capacity and cost keep every column. The others lack the columns that are empty for every cell of the
    workload, and are left out where all are.
    """
    strategies, fidelity, host = strategy_frame(records), fidelity_frame(records), host_frame(records)
    fidelity = fidelity.assign(first_divergence=_first_divergences(fidelity))
    parts = (
        ("Capacity and memory", strategies, CAPACITY_COLUMNS),
        ("Time and transfer", strategies, COST_COLUMNS),
        ("Fidelity, in nats", fidelity, FIDELITY_COLUMNS),
        ("Host memory and link", host, HOST_COLUMNS),
        ("Pressure on host memory", host, PRESSURE_COLUMNS),
        ("Allocator", host, ALLOCATOR_COLUMNS),
    )
    blocks = [
        section(f"{title}: {workload}", rows_table(rows, shown, row_names(rows)), swap_legend(rows, shown), level=3)
        for title, frame, columns in parts
        for (workload,), rows in plain_groups(frame, "workload").items()
        if (shown := filled_columns(rows, columns, keep=frame is strategies))
    ]
    return "\n\n".join(blocks)


def swap_legend(rows: Rows, columns: Sequence[Column]) -> str:
    """What the mark of swap means, where a table has one."""
    return SWAPPED if any(column.mark == "swapped" for column in columns) and any(rows["swapped"]) else ""


def render_host_at(limits: Sequence[CapacityLimit], records: Sequence[RunRecord]) -> str:
    """What the largest batch of each strategy took of the host, and what pressed on it; empty without a limit."""
    runs = [run for limit in limits if (run := _at_limit(limit, records)) is not None]
    if not runs:
        return ""
    rows = plain_columns(host_frame(runs))
    columns = filled_columns(rows, (*HOST_COLUMNS, *PRESSURE_COLUMNS))
    return rows_table(rows, columns, [run.spec.label for run in runs]) if columns else ""


def _at_limit(limit: CapacityLimit, records: Sequence[RunRecord]) -> RunRecord | None:
    """Every run of a limit as one record: peaks come from some of them, and faults from others."""
    runs = [
        record
        for record in records
        if record.run_id in limit.run_ids and record.spec.workload.batch_size == limit.measured
    ]
    if not runs:
        return None
    return msgspec.structs.replace(runs[0], trials=tuple(trial for run in runs for trial in run.trials))


def filled_columns(rows: Rows, columns: Sequence[Column], *, keep: bool = False) -> list[Column]:
    """The columns that a row has; with `keep`, those that are not optional as well."""
    return [
        column
        for column in columns
        if (keep and not column.optional) or any(value is not None for value in rows[column.name])
    ]


def _first_divergences(frame: pd.DataFrame) -> "pd.Series[str]":
    """The earliest position over the sessions, or that there is none; None where logits were not compared."""
    pairs = zip(frame["first_divergence_token"], frame["num_diverging_sessions"], strict=True)
    shown = [None if pd.isna(number) else "none" if number == 0 else show_count(first) for first, number in pairs]
    return pd.Series(shown, index=frame.index, dtype="string")


def row_names(rows: Rows) -> list[str]:
    """The strategy, with its status where that is not ok and its rung where there are several."""
    mixed = len(set(rows["evidence"])) > 1
    names = []
    for strategy, status, evidence in zip(rows["strategy"], rows["status"], rows["evidence"], strict=True):
        marks = [mark for mark, said in ((status, status != "ok"), (evidence, mixed)) if said]
        names.append(f"{strategy} ({', '.join(marks)})" if marks else strategy)
    return names


def rows_table(rows: Rows, columns: Sequence[Column], names: Sequence[str]) -> str:
    """A table of some columns, each row under its name."""
    titles, lines = format_columns(rows, columns)
    labelled = [[name, *line] for name, line in zip(names, lines, strict=True)]
    return render_table(["strategy", *titles], labelled, "l" + "r" * len(titles))


def render_analytic_card(records: Sequence[RunRecord], *, of_traces: bool = False) -> str:
    """The analytic card of each workload, and what it assumes; of traces where no cell was run."""
    frame = analytic_frame(records, of_traces=of_traces)
    blocks = [
        section(f"Workload: {workload}", rows_table(rows, ANALYTIC_CARD_COLUMNS, rows["strategy"]), level=3)
        for (workload,), rows in plain_groups(frame, "workload").items()
    ]
    return "\n\n".join([*blocks, section("Assumptions", bullets(_assumptions(records)), level=3)])


def _assumptions(records: Sequence[RunRecord]) -> list[str]:
    """Each assumption once, after the cells that make it; a workload alone stands for all its cells."""
    makers: dict[str, list[RunRecord]] = {}
    known = [(record, bound) for record in records if (bound := analytic_bound(record)) is not None]
    for record, bound in known:
        for assumption in bound.assumptions:
            makers.setdefault(assumption, []).append(record)
    everyone = [record for record, _ in known]
    return [f"{', '.join(_cell_names(cells, everyone))}: {text}" for text, cells in makers.items()]


def _cell_names(cells: Sequence[RunRecord], everyone: Sequence[RunRecord]) -> list[str]:
    if len(cells) == len(everyone):
        return ["every cell"]
    per_workload = Counter(record.spec.workload.label for record in everyone)
    chosen = Counter(record.spec.workload.label for record in cells)
    names = [
        workload if chosen[workload] == per_workload[workload] else record.spec.label
        for record in cells
        for workload in (record.spec.workload.label,)
    ]
    return list(dict.fromkeys(names))


def render_spread(records: Sequence[RunRecord]) -> str:
    """Medians with their intervals, and percentiles of single latencies, for every cell that was timed."""
    timed = [record for record in records if summarize_ttft(record) is not None]
    if not timed:
        return ""
    titles = ["cell", "trials", "coverage", "TTFT (ms)", "TPOT (ms)", "ITL p50 (ms)", "ITL p99 (ms)"]
    table = render_table(titles, [_spread_row(record) for record in timed], "lrrrrrr")
    return f"{table}\n\n{SWAPPED}" if any(map(is_swapped, timed)) else table


def _spread_row(record: RunRecord) -> list[str]:
    ttft, tpot = summarize_ttft(record), summarize_tpot(record)
    times = (
        _show_interval(ttft),
        _show_interval(tpot),
        show_ms(itl_percentile_s(record, 50)),
        show_ms(itl_percentile_s(record, 99)),
    )
    return [
        record.spec.label,
        MISSING if ttft is None else show_share(ttft.samples, record.spec.measurement.trials),
        _coverage(tpot or ttft),
        *(mark_swapped(time, is_swapped(record)) for time in times),
    ]


def _coverage(interval: Interval | None) -> str:
    return "min to max" if interval is None or interval.confidence is None else f"{interval.confidence:.1%}"


def _show_interval(interval: Interval | None) -> str:
    if interval is None:
        return MISSING
    return f"{show_ms(interval.median)} ({show_ms(interval.low)} to {show_ms(interval.high)})"
