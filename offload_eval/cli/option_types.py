"""Options that several commands take."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

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


@dataclass(frozen=True, kw_only=True)
class Typed:
    """What was typed for a command that works on an experiment, a model, or both."""

    experiment: Path | None
    """Of its sections only those that the arithmetic needs are required."""
    model: str | None
    """A config.json, a folder or a preset; replaces the experiment's."""
    counts: Mapping[str, str | None]
    """`prompt_tokens`, `output_tokens` and `batch_size`; what is None comes from the experiment."""
    strategies: Sequence[str] = ()
    """None: the experiment's, or the command's default ones."""
    options: Mapping[str, Any]
    """Those that were given of the options that stand for a value of an experiment."""
    overrides: Sequence[str] = ()
    """`key.path=value` each."""

    @classmethod
    def of(cls, context: typer.Context, places: Collection[str]) -> Self:
        """Reads a command's parameters, with `places` the options that stand for a value of an experiment."""
        params = context.params
        return cls(
            experiment=params["experiment"],
            model=params["model"],
            counts={name: params[name] for name in ("prompt_tokens", "output_tokens", "batch_size")},
            strategies=params["strategy"] or (),
            options={name: params[name] for name in places if params[name] is not None},
            overrides=params["overrides"] or (),
        )
