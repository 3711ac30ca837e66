"""The `offload-eval` command. A command's work is imported when it is called: `--help` is instant."""

from pathlib import Path
from typing import Annotated, Any

import typer

from offload_eval import __version__
from offload_eval.cli.compare_options import compare
from offload_eval.cli.ending import end
from offload_eval.cli.export_options import export, history
from offload_eval.cli.link_options import link
from offload_eval.cli.option_types import DeviceChoice, JsonOption
from offload_eval.cli.plan_options import plan
from offload_eval.cli.policy_options import policy_app
from offload_eval.cli.policy_settings import settings_command
from offload_eval.cli.trace_options import trace

ExperimentArgument = Annotated[Path, typer.Argument(help="The experiment file.", show_default=False)]
OutOption = Annotated[Path | None, typer.Option(help="Directory for the records and the report.", show_default=False)]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show the cells and their analytic bounds; measure nothing.")
]
TraceOnlyOption = Annotated[
    bool,
    typer.Option("--trace-only", help="Measure nothing: keep arithmetic and traces, also for a device not here."),
]
DeviceOption = Annotated[DeviceChoice | None, typer.Option(help="Replace the file's device.", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Replace one value of the file, as in workloads.0.batch_size=4. Repeatable.",
        show_default=False,
    ),
]
AllowMismatchOption = Annotated[
    bool,
    typer.Option(
        "--allow-mismatch",
        help="With --resume: continue even though the experiment or the machine changed.",
    ),
]

app = typer.Typer(
    help="Measures what offloading or quantizing the KV cache buys, beside the analytic bound.",
    epilog="Exit codes: 0 done; 1 a cell failed or timed out, a policy no longer holds or a gate is broken; 2 bad "
    "input; 3 this environment cannot do it; 130 interrupted.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Runs the command line and ends the process with the command's exit code."""
    app(prog_name="offload-eval")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"offload-eval {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Reads the options that stand before a command."""


@app.command()
def run(
    experiment: ExperimentArgument,
    out: OutOption = None,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
    trace_only: TraceOnlyOption = False,
    overrides: SetOption = None,
    device: DeviceOption = None,
    json_output: JsonOption = False,
    allow_mismatch: AllowMismatchOption = False,
) -> None:
    """Measure each strategy on each workload of an experiment."""
    _run(locals(), limits_alone=False)


@app.command()
def capacity(
    experiment: ExperimentArgument,
    out: OutOption = None,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
    trace_only: TraceOnlyOption = False,
    overrides: SetOption = None,
    device: DeviceOption = None,
    json_output: JsonOption = False,
    allow_mismatch: AllowMismatchOption = False,
) -> None:
    """Find the most sessions that really run in the budget, for each strategy and combination of lengths."""
    _run(locals(), limits_alone=True)


def _run(typed: dict[str, Any], *, limits_alone: bool) -> None:
    """Both commands take the same options, and differ in what they run."""

    def body() -> int:
        from offload_eval.cli.run import run_command

        device: DeviceChoice | None = typed["device"]
        values = {"overrides": typed["overrides"] or [], "device": device.value if device else None}
        return run_command(**typed | values, limits_alone=limits_alone)

    end(body)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run, finished or not.", show_default=False)],
    json_output: JsonOption = False,
) -> None:
    """Write the report of a run again from its records; nothing is measured."""

    def body() -> int:
        from offload_eval.cli.report import report_command

        return report_command(run_dir=run_dir, json_output=json_output)

    end(body)


@app.command()
def doctor(json_output: JsonOption = False) -> None:
    """Check what this environment can measure, and say how to add what is missing."""

    def body() -> int:
        from offload_eval.cli.doctor import doctor_command

        return doctor_command(json_output=json_output)

    end(body)


app.command()(plan)
app.command()(trace)
app.command()(link)
app.command()(export)
app.command()(history)
app.command()(compare)
policy_app.command("settings")(settings_command)
app.add_typer(policy_app, name="policy")
