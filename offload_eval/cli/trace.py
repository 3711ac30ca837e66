"""`offload-eval trace`: the real code on tensors without data."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import torch

from offload_eval.bounds.latency import bound_latency, check_hardware
from offload_eval.cli.console import print_json, progress_console, result_console
from offload_eval.cli.option_types import Typed
from offload_eval.cli.trace_inputs import TraceRequest, trace_request
from offload_eval.core.experiment import StrategySpec, StreamedSpec, Workload, is_auto
from offload_eval.core.hardware import HardwareProfile
from offload_eval.core.trace import Trace, TracedCell
from offload_eval.errors import ExitCode, InputError, UnableError
from offload_eval.execution.attention import TraceableModels
from offload_eval.execution.model_loading import load_config
from offload_eval.reporting.trace_text import moved_ratio, render_traces
from offload_eval.store.hardware_file import load_hardware
from offload_eval.tracing.admission import trace_admission
from offload_eval.tracing.residency import resolve_auto
from offload_eval.tracing.trace import trace_strategy

_TEXT_ALONE: Final = "Text alone is traced: a vision tower's weights count, and compute nothing."


def trace_command(
    typed: Typed,
    *,
    prefill_chunk_tokens: int | None,
    device: str,
    hardware: str | None,
    json_output: bool,
) -> int:
    """Traces every strategy on every workload and prints what was found.

    Returns:
        0, also where a strategy cannot be traced: that is an answer, with its reason.

    Raises:
        InputError: The file, an option, the model's config or the hardware profile is wrong.
    """
    profile = None if hardware is None else load_hardware(hardware)
    request = trace_request(typed, device, prefill_chunk_tokens)
    _check_lengths(request)
    if profile is not None:
        check_hardware(profile, request.model.dtype, [strategy.kind for strategy in request.strategies])
    torch.set_num_threads(1)
    request, models = _build(request)
    cells = list(_Tracing(request, models, profile).cells())
    if json_output:
        print_json(msgspec.json.encode(_document(request, cells)).decode())
        return ExitCode.DONE
    console = result_console()
    for part in render_traces(request.name, request.model, cells, request.notes):
        console.print(part, highlight=False)
    return ExitCode.DONE


def _build(request: TraceRequest) -> tuple[TraceRequest, TraceableModels]:
    """Builds the model without data: with eager attention where nobody chose one and the model lacks sdpa.

    Workloads may have other attentions; what those lack is refused when they are traced.
    """
    config = load_config(request.model)
    if config is not config.get_text_config(decoder=True):
        request = replace(request, notes=(*request.notes, _TEXT_ALONE))
    models = TraceableModels(request.model)
    try:
        models.with_attention(None)
        return request, models
    except InputError as error:
        if not request.attention_is_default or "attn_implementation" not in str(error):
            raise
    eager = msgspec.structs.replace(request.model, attn_implementation="eager")
    note = "This model has no sdpa attention: eager was traced, whose score matrix is counted."
    models = TraceableModels(eager)
    models.with_attention(None)
    return replace(request, model=eager, notes=(*request.notes, note)), models


def _check_lengths(request: TraceRequest) -> None:
    """Refuses a session that is longer than the model's context, as a run does."""
    context_tokens = None if request.shape is None else request.shape.max_position_embeddings
    for workload in request.workloads:
        total_tokens = workload.prompt_tokens + workload.output_tokens
        if context_tokens is not None and total_tokens > context_tokens:
            raise InputError(
                f"{workload.label}: {total_tokens:,} tokens of prompt and output; allowed: at most "
                f"{context_tokens:,}, the model's context. Nothing is truncated."
            )


