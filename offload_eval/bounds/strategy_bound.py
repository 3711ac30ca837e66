"""The analytic card of a cell: what its strategy must hold and move, and the sessions that the budget admits."""

from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np

from offload_eval.bounds.admission import admission_limit
from offload_eval.bounds.cached_layers import Lengths, workload_lengths
from offload_eval.bounds.host_ledger import host_assumptions, host_sessions, limiting_ledger, of_known_batch
from offload_eval.bounds.kv_views import Counts
from offload_eval.bounds.session_card import session_card
from offload_eval.core.experiment import (
    BITS_PER_VALUE,
    BudgetSpec,
    DeviceName,
    OffloadedStaticSpec,
    StaticSpec,
    StrategySpec,
    StreamedSpec,
    Workload,
)
from offload_eval.core.judgement import Bound
from offload_eval.core.run_spec import RunSpec
from offload_eval.core.shape import ModelFacts, ModelShape

_KEPT: Final = 16_384
"""Results that are kept: a report asks for the same few of each cell over and over."""
_WHOLE_FROM_THE_START: Final = (StaticSpec, OffloadedStaticSpec, StreamedSpec)


@lru_cache(maxsize=_KEPT)
def cell_bound(spec: RunSpec, model: ModelFacts) -> Bound | None:
    """The analytic card of a cell; None where the arithmetic refuses the model, or `strategy_bound` has none."""
    if model.shape is None:
        return None
    return strategy_bound(
        model.shape, model.weights_bytes, spec.model.dtype, spec.workload, spec.strategy, spec.budget, spec.device
    )


@lru_cache(maxsize=_KEPT)
def kv_device_bytes_after(spec: RunSpec, model: ModelFacts, step: int) -> int | None:
    """KV bytes that a cell's whole batch has on the device when a decode step ends, counted from 1; 0: the prefill.

    Buffers and scratch have the length of the whole workload from the first token on.

    Returns:
        None where the arithmetic refuses the model, or `session_card` has no card.
    """
    if model.shape is None:
        return None
    workload = spec.workload
    lengths = workload_lengths(workload)
    if not isinstance(spec.strategy, _WHOLE_FROM_THE_START):
        lengths = replace(lengths, output_tokens=np.asarray(step + 1))
    bits = BITS_PER_VALUE[spec.model.dtype]
    card = session_card(model.shape, bits, lengths, of_known_batch(spec.strategy, model.shape, bits, workload))
    if isinstance(card, str):
        return None
    return workload.batch_size * int(card.device_bytes) + card.device_fixed_bytes


def moved_bytes(spec: RunSpec, model: ModelFacts) -> tuple[int, int] | None:
    """Bytes that a cell's whole batch moves for all its decode steps, to the device and back.

    Returns:
        None where the arithmetic refuses the model, or `session_card` has no card.
    """
    outputs = np.arange(2, spec.workload.output_tokens + 1)
    if isinstance(spec.strategy, OffloadedStaticSpec):  # each step moves the buffers whole, filled or not
        outputs = np.full_like(outputs, spec.workload.output_tokens)
    return _moved_at(spec, model, np.full_like(outputs, spec.workload.prompt_tokens), outputs)


def prefill_fetched_bytes(spec: RunSpec, model: ModelFacts) -> int | None:
    """Bytes that a chunked prefill of `streamed` fetches for itself, for a cell's whole batch; 0 for a whole prompt.

    Every chunk but the first has the tokens before it fetched, as a decode step after as many tokens does. The first
    fetches for decode, which also fall into the prefill, are among `moved_bytes`.

    Returns:
        None where the arithmetic refuses the model, or `session_card` has no card.
    """
    assert isinstance(spec.strategy, StreamedSpec), "what the prefill of other caches moves is not modelled"
    prompt_tokens = spec.workload.prompt_tokens
    chunk_tokens = spec.workload.prefill_chunk_tokens or prompt_tokens
    prefixes = np.arange(chunk_tokens, prompt_tokens, chunk_tokens)
    moved = _moved_at(spec, model, prefixes, np.full_like(prefixes, 2))
    return None if moved is None else moved[0]


def _moved_at(spec: RunSpec, model: ModelFacts, prompts: Counts, outputs: Counts) -> tuple[int, int] | None:
    """What the whole batch moves in the last decode steps of all these lengths."""
    if model.shape is None:
        return None
    bits = BITS_PER_VALUE[spec.model.dtype]
    known = of_known_batch(spec.strategy, model.shape, bits, spec.workload)
    card = session_card(model.shape, bits, Lengths(prompt_tokens=prompts, output_tokens=outputs), known)
    if isinstance(card, str):
        return None
    return spec.workload.batch_size * int(card.h2d_bytes.sum()), spec.workload.batch_size * int(card.d2h_bytes.sum())


def strategy_bound(
    shape: ModelShape,
    weights_bytes: int,
    dtype: str,
    workload: Workload,
    strategy: StrategySpec,
    budget: BudgetSpec,
    device: DeviceName = "cuda",
) -> Bound | None:
    """Computes the analytic card of one cell.

    Args:
        shape: The model's cache layout.
        weights_bytes: Bytes of weights, where the budget does not state them.
        dtype: dtype of the unquantized cache.
        workload: Lengths and batch size.
        strategy: The cache strategy.
        budget: The device ledger, and the host's where it states one.
        device: Whose host ledger it is: only pinned memory is rounded.

    Returns:
        KV bytes per ledger, bytes moved at the last decode step, and the admission limit of the ledger that admits
        fewer; None where `session_card` has none.
    """
    bits = BITS_PER_VALUE[dtype]
    known = of_known_batch(strategy, shape, bits, workload)
    card = session_card(shape, bits, workload_lengths(workload), known)
    of_any_batch = session_card(shape, bits, workload_lengths(workload), strategy)
    if isinstance(card, str) or isinstance(of_any_batch, str):
        return None
    by_device = admission_limit(
        budget.device_bytes,
        budget.weights_bytes or weights_bytes,
        budget.runtime_bytes,
        budget.reserve_bytes + of_any_batch.device_fixed_bytes,
        int(of_any_batch.device_peak_bytes),
    )
    by_host = (
        None
        if budget.host_bytes is None
        else host_sessions(shape, bits, workload, strategy, budget.host_bytes, device)
    )
    return Bound(
        kv_device_bytes_per_session=int(card.device_bytes),
        kv_device_peak_bytes_per_session=int(card.device_peak_bytes),
        kv_device_bytes_fixed=card.device_fixed_bytes,
        kv_host_bytes_per_session=int(card.host_bytes),
        h2d_bytes_per_step=workload.batch_size * int(card.h2d_bytes),
        d2h_bytes_per_step=workload.batch_size * int(card.d2h_bytes),
        sessions=by_device if by_host is None else min(by_device, by_host),
        device_sessions=by_device,
        host_sessions=by_host,
        limiting_ledger=limiting_ledger(by_device, by_host, budget),
        assumptions=(
            *card.assumptions,
            *host_assumptions(card, strategy, budget, device),
            f"Every session holds {workload.cached_tokens:,} tokens, {bits} bits a value before any quantizer.",
            "Activations, logits, quantizer transients, fragmentation and paging are not counted.",
        ),
        source=card.source,
    )
