"""From where on a strategy gives more tokens/s per card than the in-GPU cache."""

from collections.abc import Mapping, Sequence

from offload_eval.analysis.compare_times import LEAST_EFFECT
from offload_eval.core.experiment import Attention
from offload_eval.core.limits import TimedBatch
from offload_eval.core.verdict import BatchBreakEven, ContextBreakEven


def batch_break_even(strategy: str, own: Sequence[TimedBatch], in_gpu: Sequence[TimedBatch]) -> BatchBreakEven | None:
    """Holds every timed batch of a strategy against the best of the in-GPU cache at the same lengths.

    Returns:
        None unless both were timed.
    """
    if not own or not in_gpu:
        return None
    best_in_gpu, best = most_tokens_per_s(in_gpu), most_tokens_per_s(own)
    wins = [batch for batch in own if _gives_more(batch, best_in_gpu)]
    smallest = min(wins, key=lambda batch: batch.sessions, default=None)
    below = [batch for batch in own if smallest is None or batch.sessions < smallest.sessions]
    loses = max(below, key=lambda batch: batch.sessions, default=None)
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
    by_tokens: Mapping[int, tuple[TimedBatch, TimedBatch | None]],
    chunk_tokens: int | None = None,
    attention: Attention | None = None,
    *,
    is_searched: bool = True,
) -> ContextBreakEven | None:
    """Holds the best batch of a strategy against that of the in-GPU cache, length by length.

    Args:
        strategy: Its label.
        by_tokens: Tokens of a session to the best batch of the strategy and of the in-GPU cache; None: it has none.
        chunk_tokens: How all of them were prefilled.
        attention: The attention that all of them ran with.
        is_searched: Whether a search timed the batches, up to each limit.

    Returns:
        None for fewer than two lengths.
    """
    if len(by_tokens) < 2:
        return None
    tokens = sorted(by_tokens)
    wins_from = None
    for length in reversed(tokens):
        own, in_gpu = by_tokens[length]
        if in_gpu is not None and not _gives_more(own, in_gpu):
            break
        wins_from = length
    ratios = {
        length: own.tokens_per_s / in_gpu.tokens_per_s
        for length, (own, in_gpu) in by_tokens.items()
        if in_gpu is not None
    }
    best_at = max(sorted(ratios), key=lambda length: ratios[length], default=None)
    return ContextBreakEven(
        strategy=strategy,
        prefill_chunk_tokens=chunk_tokens,
        attn_implementation=attention,
        tokens=tuple(tokens),
        wins_from=wins_from,
        best_ratio=None if best_at is None else ratios[best_at],
        best_at=best_at,
        is_searched=is_searched,
        run_ids=tuple(batch.run_id for length in tokens for batch in by_tokens[length] if batch is not None),
    )


def most_tokens_per_s(batches: Sequence[TimedBatch]) -> TimedBatch:
    """The batch with most tokens/s."""
    return max(batches, key=lambda batch: batch.tokens_per_s)


def _gives_more(own: TimedBatch, in_gpu: TimedBatch) -> bool:
    """More by as much as counts between two runs: medians of a few trials tell no less."""
    return own.tokens_per_s > (1 + LEAST_EFFECT) * in_gpu.tokens_per_s