@dataclass(frozen=True)
class _Tracing:
    request: TraceRequest
    models: TraceableModels
    hardware: HardwareProfile | None

    def cells(self) -> Iterator[TracedCell]:
        """One cell after another, with a line of progress on a terminal."""
        console = progress_console()
        pairs = [(workload, strategy) for workload in self.request.workloads for strategy in self.request.strategies]
        with console.status("") if console.is_terminal else _NoStatus() as status:
            for number, (workload, strategy) in enumerate(pairs, start=1):
                status.update(f"tracing {workload.label} / {strategy.label} ({number} of {len(pairs)})")
                yield self._cell(workload, strategy)

    def _cell(self, workload: Workload, strategy: StrategySpec) -> TracedCell:
        cell = TracedCell(kind=strategy.kind, strategy=strategy.label, workload=workload.label)
        request = self.request
        try:
            model, asked = self.models.with_attention(workload.attn_implementation), strategy
            if isinstance(strategy, StreamedSpec) and is_auto(strategy):
                assert request.available_bytes is not None, "a request without a budget has no auto"
                asked = resolve_auto(model, strategy, workload, request.available_bytes, device=request.device)
                strategy = msgspec.structs.replace(asked, resident_share=0.0)  # the most sessions fit without any
            trace = trace_strategy(model, asked, workload, device=request.device)
        except UnableError as error:
            return msgspec.structs.replace(cell, refusal=str(error))
        if self.hardware is not None:
            latency = bound_latency(trace, request.shape, self.hardware, request.model.dtype)
            cell = msgspec.structs.replace(cell, latency=latency)
        return self._with_admission(msgspec.structs.replace(cell, trace=trace), workload, strategy)

    def _with_admission(self, cell: TracedCell, workload: Workload, strategy: StrategySpec) -> TracedCell:
        if self.request.available_bytes is None:
            return cell
        try:
            admission = trace_admission(
                self.models.with_attention(workload.attn_implementation),
                strategy,
                workload,
                self.request.available_bytes,
                host_available_bytes=self.request.host_bytes,
                device=self.request.device,
                first=cell.trace if cell.trace is not None and cell.trace.strategy == strategy else None,
            )
        except UnableError as error:
            return msgspec.structs.replace(cell, admission_refusal=str(error))
        return msgspec.structs.replace(cell, admission=admission)


class _NoStatus:
    """Stands for the line of progress where there is no terminal."""

    def __enter__(self) -> "_NoStatus":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def update(self, text: str) -> None:
        """Shows nothing."""


def _document(request: TraceRequest, cells: list[TracedCell]) -> dict[str, Any]:
    """The contract for scripts: `strategies[]` with `prefill` and `decode`."""
    traced = next((cell.trace for cell in cells if cell.trace is not None), None)
    return {
        "evidence": "traced",
        "model": request.name,
        "dtype": request.model.dtype,
        "device": request.device,
        "attn_implementation": request.model.attn_implementation,
        "weights_bytes": None if traced is None else traced.weights_bytes,
        "available_bytes": request.available_bytes,
        "host_available_bytes": request.host_bytes,
        "notes": request.notes,
        "strategies": [_strategy(cell, cells) for cell in cells],
    }


def _decode(trace: Trace) -> dict[str, Any]:
    """The last step, with the highest peak of all that were traced, and the bytes of the step that moves most."""
    document: dict[str, Any] = msgspec.to_builtins(trace.decode)
    highest, busiest = trace.highest_step, trace.busiest_step
    for name in ("h2d_bytes", "d2h_bytes", "num_h2d_copies", "num_d2h_copies"):
        document[name] = getattr(busiest, name)
    return document | {
        "peak_device_bytes": highest.peak_device_bytes,
        "peak_step": highest.step,
        "contributors": msgspec.to_builtins(highest.contributors),
    }


def _strategy(cell: TracedCell, cells: list[TracedCell]) -> dict[str, Any]:
    trace = cell.trace
    return {
        "kind": cell.kind,
        "strategy": cell.strategy,
        "workload": cell.workload,
        "refusal": cell.refusal,
        "prefill": None if trace is None else trace.prefill,
        "decode": None if trace is None else _decode(trace),
        "moved_ratio": moved_ratio(cell, cells),
        "steps": [] if trace is None else trace.steps,
        "latency": cell.latency,
        "admission": cell.admission,
        "admission_refusal": cell.admission_refusal,
        "assumptions": () if trace is None else trace.assumptions,
    }
