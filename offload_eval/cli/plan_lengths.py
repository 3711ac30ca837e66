"""The lengths and batches of a plan: those typed, the experiment's workloads, or its population's groups."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from offload_eval.bounds.plan_request import PlanWorkload
from offload_eval.core.experiment import Experiment
from offload_eval.core.factors import expand_workloads
from offload_eval.errors import InputError

MOST_WORKLOADS: Final = 5_000_000
_LIMITS: Final = {"prompt_tokens": (1, 2**24), "output_tokens": (0, 2**24), "batch_size": (1, 65_536)}
_RANGE: Final = re.compile(r"(?P<start>\d{1,8}):(?P<stop>\d{1,8}):(?P<step>\d{1,8})", re.ASCII)
_NUMBER: Final = re.compile(r"\d{1,8}", re.ASCII)


def plan_workloads(
    counts: Mapping[str, str | None], asked: Experiment, given: Collection[str], file: Path | None
) -> list[PlanWorkload]:
    """Lists what is to be planned, each combination once.

    Args:
        counts: `prompt_tokens`, `output_tokens` and `batch_size` as typed; one that is None keeps each workload's own.
        asked: The experiment.
        given: The sections that its file has; of the others nothing is taken.
        file: The experiment's file.

    Raises:
        InputError: There are no lengths, what was typed is no count, or there are too many.
    """
    typed = {name: _read_counts(name, text) for name, text in counts.items() if text is not None}
    own = _own(asked, given)
    if not own and "prompt_tokens" not in typed:
        if typed:
            raise InputError(f"{_option(next(iter(typed)))} needs --prompt-tokens, or an experiment with workloads")
        raise InputError(f"{file}: no lengths: state workloads or plan.population, or give --prompt-tokens")
    if not typed:
        return own
    total = max(1, len(own)) * prod(map(len, typed.values()))
    if total > MOST_WORKLOADS:
        raise InputError(f"{total:,} combinations of lengths and batches; allowed: at most {MOST_WORKLOADS:,}")
    defaults = own or [PlanWorkload(name="", prompt_tokens=1, output_tokens=0, batch_size=1)]
    combinations = (combination for each in defaults for combination in _combinations(typed, each))
    return [
        PlanWorkload(
            name=f"b{batch}-p{prompt}-o{output}", prompt_tokens=prompt, output_tokens=output, batch_size=batch
        )
        for prompt, output, batch in dict.fromkeys(combinations)
    ]


def _combinations(typed: Mapping[str, Sequence[int]], own: PlanWorkload) -> Iterator[tuple[int, ...]]:
    return product(
        typed.get("prompt_tokens", [own.prompt_tokens]),
        typed.get("output_tokens", [own.output_tokens]),
        typed.get("batch_size", [own.batch_size]),
    )


def _own(asked: Experiment, given: Collection[str]) -> list[PlanWorkload]:
    """The experiment's workloads; without any, a batch of each group of its population.

    Of factors the batch alone counts: the plan's chunks are `plan.prefill_chunk_tokens`, and no attention is in it.
    """
    if "workloads" in given:
        batches = replace(asked.factors, prefill_chunk_tokens=(), attn_implementation=())
        workloads = (
            replace(workload, prefill_chunk_tokens=None, attn_implementation=None)
            for workload in expand_workloads(replace(asked, factors=batches))
        )
        planned = (
            PlanWorkload(
                name=workload.label,
                prompt_tokens=workload.prompt_tokens,
                output_tokens=workload.output_tokens,
                batch_size=workload.batch_size,
            )
            for workload in workloads
        )
        return list(dict.fromkeys(planned))
    return [
        PlanWorkload(
            name=group.name,
            prompt_tokens=group.prompt_tokens,
            output_tokens=group.max_new_tokens,
            batch_size=group.sessions * group.beams,
        )
        for group in asked.plan.population
    ]


def _read_counts(name: str, text: str) -> Sequence[int]:
    low, high = _LIMITS[name]
    form = f"integers from {low:,} to {high:,}: one, a list as in 1024,4096, or START:STOP:STEP, both ends included"
    ranges = [_read_piece(piece.strip()) for piece in text.split(",")]
    if any(values is None or not low <= values[0] <= values[-1] <= high for values in ranges):
        shown = text if len(text) <= 80 else f"{text[:80]}..."
        raise InputError(f"{_option(name)} {shown!r} is not allowed; allowed: {form}")
    read = [values for values in ranges if values is not None]
    return read[0] if len(read) == 1 else list(dict.fromkeys(value for values in read for value in values))


def _read_piece(piece: str) -> range | None:
    """None where the piece is no count, and no range that holds one."""
    if _NUMBER.fullmatch(piece):
        return range(int(piece), int(piece) + 1)
    match = _RANGE.fullmatch(piece)
    if match is None or int(match["step"]) == 0 or int(match["start"]) > int(match["stop"]):
        return None
    return range(int(match["start"]), int(match["stop"]) + 1, int(match["step"]))


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
