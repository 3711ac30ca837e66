"""Wherever the times of a cell are shown that swap was in use around, they carry a mark, and nowhere else."""

import re
from collections.abc import Sequence

import pandas as pd
from factories import make_experiment, make_failure, make_record, make_streamed, make_trials
from rich.console import Console

from offload_eval.analysis.study import Study
from offload_eval.core.records import RunRecord
from offload_eval.reporting.report import render_report
from offload_eval.reporting.strategy_tables import SWAPPED
from offload_eval.reporting.tables import strategy_frame, trials_frame
from offload_eval.reporting.terminal import render_terminal
from offload_eval.reporting.transfer_tables import transfer_frame

CLEAN = [make_record(), make_streamed()]
SWAPPED_TRIALS = make_trials(
    0.015, swap_in_bytes=4096, decode=make_streamed().trials[0].decode, kv_cache_host_bytes=32_768
)
SWAPPED_CELLS = [make_record(), make_streamed(trials=SWAPPED_TRIALS)]


def report(records: Sequence[RunRecord]) -> str:
    return render_report(Study(make_experiment(), records))


def rows(text: str, heading: str, strategy: str = "streamed") -> list[dict[str, str]]:
    """Rows of a cell, by column, in the tables under headings that contain some words."""
    found = []
    for part in re.split(r"^#+ ", text, flags=re.M):
        lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in part.splitlines() if line[:1] == "|"]
        if heading in part.partition("\n")[0]:
            found += [dict(zip(lines[0], row, strict=True)) for row in lines if strategy in row[0]]
    return found


def terminal(records: Sequence[RunRecord]) -> str:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(render_terminal(Study(make_experiment(), records)))
    return captured.get()


def marked(row: dict[str, str]) -> set[str]:
    return {title for title, cell in row.items() if cell.endswith(" (swapped)")}


def test_the_cost_table_marks_ttft_tpot_and_throughput() -> None:
    """2 * 157 tokens in 0.5 + 156 * 0.015 s. The exposed time is of another pass."""
    (row,) = rows(report(SWAPPED_CELLS), "Time and transfer")
    assert marked(row) == {"TTFT (ms)", "TPOT (ms)", "tokens/s"}
    assert [row[title] for title in ("TPOT (ms)", "tokens/s")] == ["15.00 (swapped)", "110.6 (swapped)"]
    (clean,) = rows(report(SWAPPED_CELLS), "Time and transfer", "dynamic")
    assert marked(clean) == set()


def test_the_mark_is_explained_under_each_table_that_has_one() -> None:
    text = report(SWAPPED_CELLS)
    under_tables = re.findall(r"^\|.*\|\n\n(.*)$", text, re.M)
    assert under_tables.count(SWAPPED) == text.count(SWAPPED) == 3, "cost, spread and the transfers of decode"


def test_the_spread_marks_every_time() -> None:
    (row,) = rows(report(SWAPPED_CELLS), "Spread")
    assert marked(row) == {"TTFT (ms)", "TPOT (ms)", "ITL p50 (ms)", "ITL p99 (ms)"}


def test_the_transfers_mark_what_comes_from_the_timing_pass() -> None:
    (decode,) = rows(report(SWAPPED_CELLS), "Time of a decode step")
    assert marked(decode) == {"exposed by difference (ms)", "end latency (ms)"}


def test_sentences_mark_tpot_of_either_side() -> None:
    assert "TPOT 15.0 ms (swapped), 1.50x dynamic's 10.0 ms;" in report(SWAPPED_CELLS)
    other = [make_record(trials=make_trials(swap_out_bytes=1)), make_streamed()]
    assert "TPOT 15.0 ms, 1.50x dynamic's 10.0 ms (swapped);" in report(other)


def test_the_terminal_has_a_star_and_says_what_it_is() -> None:
    text = terminal(SWAPPED_CELLS)
    assert "15.00*" in text
    assert "10.00*" not in text
    assert "* swap was in use around the cell" in text
    assert max(map(len, text.splitlines())) <= 100


def test_nothing_is_marked_without_swap() -> None:
    text = report(CLEAN)
    assert "(swapped)" not in text.split("## Method")[0]
    assert SWAPPED not in text
    assert "*" not in terminal(CLEAN)


def test_tables_have_a_boolean_column() -> None:
    """Without a trial nobody has looked."""
    assert pd.isna(strategy_frame([make_failure("oom")])["swapped"][0])
    for frame in (strategy_frame(SWAPPED_CELLS), trials_frame(SWAPPED_CELLS), transfer_frame(SWAPPED_CELLS)):
        assert frame["swapped"].dtype == "boolean"
        assert bool(frame.groupby("strategy")["swapped"].all()["streamed"])
    assert not strategy_frame(SWAPPED_CELLS).set_index("strategy")["swapped"]["dynamic"]
