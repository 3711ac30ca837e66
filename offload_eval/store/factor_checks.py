"""What is wrong with factors: values that change nothing, and cells that would come up twice."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from offload_eval.core.experiment import Experiment
from offload_eval.core.factors import FACTORS, asked_index, expand_workloads
from offload_eval.store.origin import KeyPath, show_value

_MOST_WORKLOADS: Final = 10_000
_NAME_CHARACTERS: Final = 80


def check_factors(experiment: Experiment) -> Iterator[tuple[KeyPath, str]]:
    """Yields where, and the value seen with what is allowed; nothing is dropped, and nothing run twice."""
    yield from _check_repeats(experiment)
    yield from _check_chunks(experiment)
    yield from _check_expanded(experiment)


def _check_repeats(experiment: Experiment) -> Iterator[tuple[KeyPath, str]]:
    for name in FACTORS:
        values = getattr(experiment.factors, name)
        for index, value in enumerate(values):
            if value in values[:index]:
                yield ("factors", name, index), f"{show_value(value)} is given twice; keep one"


def _check_chunks(experiment: Experiment) -> Iterator[tuple[KeyPath, str]]:
    """A chunk that holds the whole prompt is no chunk: the cell would be another one under a second name."""
    for index, workload in enumerate(experiment.workloads):
        chunk, prompt = workload.prefill_chunk_tokens, workload.prompt_tokens
        if chunk is not None and chunk >= prompt:
            yield (
                ("workloads", index, "prefill_chunk_tokens"),
                f"{chunk} has no effect on a prompt of {prompt} tokens; allowed: {_fewer_than(prompt)}",
            )
    shortest = min(experiment.workloads, key=lambda workload: workload.prompt_tokens)
    place, prompt = f"workloads[{experiment.workloads.index(shortest)}]", shortest.prompt_tokens
    for index, chunk in enumerate(experiment.factors.prefill_chunk_tokens):
        if chunk is not None and chunk >= prompt:
            yield (
                ("factors", "prefill_chunk_tokens", index),
                f"{chunk} has no effect on {place}, whose prompt has {prompt} tokens; allowed: {_fewer_than(prompt)}",
            )


def _fewer_than(prompt_tokens: int) -> str:
    return "null" if prompt_tokens == 1 else f"1 to {prompt_tokens - 1}, or null"


def _check_expanded(experiment: Experiment) -> Iterator[tuple[KeyPath, str]]:
    expanded = expand_workloads(experiment)
    if len(expanded) > _MOST_WORKLOADS:
        yield ("factors",), f"{len(expanded):,} workloads come of them; allowed: at most {_MOST_WORKLOADS:,}"
        return
    labels = [workload.label for workload in expanded]
    label, times = Counter(labels).most_common(1)[0]
    if times > 1:
        origins = {asked_index(experiment, index) for index, each in enumerate(labels) if each == label}
        where = ", ".join(f"workloads[{index}]" for index in sorted(origins))
        yield ("factors",), f"the label {label!r} comes up {times} times, from {where}; give each cell its own"
    longest = max((workload.name or "" for workload in expanded), key=len)
    if len(longest) > _NAME_CHARACTERS:
        yield ("factors",), f"they make the name {longest!r}; allowed: at most {_NAME_CHARACTERS} characters"
