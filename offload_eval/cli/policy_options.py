"""The options of `offload-eval policy check` and `offload-eval policy apply`."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from offload_eval.cli.ending import end
from offload_eval.cli.option_types import DeviceChoice, JsonOption

policy_app = typer.Typer(
    help="Hold an admission policy against this machine, or against a population.", no_args_is_help=True
)
PolicyArgument = Annotated[Path, typer.Argument(help="A policy file.", show_default=False)]


@policy_app.command()
def check(
    policy: PolicyArgument,
    model: Annotated[
        str | None,
        typer.Option(
            help="Where the model is here: a folder, a file or a hub id. Default: where the policy says.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        DeviceChoice | None, typer.Option(help="Default: the policy's device.", show_default=False)
    ] = None,
    json_output: JsonOption = False,
) -> NoReturn:
    """Check whether a policy still holds here; exit code 1 where something it depends on is otherwise."""

    def body() -> int:
        from offload_eval.cli.policy_check import policy_check_command

        return policy_check_command(
            policy=policy, model=model, device=device.value if device else None, json_output=json_output
        )

    end(body)


@policy_app.command()
def apply(
    policy: PolicyArgument,
    population: Annotated[
        Path,
        typer.Argument(
            help="YAML with a list `population`, or an experiment with plan.population.", show_default=False
        ),
    ],
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy", metavar="LABEL", help="Of the policy. Repeatable. Default: all.", show_default=False
        ),
    ] = None,
    prefill_chunk_size: Annotated[
        int | None,
        typer.Option(min=1, max=2**24, help="Prompt tokens prefilled at once. Default: all.", show_default=False),
    ] = None,
    reserve_gib: Annotated[
        float,
        typer.Option(
            min=0, max=2**20, help="Kept free on top of the calibration's reserve.", metavar="GiB", show_default=False
        ),
    ] = 0.0,
    extrapolate: Annotated[
        bool,
        typer.Option("--extrapolate", help="Let the calibration answer for lengths and batches never measured."),
    ] = False,
    json_output: JsonOption = False,
) -> NoReturn:
    """Say how many sessions of each group are admitted, queued and refused, first in, first out."""

    def body() -> int:
        from offload_eval.cli.policy_apply import policy_apply_command

        return policy_apply_command(
            policy=policy,
            population=population,
            labels=strategy or [],
            prefill_chunk_tokens=prefill_chunk_size,
            reserve_gib=reserve_gib,
            extrapolate=extrapolate,
            json_output=json_output,
        )

    end(body)
