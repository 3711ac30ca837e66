"""The options of `offload-eval link`."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from offload_eval.cli.ending import end
from offload_eval.cli.option_types import DeviceChoice, JsonOption


def link(
    device: Annotated[DeviceChoice, typer.Option(help="Whose link: on cpu it is emulated.")] = DeviceChoice.AUTO,
    most_mib: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65536,
            help="The largest copy, cut to a power of two. Default: 512 on cuda, 64 on cpu; less if memory is short.",
            show_default=False,
            metavar="MiB",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=3, max=1000, help="Samples of each copy, after a warm-up.")] = 9,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write a hardware profile for `--hardware` of plan and trace.",
            show_default=False,
            metavar="FILE.yaml",
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="With --out: takes memory bandwidth and peaks from this profile: a YAML file or a name.",
            show_default=False,
        ),
    ] = None,
    json_output: JsonOption = False,
) -> NoReturn:
    """Calibrate this machine's link: time verified copies both ways, fit latency and bandwidth."""

    def body() -> int:
        from offload_eval.cli.link import link_command

        return link_command(
            device=device.value,
            most_mib=most_mib,
            repeats=repeats,
            out=out,
            hardware=hardware,
            json_output=json_output,
        )

    end(body)
