"""Options that several commands take."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class DeviceChoice(StrEnum):
    """What `--device` takes."""

    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
OptionalExperiment = Annotated[
    Path | None, typer.Argument(help="An experiment file; options replace its values.", show_default=False)
]
ModelOption = Annotated[
    str | None,
    typer.Option(help="A config.json, a folder that holds one, or a preset such as llama-3.1-8b.", show_default=False),
]
OverridesOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Replace one value of the file.", show_default=False),
]
