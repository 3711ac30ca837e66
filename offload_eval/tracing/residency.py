"""What `resident_share: auto` stands for: the most resident layers whose traced peaks a budget leaves room for."""

from typing import Any

from msgspec.structs import replace

from offload_eval.bounds.limit_search import largest_that_fits
from offload_eval.core.experiment import DeviceName, StreamedSpec, Workload
from offload_eval.strategies.streamed import num_streamable
from offload_eval.tracing.trace import trace_strategy


def resolve_auto(
    model: Any,
    strategy: StreamedSpec,
    workload: Workload,
    available_bytes: int,
    *,
    device: DeviceName,
) -> StreamedSpec:
    """Finds the share by a few traces.

    Args:
        model: As for `trace_strategy`.
        strategy: With `resident_share: auto`.
        workload: What it is to run.
        available_bytes: Device bytes for weights, cache and activations.
        device: As for `trace_strategy`.

    Returns:
        The strategy under the same label with the share in place of `auto`: 0, where not even that fits.

    Raises:
        UnableError: As for `trace_strategy`.
    """
    num_layers = num_streamable(model.config)

    def with_resident(count: int) -> StreamedSpec:
        return replace(strategy, name=strategy.label, resident_share=count / num_layers)

    def peak_bytes(count: int) -> int:
        asked = with_resident(count)
        trace = trace_strategy(model, asked, workload, device=device)
        return max(trace.prefill.peak_device_bytes, trace.decode_peak_device_bytes)

    return with_resident(largest_that_fits(peak_bytes, available_bytes, num_layers, most=num_layers))
