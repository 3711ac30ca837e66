"""From where on a strategy gives more tokens/s per card than the in-GPU cache."""

from collections.abc import Mapping, Sequence

from offload_eval.analysis.compare_times import LEAST_EFFECT
from offload_eval.core.limits import Lengths, TimedBatch
from offload_eval.core.verdict import BatchBreakEven, ContextBreakEven

BestBatches = tuple[TimedBatch | None, TimedBatch | None]
"""The batch with most tokens/s of a strategy and of the in-GPU cache; None: it was seen to have none."""


def batch_break_even(strategy: str, own: Sequence[TimedBatch], in_gpu: Sequence[TimedBatch]) -> BatchBreakEven | None:
    """Holds every timed batch of a strategy against the best of the in-GPU cache at the same lengths.

    Returns:
        None unless both were timed.
    """
    if not own or not in_gpu:
        return None
    best_in_gpu, best = most_tokens_per_s(in_gpu), most_tokens_per_s(own)
    loses = max(
        (each for each in own if not _gives_more(each, best_in_gpu)), key=lambda each: each.sessions, default=None
    )
    above = [each for each in own if loses is None or each.sessions > loses.sessions]
    smallest = min(above, key=lambda each: each.sessions, default=None)
    shown = dict.fromkeys(each.run_id for each in (smallest, loses, best, best_in_gpu) if each is not None)
    return BatchBreakEven(
        strategy=strategy,
        wins_from=None if smallest is None else smallest.sessions,
        loses_up_to=None if loses is None else loses.sessions,
        best_ratio=best.tokens_per_s / best_in_gpu.tokens_per_s,
        best_at=best.sessions,
        run_ids=tuple(shown),
    )


def context_break_even(
    strategy: str,
    by_lengths: Mapping[Lengths, BestBatches],
    *,
    is_searched: bool,
    none_run_ids: tuple[str, ...] = (),
) -> ContextBreakEven | None:
    """Holds the best batch of a strategy against that of the in-GPU cache, length by length.

    Args:
        strategy: Its label.
        by_lengths: What both give at lengths that differ in the prompt alone.
        is_searched: Whether a search timed the batches, up to each limit.
        none_run_ids: Records that show where one of them has no batch.

    Returns:
        None for fewer than two lengths, or where neither gives anything at any.
    """
    known = {
        each.prompt_tokens + each.output_tokens: best for each, best in by_lengths.items() if best != (None, None)
    }
    if len(known) < 2:
        return None
    tokens = sorted(known)
    wins_from = None
    for length in reversed(tokens):
        own, in_gpu = known[length]
        if own is None or (in_gpu is not None and not _gives_more(own, in_gpu)):
            break
        wins_from = length
    ratios = {
        length: own.tokens_per_s / in_gpu.tokens_per_s
        for length, (own, in_gpu) in known.items()
        if own is not None and in_gpu is not None
    }
    best_at = max(sorted(ratios), key=lambda length: ratios[length], default=None)
    first = next(iter(by_lengths))
    return ContextBreakEven(
        strategy=strategy,
        output_tokens=first.output_tokens,
        prefill_chunk_tokens=first.prefill_chunk_tokens,
        attn_implementation=first.attn_implementation,
        tokens=tuple(tokens),
        wins_from=wins_from,
        best_ratio=None if best_at is None else ratios[best_at],
        best_at=best_at,
        without_in_gpu=tuple(length for length in tokens if known[length][1] is None),
        is_searched=is_searched,
        run_ids=(*(each.run_id for length in tokens for each in known[length] if each is not None), *none_run_ids),
    )


def most_tokens_per_s(batches: Sequence[TimedBatch]) -> TimedBatch:
    """The batch with most tokens/s."""
    return max(batches, key=lambda batch: batch.tokens_per_s)


def _gives_more(own: TimedBatch, in_gpu: TimedBatch) -> bool:
    """More by as much as counts between two runs: medians of a few trials tell no less."""
    return own.tokens_per_s > (1 + LEAST_EFFECT) * in_gpu.tokens_per_s
