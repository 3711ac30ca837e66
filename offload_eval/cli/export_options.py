"""The options of `offload-eval export` and `offload-eval history`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from offload_eval.cli.ending import end
from offload_eval.cli.option_types import JsonOption


class TableChoice(StrEnum):
    """What `--what` takes."""

    CELLS = "cells"
    TRIALS = "trials"
    LIMITS = "limits"
    MEMORY = "memory"
    TRANSFERS = "transfers"
    TRACES = "traces"


class FormatChoice(StrEnum):
    """What `--format` takes."""

    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


def export(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run, finished or not.", show_default=False)],
    form: Annotated[
        FormatChoice | None,
        typer.Option("--format", help="Default: by the file's name, else csv.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A file, or a directory to put one in. Default: standard output.", show_default=False),
    ] = None,
    what: Annotated[TableChoice, typer.Option(help="The table.")] = TableChoice.CELLS,
    json_output: JsonOption = False,
) -> NoReturn:
    """Give one table of a run to other programs: SI units, one row for each thing, the same columns for every run."""

    def body() -> int:
        from offload_eval.cli.export import export_command

        return export_command(
            run_dir=run_dir,
            what=what.value,
            form=form.value if form else None,
            out=out,
            json_output=json_output,
        )

    end(body)


def history(
    directory: Annotated[
        Path, typer.Argument(help="Directory with run directories in it, at any depth.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="Directory for history.md, .html and .csv.", show_default=False)
    ] = None,
    json_output: JsonOption = False,
) -> NoReturn:
    """Show how each cell came out in every run below a directory, and what changed in between."""

    def body() -> int:
        from offload_eval.cli.history import history_command

        return history_command(directory=directory, out=out, json_output=json_output)

    end(body)
