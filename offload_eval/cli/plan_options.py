"""The options of `offload-eval plan`; each that stands for a value of an experiment names its place in the file."""

from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from offload_eval.cli.ending import end
from offload_eval.cli.option_types import JsonOption, ModelOption, OptionalExperiment, OverridesOption, Typed

_GIB: Final = "GiB"
EXPERIMENT_PLACES: Final[dict[str, tuple[str, ...]]] = {
    "vram_gib": ("budget", "device_bytes"),
    "weights_gib": ("budget", "weights_bytes"),
    "runtime_gib": ("budget", "runtime_bytes"),
    "reserve_gib": ("budget", "reserve_bytes"),
    "dtype": ("model", "dtype"),
    "activations_gib": ("plan", "activations_bytes"),
    "estimate_activations": ("plan", "estimate_activations"),
    "prefill_chunk_size": ("plan", "prefill_chunk_tokens"),
    "encoder_tokens": ("plan", "encoder_tokens"),
    "kv_cache_dtype": ("plan", "paging", "kv_cache_dtype"),
    "block_size": ("plan", "paging", "block_tokens"),
    "q_group_size": ("plan", "paging", "q_group_size"),
    "residual_length": ("plan", "paging", "residual_length"),
    "tp": ("plan", "partition", "tensor_parallel"),
    "pp": ("plan", "partition", "pipeline_parallel"),
    "dp": ("plan", "partition", "data_parallel"),
    "host_gib": ("plan", "host", "memory_bytes"),
    "host_limit_gib": ("plan", "host", "limit_bytes"),
    "host_reserve_gib": ("plan", "host", "reserve_bytes"),
    "long_requests": ("plan", "long_requests", "action"),
    "max_request_tokens": ("plan", "long_requests", "max_request_tokens"),
}
"""Option -> the value of an experiment that it replaces."""


def _size(text: str, help_text: str) -> Any:
    return typer.Option(text, help=help_text, show_default=False, metavar=_GIB)


def _number(text: str, help_text: str) -> Any:
    return typer.Option(text, help=help_text, show_default=False)


def _counts(text: str, help_text: str) -> Any:
    return typer.Option(text, help=help_text, show_default=False, metavar="N[,N...]|START:STOP:STEP")


def plan(
    context: typer.Context,
    experiment: OptionalExperiment = None,
    model: ModelOption = None,
    prompt_tokens: Annotated[str | None, _counts("--prompt-tokens", "Prompt tokens a session.")] = None,
    output_tokens: Annotated[
        str | None, _counts("--output-tokens", "Generated tokens a session; 0: the prompt alone.")
    ] = None,
    batch_size: Annotated[str | None, _counts("--batch-size", "Sessions of one batch.")] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            metavar="KIND[:KEY=VALUE,...]",
            help="paged, dynamic, static, offloaded, offloaded_static, streamed or quantized, as in "
            "quantized:backend=hqq,nbits=2. Repeatable. The first one's admission is the answer.",
            show_default=False,
        ),
    ] = None,
    vram_gib: Annotated[float | None, _size("--vram-gib", "Memory of one device.")] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Bound decode steps by a profile's link, and take its memory where no budget is stated: a YAML file, "
            "or a name such as h100-sxm.",
            show_default=False,
        ),
    ] = None,
    weights_gib: Annotated[float | None, _size("--weights-gib", "Weights of the whole model.")] = None,
    runtime_gib: Annotated[float | None, _size("--runtime-gib", "Outside the allocator, on each device.")] = None,
    reserve_gib: Annotated[float | None, _size("--reserve-gib", "Kept free on each device.")] = None,
    activations_gib: Annotated[float | None, _size("--activations-gib", "Kept for activations.")] = None,
    estimate_activations: Annotated[
        bool | None,
        typer.Option(
            "--estimate-activations",
            help="Take activations from the closed form of a dense prefill.",
            show_default=False,
        ),
    ] = None,
    prefill_chunk_size: Annotated[int | None, _number("--prefill-chunk-size", "Tokens prefilled at once.")] = None,
    dtype: Annotated[str | None, _number("--dtype", "dtype of the model: bfloat16, float16, float32.")] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            help="Format of a paged engine's cache: auto, bfloat16, float16, float32, fp8, int8, int4, int2.",
            show_default=False,
        ),
    ] = None,
    block_size: Annotated[int | None, _number("--block-size", "Tokens of a paged engine's block.")] = None,
    q_group_size: Annotated[int | None, _number("--q-group-size", "Values with one scale and zero point.")] = None,
    residual_length: Annotated[int | None, _number("--residual-length", "Newest tokens left unquantized.")] = None,
    encoder_tokens: Annotated[int | None, _number("--encoder-tokens", "Tokens cross-attention reads.")] = None,
    tp: Annotated[int | None, _number("--tp", "Tensor-parallel ranks.")] = None,
    pp: Annotated[int | None, _number("--pp", "Pipeline-parallel stages.")] = None,
    dp: Annotated[int | None, _number("--dp", "Replicas.")] = None,
    host_gib: Annotated[float | None, _size("--host-gib", "RAM of the host.")] = None,
    host_limit_gib: Annotated[float | None, _size("--host-limit-gib", "Limit of the control group or pod.")] = None,
    host_reserve_gib: Annotated[float | None, _size("--host-reserve-gib", "Of the host, not for pinned KV.")] = None,
    long_requests: Annotated[
        str | None,
        typer.Option(
            help="What becomes of a request over the cap or the context: refuse, queue, suggest.", show_default=False
        ),
    ] = None,
    max_request_tokens: Annotated[
        int | None, _number("--max-request-tokens", "Cap on prompt and generated tokens together.")
    ] = None,
    overrides: OverridesOption = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write every cell as CSV; - is standard output.", show_default=False)
    ] = None,
    list_presets: Annotated[
        bool, typer.Option("--list-presets", help="List the presets that --model takes, and exit.")
    ] = False,
    json_output: JsonOption = False,
) -> NoReturn:
    """Bound sessions and KV bytes from a config.json: an upper bound, in closed form, for any mix of lengths."""

    def body() -> int:
        from offload_eval.cli.plan import plan_command, show_presets

        if list_presets:
            return show_presets(json_output=json_output)
        return plan_command(
            Typed.of(context, EXPERIMENT_PLACES), hardware=hardware, csv_path=csv, json_output=json_output
        )

    end(body)
