"""What a trace says that a whole run moves: its traced steps, and those between them where that is certain."""

from typing import NamedTuple

from offload_eval.core.records import RunRecord
from offload_eval.core.trace import PhaseTrace, StepTrace, Trace

_FIELDS = ("h2d_bytes", "d2h_bytes", "num_h2d_copies", "num_d2h_copies")


class MovedTotals(NamedTuple):
    """Of the whole batch, over one phase."""

    h2d_bytes: int
    d2h_bytes: int
    num_h2d_copies: int
    num_d2h_copies: int

    def less(self, other: "MovedTotals") -> "MovedTotals":
        """What is left without another's."""
        return MovedTotals(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


def traced_prefill(trace: Trace) -> MovedTotals:
    """What the prefill moves."""
    return _moved(trace.prefill)


def traced_decode(record: RunRecord, trace: Trace) -> MovedTotals | None:
    """What all decode steps move, summed over the traced ones and the line between them.

    With full attention a step moves the same more than the step before it, up to the last but one; the last may fetch
    nothing ahead and is traced itself. Rows have one size, whatever the host's form. With windows the growth has a
    bend.

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


def traced_decode_of_model(baseline: Trace) -> MovedTotals | None:
    """What all decode steps of a cache on the device move: the model's own copies, such as a position for its rotary.

    Returns:
        None where steps were left out and the first and the last of them differ.
    """
    num_steps = baseline.workload.output_tokens - 1
    if len(baseline.steps) == num_steps:
        return _sum(list(baseline.steps))
    first, last = _moved(baseline.steps[0]), _moved(baseline.steps[-1])
    return MovedTotals(*(num_steps * count for count in first)) if first == last else None


def _grows_evenly(record: RunRecord) -> bool:
    shape = record.model.shape
    return shape is not None and all(group.window_tokens is None for group in shape.layer_groups)


def _moved(phase: PhaseTrace) -> MovedTotals:
    return MovedTotals(*(getattr(phase, name) for name in _FIELDS))


def _sum(steps: list[StepTrace]) -> MovedTotals:
    return MovedTotals(*(sum(getattr(step, name) for step in steps) for name in _FIELDS))
