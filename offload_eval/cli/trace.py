"""`offload-eval trace`: the real code on tensors without data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from offload_eval.bounds.latency import bound_latency
from offload_eval.cli.console import print_json, progress_console, result_console
from offload_eval.cli.trace_inputs import TraceRequest, trace_request
from offload_eval.core.experiment import StrategySpec, Workload
from offload_eval.core.hardware import HardwareProfile
from offload_eval.core.trace import TracedCell
from offload_eval.errors import ExitCode, InputError, UnableError
from offload_eval.execution.model_loading import build_traceable, load_config
from offload_eval.reporting.trace_text import render_traces
from offload_eval.store.hardware_file import load_hardware
from offload_eval.tracing.admission import trace_admission
from offload_eval.tracing.trace import trace_strategy


def trace_command(
    *,
    experiment: Path | None,
    model: str | None,
    counts: Mapping[str, str | None],
    strategies: list[str],
    options: Mapping[str, Any],
    overrides: list[str],
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
    request = trace_request(experiment, model, counts, strategies, options, overrides, device)
    _check_lengths(request)
    torch.set_num_threads(1)
    tracing = _Tracing(
        request, build_traceable(request.model, load_config(request.model)), profile, prefill_chunk_tokens
    )
    cells = list(tracing.cells())
    if json_output:
        print_json(msgspec.json.encode(_document(request, cells)).decode())
        return ExitCode.DONE
    console = result_console()
    for part in render_traces(request.name, request.model, cells):
        console.print(part, highlight=False)
    return ExitCode.DONE


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
    model: Any
    hardware: HardwareProfile | None
    prefill_chunk_tokens: int | None

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
            trace = trace_strategy(
                self.model,
                strategy,
                workload,
                device=request.device,
                prefill_chunk_tokens=self.prefill_chunk_tokens,
            )
        except UnableError as error:
            return msgspec.structs.replace(cell, refusal=str(error))
        latency = admission = None
        if self.hardware is not None:
            latency = bound_latency(trace, request.shape, self.hardware, request.model.dtype)
        if request.available_bytes is not None:
            admission = trace_admission(
                self.model,
                strategy,
                workload,
                request.available_bytes,
                device=request.device,
                prefill_chunk_tokens=self.prefill_chunk_tokens,
                first=trace,
            )
        return msgspec.structs.replace(cell, trace=trace, latency=latency, admission=admission)


class _NoStatus:
    """Stands for the line of progress where there is no terminal."""

    def __enter__(self) -> "_NoStatus":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def update(self, text: str) -> None:
        """Shows nothing."""


def _document(request: TraceRequest, cells: list[TracedCell]) -> dict[str, Any]:
    """The contract for scripts: `strategies[]` with `prefill` and `decode` (of one step: the last)."""
    traced = next((cell.trace for cell in cells if cell.trace is not None), None)
    return {
        "evidence": "traced",
        "model": request.name,
        "dtype": request.model.dtype,
        "device": request.device,
        "attn_implementation": request.model.attn_implementation,
        "weights_bytes": None if traced is None else traced.weights_bytes,
        "available_bytes": request.available_bytes,
        "strategies": [_strategy(cell) for cell in cells],
    }


def _strategy(cell: TracedCell) -> dict[str, Any]:
    trace = cell.trace
    return {
        "kind": cell.kind,
        "strategy": cell.strategy,
        "workload": cell.workload,
        "refusal": cell.refusal,
        "spec": None if trace is None else trace.workload,
        "prefill": None if trace is None else trace.prefill,
        "decode": None if trace is None else trace.decode,
        "decode_peak_device_bytes": None if trace is None else trace.decode_peak_device_bytes,
        "steps": [] if trace is None else trace.steps,
        "latency": cell.latency,
        "admission": cell.admission,
        "assumptions": () if trace is None else trace.assumptions,
    }
