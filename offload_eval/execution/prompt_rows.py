"""Rows of prompt tokens for any number of sessions. No framework and no tokenizer is needed."""

import numpy as np

from offload_eval.execution.messages import PromptText, TokenArray


def random_rows(sessions: int, prompt_tokens: int, vocab_size: int, seed: int) -> TokenArray:
    """Uniform random token ids `[sessions, prompt_tokens]`; the first rows are the same for every number of them."""
    generator = np.random.default_rng(seed)
    return generator.integers(vocab_size, size=(sessions, prompt_tokens), dtype=np.int64)


def spread_rows(text: PromptText, sessions: int, prompt_tokens: int) -> TokenArray:
    """Pieces of a text at even distances `[sessions, prompt_tokens]`, each after the opening.

    They overlap where the text is too short for all of them: what a batch holds and computes is the same.
    """
    piece_tokens = max(0, prompt_tokens - len(text.opening))
    starts = np.linspace(0, len(text.tokens) - piece_tokens, sessions).astype(np.int64)
    pieces = np.lib.stride_tricks.sliding_window_view(text.tokens, piece_tokens)[starts]
    openings = np.broadcast_to(text.opening, (sessions, len(text.opening)))
    return np.concatenate([openings, pieces], axis=1)[:, :prompt_tokens].copy()
