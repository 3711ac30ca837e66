"""What a trace says that a whole run moves: its traced steps, and those between them where that is certain."""

from typing import NamedTuple

from offload_eval.core.experiment import StreamedSpec
from offload_eval.core.records import RunRecord
from offload_eval.core.trace import PhaseTrace, StepTrace, Trace

_FIELDS = ("h2d_bytes", "d2h_bytes", "num_h2d_copies", "num_d2h_copies")


class MovedTotals(NamedTuple):
    """Of the whole batch, over one phase."""

    h2d_bytes: int
    d2h_bytes: int
    num_h2d_copies: int
    num_d2h_copies: int


def traced_prefill(trace: Trace) -> MovedTotals:
    """What the prefill moves."""
    return _moved(trace.prefill)


def traced_decode(record: RunRecord, trace: Trace) -> MovedTotals | None:
    """What all decode steps move, summed over the traced ones and the line between them.

    With full attention a step moves the same more than the step before it, up to the last but one; the last may fetch
    nothing ahead and is traced itself. With windows the growth has a bend, and blocks of a quantizer may fill up.

    Returns:
        None where steps were left out and their sum is not certain.
    """
    num_steps = trace.workload.output_tokens - 1
    steps = {step.step: step for step in trace.steps}
    if len(steps) == num_steps:
        return _sum(list(steps.values()))
    last_but_one = num_steps - 1
    if not _grows_evenly(record) or not {1, last_but_one, num_steps} <= steps.keys():
        return None
    first, late = _moved(steps[1]), _moved(steps[last_but_one])
    sums = [(low + high) * last_but_one for low, high in zip(first, late, strict=True)]
    if any(total % 2 for total in sums):
        return None
    last = _moved(steps[num_steps])
    return MovedTotals(*(total // 2 + end for total, end in zip(sums, last, strict=True)))


def _grows_evenly(record: RunRecord) -> bool:
    shape, strategy = record.model.shape, record.spec.strategy
    if shape is None or any(group.window_tokens is not None for group in shape.layer_groups):
        return False
    return not isinstance(strategy, StreamedSpec) or strategy.host_dtype == "native"


def _moved(phase: PhaseTrace) -> MovedTotals:
    return MovedTotals(*(getattr(phase, name) for name in _FIELDS))


def _sum(steps: list[StepTrace]) -> MovedTotals:
    return MovedTotals(*(sum(getattr(step, name) for step in steps) for name in _FIELDS))
