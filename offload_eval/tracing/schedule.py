"""Which steps of a long generation are traced, and how the cache gets to where they start.

Memory is largest at the first step, which may still hold what prefill left, at the last, when the cache is longest,
and where a quantized cache quantizes all it holds anew. Those are traced; the cache is filled up to them by forward
passes over several tokens at once, which count nowhere.
"""

from collections.abc import Sequence
from typing import Final

from offload_eval.core.experiment import Workload
from offload_eval.core.trace import PhaseTrace

MOST_STEPS: Final = 4
"""Generations with no more decode steps are traced in full."""
EARLY_CHUNKS: Final = 3
LATE_CHUNKS: Final = 3
MOST_CHUNKS: Final = EARLY_CHUNKS + LATE_CHUNKS + 1
"""Prompts with no more chunks are traced in full. Otherwise one ordinary chunk goes uncounted before the late ones,
so that no window is left over from the many tokens that were skipped at once. The last full chunk is traced after one
whose output is still held."""
SKIPPED_STEPS: Final = "Of {steps:,} decode steps, {traced} were traced, each in a cache filled up to it at once."
SKIPPED_CHUNKS: Final = (
    "Of {chunks:,} prefill chunks, the first and the last three were traced; bytes moved, FLOPs and bytes touched of "
    "those between are taken to change linearly, and their peak to be no higher."
)


def steps_to_trace(workload: Workload, residual_length: int | None, *, uses_link: bool = False) -> tuple[int, ...]:
    """Decode steps to trace, counted from 1.

    Args:
        workload: The lengths.
        residual_length: Steps between two requantizations; None where the cache never does.
        uses_link: Whether the cache copies: then also the last step but one, since the last fetches nothing ahead.
    """
    last = workload.output_tokens - 1
    if last <= MOST_STEPS:
        return tuple(range(1, last + 1))
    last_flush = last // residual_length * residual_length if residual_length else 0
    return tuple(sorted({1, last, last_flush, *([last - 1] if uses_link else [])} - {0}))


def pieces_before(step: int, workload: Workload, residual_length: int | None) -> tuple[int, ...]:
    """Lengths of the forward passes that leave a cache as it is one step before `step`.

    A quantized cache holds the tokens of its last unfinished window apart, so they come in a pass of their own.
    """
    decoded = step - 2
    apart = decoded % residual_length if residual_length else 0
    return tuple(tokens for tokens in (workload.prompt_tokens + decoded - apart, apart) if tokens)


def sum_of_chunks(early: Sequence[dict[str, int]], late: Sequence[dict[str, int]], num_chunks: int) -> dict[str, int]:
    """Counts over all chunks of a prefill, of which the first three and the last three are known.

    Args:
        early: Counts of the first three.
        late: Counts of the last three: of the first of them, and of the others together.
        num_chunks: Of the whole prefill.
    """
    between = num_chunks - EARLY_CHUNKS - LATE_CHUNKS
    return {
        name: sum(chunk[name] for chunk in (*early, *late)) + between * (early[-1][name] + late[0][name]) // 2
        for name in early[0]
    }


COUNTS: Final = (
    "h2d_bytes",
    "d2h_bytes",
    "num_h2d_copies",
    "num_d2h_copies",
    "matmul_flops",
    "attention_flops",
    "hidden_flops",
    "weights_read_bytes",
    "touched_bytes",
)
"""What adds up over chunks."""


def counts_of(phase: PhaseTrace) -> dict[str, int]:
    """The fields that add up over chunks."""
    return {name: getattr(phase, name) for name in COUNTS}
