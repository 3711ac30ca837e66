"""A mix of sessions under one strategy: summed at its caps, and at a percentile of what it really generates.

A paged engine holds each session by itself. A cache of transformers holds left-padded batches, every row as long as
the longest prompt and the longest generation of its batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offload_eval.bounds.cached_layers import Lengths
from offload_eval.bounds.grid import Ledgers, PlanStrategy, ReplicaCard, replica_card
from offload_eval.bounds.kv_views import Counts
from offload_eval.bounds.ledgers import UNLIMITED, pinned_bytes, pinned_sessions, refuse_overflow
from offload_eval.bounds.paged import shared_prefix_bytes
from offload_eval.bounds.partition import rank_shapes
from offload_eval.bounds.session_card import HostBuffers, Refusal
from offload_eval.core.experiment import StreamedSpec
from offload_eval.core.plan import Batching, PagingSpec, PartitionSpec, Percentile, PopulationSum, SessionGroup
from offload_eval.core.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Where a population runs: one replica's devices, and both ledgers."""

    shape: ModelShape
    bits: int
    partition: PartitionSpec
    ledgers: Ledgers
    batching: Batching
    encoder_tokens: int | None = None
    prefill_chunk_tokens: int | None = None

    def card(self, strategy: PlanStrategy, lengths: Lengths) -> ReplicaCard | Refusal:
        """The card of one session at each of the lengths."""
        return replica_card(self.shape, self.bits, lengths, strategy, self.partition, self.encoder_tokens)


def sum_population(
    groups: Sequence[SessionGroup], percentile: Percentile | None, strategy: PlanStrategy, deployment: Deployment
) -> tuple[PopulationSum, ...] | Refusal:
    """Sums a population at its caps, and at a percentile where one is asked for.

    Args:
        groups: The sessions of one replica; not empty.
        percentile: One that every group's `generated_tokens` states.
        strategy: A paged engine or a cache of transformers.
        deployment: Where it runs; `mixes` counts all replicas'.

    Returns:
        The sums; why there are none, where the strategy cannot hold the mix.
    """
    if isinstance(strategy, StreamedSpec) and any(group.beams > 1 for group in groups):
        return "streamed rows cannot be reordered: beams are not supported"
    names = ["caps", *([percentile] if percentile else [])]
    sums = [_sum(groups, name, strategy, deployment) for name in names]
    refusal = next((each for each in sums if isinstance(each, str)), None)
    return refusal or tuple(each for each in sums if not isinstance(each, str))


@dataclass(frozen=True, kw_only=True)
class _Mix:
    """What a population takes: of each stage's rank, what every copy of it needs and what all copies share."""

    grown_bytes: Sequence[int]
    shared_bytes: Sequence[int]
    host_buffers: Sequence[HostBuffers] = ()
    padding_device_bytes: Sequence[int] = ()
    padding_host_bytes: int = 0
    prefix_saved_bytes: Sequence[int] = ()


def _sum(
    groups: Sequence[SessionGroup], at: str, strategy: PlanStrategy, deployment: Deployment
) -> PopulationSum | Refusal:
    lengths = _lengths(groups, at, deployment.prefill_chunk_tokens)
    if isinstance(strategy, PagingSpec):
        mix: _Mix | Refusal = _paged_mix(groups, lengths, strategy, deployment)
    else:
        mix = _batched_mix(groups, lengths, strategy, deployment)
    if isinstance(mix, str):
        return mix
    held_bytes = [grown + shared for grown, shared in zip(mix.grown_bytes, mix.shared_bytes, strict=True)]
    fullest = held_bytes.index(max(held_bytes))
    mixes = _mixes(mix, deployment)
    return PopulationSum(
        at=at,
        sessions=sum(group.sessions for group in groups),
        device_bytes=held_bytes[fullest],
        pinned_bytes=int(pinned_bytes(mix.host_buffers, np.asarray(1))),
        padding_device_bytes=mix.padding_device_bytes[fullest] if mix.padding_device_bytes else 0,
        padding_host_bytes=mix.padding_host_bytes,
        shared_prefix_saved_bytes=mix.prefix_saved_bytes[fullest] if mix.prefix_saved_bytes else 0,
        fits=None if deployment.ledgers.device_bytes is None else mixes is None or mixes > 0,
        mixes=mixes,
    )


def _lengths(groups: Sequence[SessionGroup], at: str, prefill_chunk_tokens: int | None) -> Lengths:
    outputs = [group.max_new_tokens if at == "caps" else getattr(group.generated_tokens, at) for group in groups]
    return Lengths(
        prompt_tokens=np.array([group.prompt_tokens for group in groups], np.int64),
        output_tokens=np.array(outputs, np.int64),
        prefill_chunk_tokens=prefill_chunk_tokens,
    )


