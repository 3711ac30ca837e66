"""The options of `offload-eval compare`."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from offload_eval.cli.ending import end
from offload_eval.cli.option_types import JsonOption


def compare(
    baseline: Annotated[Path, typer.Argument(help="Directory of the run that is held against.", show_default=False)],
    candidate: Annotated[Path, typer.Argument(help="Directory of the run that is judged.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for compare.md, .html, .json and .csv.", show_default=False),
    ] = None,
    gate: Annotated[
        Path | None,
        typer.Option(help="YAML with limits for each metric; exit code 1 where one is broken.", show_default=False),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(help="With --gate: its lines as JUnit XML, into this file.", show_default=False)
    ] = None,
    allow_mismatch: Annotated[
        bool,
        typer.Option(
            "--allow-mismatch", help="Compare runs of different hardware, rungs or model structures, and mark it."
        ),
    ] = False,
    json_output: JsonOption = False,
) -> NoReturn:
    """Say what is otherwise in one run than in another: states, times, memory, transfers, fidelity, limits."""

    def body() -> int:
        from offload_eval.cli.compare import compare_command

        return compare_command(
            baseline=baseline,
            candidate=candidate,
            out=out,
            gate=gate,
            junit=junit,
            allow_mismatch=allow_mismatch,
            json_output=json_output,
        )

    end(body)
