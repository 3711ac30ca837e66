"""`offload-eval history`: the same cells across many run directories."""

from pathlib import Path

import msgspec

from offload_eval.analysis.history import KeptRun, make_history, record_digests
from offload_eval.cli.console import print_json, progress_console, result_console
from offload_eval.core.history import HistoryRow, SkippedDirectory
from offload_eval.errors import ExitCode, InputError, OffloadEvalError, UnableError
from offload_eval.reporting.figures.page_plates import history_plates
from offload_eval.reporting.history_tables import history_frame, render_history
from offload_eval.reporting.history_terminal import render_history_terminal
from offload_eval.reporting.html_page import render_html
from offload_eval.reporting.table_text import csv_text
from offload_eval.store.run_directory import RunDirectory
from offload_eval.store.run_search import find_run_directories
from offload_eval.store.whole_file import write_whole


def history_command(*, directory: Path, out: Path | None, json_output: bool) -> int:
    """Prints how each cell came out in every run below a directory, and what changed in between.

    Args:
        directory: Looked through with everything below it.
        out: A directory for history.md, history.html and history.csv, which are replaced; None: they are not written.
        json_output: Print one JSON object instead of tables.

    Raises:
        InputError: Not a directory, or no run in it.
        UnableError: The files cannot be written.
    """
    runs, skipped = _read_runs(directory)
    rows = make_history(runs)
    if not rows:
        raise InputError(f"{directory}: no run with records is in it or below it{_reasons(skipped)}")
    if out is not None:
        _write(out, rows, skipped)
    if json_output:
        answer = {"directory": str(directory), "rows": rows, "skipped": skipped}
        print_json(msgspec.json.encode(answer).decode())
    else:
        result_console().print(render_history_terminal(rows, skipped))
    return ExitCode.DONE


def _read_runs(root: Path) -> tuple[list[KeptRun], list[SkippedDirectory]]:
    runs: list[KeptRun] = []
    skipped: list[SkippedDirectory] = []
    known: dict[bytes, str] = {}
    for path in find_run_directories(root):
        name = str(path.relative_to(root))
        try:
            directory = RunDirectory.read(path)
        except (OffloadEvalError, OSError) as error:
            skipped.append(SkippedDirectory(path=name, reason=str(error)))
            continue
        records = directory.records()
        made = record_digests(records)
        if made <= known.keys():
            reason = f"a copy: {known[min(made)]} has all its records" if made else "no cell has finished"
            skipped.append(SkippedDirectory(path=name, reason=reason))
            continue
        known |= dict.fromkeys(made - known.keys(), name)
        runs.append(KeptRun(name, directory.experiment, records))
    return runs, skipped


def _reasons(skipped: list[SkippedDirectory]) -> str:
    return "".join(f"; {each.path}: {each.reason}" for each in skipped)


def _write(out: Path, rows: tuple[HistoryRow, ...], skipped: list[SkippedDirectory]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        text = render_history(rows, skipped)
        write_whole(out / "history.md", text)
        write_whole(out / "history.html", render_html(text, {}, history_plates(rows)))
        write_whole(out / "history.csv", csv_text(history_frame(rows)))
    except OSError as error:
        raise UnableError(f"--out {out}: cannot be written: {error.strerror}") from error
    files = ", ".join(str(out / f"history.{ending}") for ending in ("md", "html", "csv"))
    progress_console().out(f"history: {files}", highlight=False)