def _mixes(mix: _Mix, deployment: Deployment) -> int | None:
    """Whole populations that fit, over all replicas; None without a budget, and where nothing grows with them."""
    ledgers, replicas = deployment.ledgers, deployment.partition.data_parallel
    if ledgers.device_bytes is None:
        return None
    room = [
        max(0, int(ledgers.device_bytes) - shared) // grown if grown else UNLIMITED
        for grown, shared in zip(mix.grown_bytes, mix.shared_bytes, strict=True)
    ]
    if mix.host_buffers and ledgers.host_bytes is not None:
        room.append(int(pinned_sessions(mix.host_buffers, ledgers.host_bytes // replicas)))
    return None if min(room) == UNLIMITED else min(room) * replicas


def _paged_mix(
    groups: Sequence[SessionGroup], lengths: Lengths, strategy: PagingSpec, deployment: Deployment
) -> _Mix | Refusal:
    """Beams share their prompt, sessions of a group their prefix: by whole blocks, held once."""
    card = deployment.card(strategy, lengths)
    if isinstance(card, str):
        return card
    sessions = np.array([group.sessions for group in groups], np.int64)
    beams = np.array([group.beams for group in groups], np.int64)
    # Every session computes the last token of its prompt anew; beams are copies of one.
    prefixes = np.minimum([group.shared_prefix_tokens for group in groups], lengths.prompt_tokens - 1)
    partition = deployment.partition
    grown, shared, saved = [], [], []
    stages = rank_shapes(deployment.shape, partition.tensor_parallel, partition.pipeline_parallel)
    for stage, rank in zip(stages, card.stages, strict=True):
        prompt_bytes = shared_prefix_bytes(stage, deployment.bits, lengths.prompt_tokens, lengths, strategy)
        prefix_bytes = shared_prefix_bytes(stage, deployment.bits, prefixes, lengths, strategy)
        session_bytes = rank.device_peak_bytes + (beams - 1) * (rank.device_peak_bytes - prompt_bytes)
        grown.append(_total(sessions, session_bytes - prefix_bytes))
        shared.append(int(np.sum(prefix_bytes)) + rank.device_fixed_bytes)
        saved.append(_total(sessions - 1, prefix_bytes))
    return _Mix(grown_bytes=grown, shared_bytes=shared, prefix_saved_bytes=saved)


def _batched_mix(
    groups: Sequence[SessionGroup], lengths: Lengths, strategy: PlanStrategy, deployment: Deployment
) -> _Mix | Refusal:
    """Left-padded batches; beams are rows of their own, and nothing is shared."""
    rows = np.array([group.sessions * group.beams for group in groups], np.int64)
    unpadded = deployment.card(strategy, lengths)
    if isinstance(unpadded, str):
        return unpadded
    if deployment.batching == "group":
        batch_rows, batches = rows, unpadded
    else:
        longest = Lengths(
            prompt_tokens=lengths.prompt_tokens.max(keepdims=True),
            output_tokens=lengths.output_tokens.max(keepdims=True),
            prefill_chunk_tokens=lengths.prefill_chunk_tokens,
        )
        padded = deployment.card(strategy, longest)
        assert not isinstance(padded, str), "a card exists at every length or at none"
        batch_rows, batches = rows.sum(keepdims=True), padded
    grown = _rank_bytes(batches, batch_rows)
    refuse_overflow(sum(grown) + _total(batch_rows, batches.host_bytes), "the population")
    without_padding = _rank_bytes(unpadded, rows)
    return _Mix(
        grown_bytes=grown,
        shared_bytes=[rank.device_fixed_bytes * len(batch_rows) for rank in batches.stages],
        host_buffers=_batch_buffers(batches, batch_rows),
        padding_device_bytes=[padded - used for padded, used in zip(grown, without_padding, strict=True)],
        padding_host_bytes=_total(batch_rows, batches.host_bytes) - _total(rows, unpadded.host_bytes),
    )


def _rank_bytes(card: ReplicaCard, rows: Counts) -> list[int]:
    """What rows take on a rank of each stage."""
    return [_total(rows, rank.device_peak_bytes) for rank in card.stages]


def _total(rows: Counts, bytes_per_row: Counts) -> int:
    """In Python's integers: a population has no largest size."""
    return sum(int(count) * int(size) for count, size in zip(rows, bytes_per_row, strict=True))


def _batch_buffers(card: ReplicaCard, batch_rows: Counts) -> list[HostBuffers]:
    """Each batch has buffers of its own."""
    return [
        HostBuffers(count=each.count, bytes=each.bytes[batch] * batch_rows[batch])
        for each in card.host_buffers
        for batch in range(len(batch_rows))
    ]
