"""The options of `offload-eval trace`; each that stands for a value of an experiment names its place in the file."""

from typing import Annotated, Final, NoReturn

import typer

from offload_eval.cli.ending import end
from offload_eval.cli.option_types import JsonOption, ModelOption, OptionalExperiment, OverridesOption, Typed

EXPERIMENT_PLACES: Final[dict[str, tuple[str, ...]]] = {
    "dtype": ("model", "dtype"),
    "attn": ("model", "attn_implementation"),
    "vram_gib": ("budget", "device_bytes"),
    "runtime_gib": ("budget", "runtime_bytes"),
    "reserve_gib": ("budget", "reserve_bytes"),
}
"""Option -> the value of an experiment that it replaces."""


def trace(
    context: typer.Context,
    experiment: OptionalExperiment = None,
    model: ModelOption = None,
    prompt_tokens: Annotated[
        str | None, typer.Option(help="Prompt tokens a session.", show_default=False, metavar="N[,N...]")
    ] = None,
    output_tokens: Annotated[
        str | None,
        typer.Option(help="Generated tokens a session, from 2; left out: 3.", show_default=False, metavar="N[,N...]"),
    ] = None,
    batch_size: Annotated[
        str | None, typer.Option(help="Sessions of one batch.", show_default=False, metavar="N[,N...]")
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            metavar="KIND[:KEY=VALUE,...]",
            help="dynamic, static, offloaded, offloaded_static, streamed or quantized, as in "
            "quantized:backend=hqq,nbits=2. Repeatable.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="dtype of the model: bfloat16, float16, float32.", show_default=False)
    ] = None,
    attn: Annotated[
        str | None,
        typer.Option(help="Attention: sdpa, eager, flash_attention_2 (no package is needed).", show_default=False),
    ] = None,
    prefill_chunk_size: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens prefilled at once.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="Whose kernels are followed: cuda or cpu. None is needed.")] = "cuda",
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Bound times on a hardware profile: a YAML file, or a name such as h100-sxm.", show_default=False
        ),
    ] = None,
    vram_gib: Annotated[
        float | None,
        typer.Option(
            help="Memory of the device: searches the largest batch that fits.", show_default=False, metavar="GiB"
        ),
    ] = None,
    runtime_gib: Annotated[
        float | None, typer.Option(help="Outside the allocator.", show_default=False, metavar="GiB")
    ] = None,
    reserve_gib: Annotated[float | None, typer.Option(help="Kept free.", show_default=False, metavar="GiB")] = None,
    overrides: OverridesOption = None,
    json_output: JsonOption = False,
) -> NoReturn:
    """Run the real modeling code and caches on tensors without data: peaks, contributors, bytes over the link."""

    def body() -> int:
        from offload_eval.cli.trace import trace_command

        return trace_command(
            Typed.of(context, EXPERIMENT_PLACES),
            prefill_chunk_tokens=prefill_chunk_size,
            device=device,
            hardware=hardware,
            json_output=json_output,
        )

    end(body)
