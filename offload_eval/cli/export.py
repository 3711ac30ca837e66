"""`offload-eval export`: one table of a run, for other programs."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import pandas as pd

from offload_eval.cli.console import print_json, progress_console
from offload_eval.errors import ExitCode, InputError, UnableError
from offload_eval.loaded_run import Run, What, load_run
from offload_eval.reporting.table_text import csv_text, plain_rows
from offload_eval.store.run_directory import EXPERIMENT_NAME, HARDWARE_NAME, MACHINE_NAME, POLICY_NAME, RECORDS_NAME
from offload_eval.store.whole_file import part_name, write_whole

_FORMATS: Final = ("csv", "json", "parquet")
_KEPT: Final = frozenset({EXPERIMENT_NAME, HARDWARE_NAME, MACHINE_NAME, POLICY_NAME, RECORDS_NAME})
_STANDARD_OUTPUT: Final = Path("-")


class _Target(NamedTuple):
    """Where a table goes, and as what."""

    file: Path | None
    """None: standard output."""
    form: str


def export_command(*, run_dir: Path, what: What, form: str | None, out: Path | None, json_output: bool) -> int:
    """Prints a table of a run, or writes it to a file, which is replaced whole.

    Args:
        run_dir: A run directory.
        what: The table.
        form: csv, json or parquet; None: by the file's name, else csv.
        out: A file, or a directory, which gets `<what>.<form>`; None and `-`: standard output.
        json_output: Without `out` the same as json; with it, say as JSON what was written.

    Raises:
        InputError: Not a run directory, or options that do not go together.
        UnableError: Parquet without pyarrow, or the file cannot be written.
    """
    target = _target(what, form, out, json_output=json_output)
    run = load_run(run_dir)
    _refuse_kept(run, target)
    frame = run.frame(what)
    if target.file is None:
        _print_table(run, what, frame, target.form)
        return ExitCode.DONE
    try:
        _write_table(run, what, frame, target.file, target.form)
    except OSError as error:
        raise UnableError(f"--out {target.file}: cannot be written: {error.strerror}") from error
    if json_output:
        said = {"run_dir": str(run.path), "what": what, "format": target.form, "file": str(target.file)}
        print_json(msgspec.json.encode(said | {"num_rows": len(frame), "columns": list(frame.columns)}).decode())
    else:
        progress_console().out(f"{len(frame):,} rows: {target.file}", highlight=False)
    return ExitCode.DONE


def _target(what: str, form: str | None, out: Path | None, *, json_output: bool) -> _Target:
    is_printed = out is None or out == _STANDARD_OUTPUT
    if is_printed and json_output and form not in (None, "json"):
        raise InputError(f"--json and --format {form} are two forms of one answer; give one of them, or --out FILE")
    if is_printed and form == "parquet":
        raise InputError("--format parquet: is not text; give --out FILE")
    if out is None or is_printed:
        return _Target(None, form or ("json" if json_output else "csv"))
    suffix = out.suffix.removeprefix(".")
    chosen = form or (suffix if suffix in _FORMATS and not out.is_dir() else "csv")
    if chosen == "parquet" and find_spec("pyarrow") is None:
        raise UnableError('parquet needs pyarrow, which is not installed: pip install "offload-eval[parquet]"')
    return _Target(out / f"{what}.{chosen}" if out.is_dir() else out, chosen)


def _refuse_kept(run: Run, target: _Target) -> None:
    """A table must not take the place of what it was made from."""
    if target.file is None:
        return
    if target.file.name in _KEPT and target.file.resolve().parent == run.path.resolve():
        raise InputError(f"--out {target.file}: is the run's own; choose another file")
    if not target.file.parent.is_dir():
        raise InputError(
            f"--out {target.file}: there is no directory {target.file.parent}; make it, or choose another"
        )


def _print_table(run: Run, what: str, frame: pd.DataFrame, form: str) -> None:
    if form == "json":
        print_json(_json_text(run, what, frame))
    else:
        sys.stdout.write(csv_text(frame))


def _json_text(run: Run, what: str, frame: pd.DataFrame) -> str:
    return msgspec.json.encode({"run_dir": str(run.path), "what": what, "rows": plain_rows(frame)}).decode()


def _write_table(run: Run, what: str, frame: pd.DataFrame, file: Path, form: str) -> None:
    if form == "parquet":
        part = file.with_name(part_name(file.name))
        frame.to_parquet(part, index=False)
        part.replace(file)
    else:
        write_whole(file, csv_text(frame) if form == "csv" else _json_text(run, what, frame) + "\n")
