"""A mix of sessions under one strategy: summed at its caps, and at a percentile of what it really generates.

A paged engine holds each session by itself. A cache of transformers holds one left-padded batch, every row as long as
the longest prompt and the longest generation of the mix.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offload_eval.bounds.grid import Ledgers, PlanStrategy, ReplicaCard, replica_card
from offload_eval.bounds.kv_views import Counts
from offload_eval.bounds.ledgers import UNLIMITED, pinned_bytes, pinned_sessions
from offload_eval.bounds.paged import shared_prefix_bytes
from offload_eval.bounds.partition import rank_shapes
from offload_eval.bounds.session_card import Lengths, Refusal
from offload_eval.core.experiment import StreamedSpec
from offload_eval.core.plan import PagingSpec, PartitionSpec, Percentile, PopulationSum, SessionGroup
from offload_eval.core.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class _Deployment:
    shape: ModelShape
    bits: int
    partition: PartitionSpec
    ledgers: Ledgers
    encoder_tokens: int | None

    def card(self, strategy: PlanStrategy, lengths: Lengths) -> ReplicaCard | Refusal:
        return replica_card(self.shape, self.bits, lengths, strategy, self.partition, self.encoder_tokens)


def sum_population(
    groups: Sequence[SessionGroup],
    percentile: Percentile | None,
    shape: ModelShape,
    bits: int,
    strategy: PlanStrategy,
    partition: PartitionSpec,
    ledgers: Ledgers,
    encoder_tokens: int | None = None,
) -> tuple[PopulationSum, ...] | Refusal:
    """Sums a population at its caps, and at a percentile where one is asked for.

    Args:
        groups: The sessions; not empty.
        percentile: One that every group's `generated_tokens` states.
        shape: The model's cache layout.
        bits: Bits of the model's dtype.
        strategy: A paged engine or a cache of transformers.
        partition: Devices of a replica; the population is one replica's, and `mixes` counts all replicas'.
        ledgers: The two capacities.
        encoder_tokens: Tokens that cross-attention reads.

    Returns:
        The sums; why there are none, where the strategy cannot hold the mix.
    """
    if isinstance(strategy, StreamedSpec) and any(group.beams > 1 for group in groups):
        return "streamed rows cannot be reordered: beams are not supported"
    deployment = _Deployment(
        shape=shape, bits=bits, partition=partition, ledgers=ledgers, encoder_tokens=encoder_tokens
    )
    add = _paged_sum if isinstance(strategy, PagingSpec) else _batch_sum
    names = ["caps", *([percentile] if percentile else [])]
    sums = [add(deployment, strategy, groups, name, _lengths(groups, name)) for name in names]
    refusal = next((each for each in sums if isinstance(each, str)), None)
    return refusal or tuple(each for each in sums if not isinstance(each, str))


def _lengths(groups: Sequence[SessionGroup], at: str) -> Lengths:
    outputs = [group.max_new_tokens if at == "caps" else getattr(group.generated_tokens, at) for group in groups]
    return Lengths(
        prompt_tokens=np.array([group.prompt_tokens for group in groups], np.int64),
        output_tokens=np.array(outputs, np.int64),
    )


def _num_sessions(groups: Sequence[SessionGroup]) -> int:
    return sum(group.sessions for group in groups)


def _paged_sum(
    deployment: _Deployment, strategy: PlanStrategy, groups: Sequence[SessionGroup], at: str, lengths: Lengths
) -> PopulationSum | Refusal:
    """Beams share their prompt, sessions of a group their prefix: by whole blocks, held once."""
    assert isinstance(strategy, PagingSpec)
    card = deployment.card(strategy, lengths)
    assert not isinstance(card, str), "a paged engine holds any layers"
    sessions = np.array([group.sessions for group in groups], np.int64)
    beams = np.array([group.beams for group in groups], np.int64)
    prefixes = np.array([group.shared_prefix_tokens for group in groups], np.int64)
    partition = deployment.partition
    stages = rank_shapes(deployment.shape, partition.tensor_parallel, partition.pipeline_parallel)
    # Of each stage: bytes that every copy of the mix needs, and bytes that all copies share.
    grown, shared = [], []
    for stage, rank in zip(stages, card.stages, strict=True):
        prompt_bytes = shared_prefix_bytes(stage, deployment.bits, lengths.prompt_tokens, strategy)
        prefix_bytes = shared_prefix_bytes(stage, deployment.bits, prefixes, strategy)
        session_bytes = rank.device_peak_bytes + (beams - 1) * (rank.device_peak_bytes - prompt_bytes)
        grown.append(int(np.sum(sessions * (session_bytes - prefix_bytes))))
        shared.append(int(np.sum(prefix_bytes)))
    fullest = max(range(len(grown)), key=lambda stage: grown[stage] + shared[stage])
    mixes = _mixes_on_devices(deployment, grown, shared)
    return PopulationSum(
        at=at,
        sessions=_num_sessions(groups),
        device_bytes=grown[fullest] + shared[fullest],
        pinned_bytes=0,
        padding_bytes=0,
        shared_prefix_saved_bytes=_saved_bytes(stages[fullest], deployment.bits, prefixes, sessions, strategy),
        fits=None if mixes is None else mixes >= partition.data_parallel,
        mixes=mixes,
    )


def _saved_bytes(shape: ModelShape, bits: int, prefixes: Counts, sessions: Counts, paging: PagingSpec) -> int:
    return int(np.sum((sessions - 1) * shared_prefix_bytes(shape, bits, prefixes, paging)))


def _mixes_on_devices(deployment: _Deployment, grown: Sequence[int], shared: Sequence[int]) -> int | None:
    available_bytes = deployment.ledgers.device_bytes
    if available_bytes is None:
        return None
    room = [
        max(0, int(available_bytes) - kept) // more if more else UNLIMITED
        for more, kept in zip(grown, shared, strict=True)
    ]
    return min(room) * deployment.partition.data_parallel


def _batch_sum(
    deployment: _Deployment, strategy: PlanStrategy, groups: Sequence[SessionGroup], at: str, lengths: Lengths
) -> PopulationSum | Refusal:
    """One left-padded batch; beams are rows of their own, and nothing is shared."""
    rows = np.array([group.sessions * group.beams for group in groups], np.int64)
    longest = Lengths(
        prompt_tokens=np.asarray(lengths.prompt_tokens.max()), output_tokens=np.asarray(lengths.output_tokens.max())
    )
    padded, unpadded = deployment.card(strategy, longest), deployment.card(strategy, lengths)
    if isinstance(padded, str):
        return padded
    assert not isinstance(unpadded, str), "a card exists at every length or at none"
    num_rows = np.asarray(rows.sum())
    held_bytes = num_rows * (padded.device_bytes + padded.host_bytes)
    mixes = _mixes_in_batches(deployment, padded, int(num_rows))
    return PopulationSum(
        at=at,
        sessions=_num_sessions(groups),
        device_bytes=int(padded.batch_device_bytes(num_rows)),
        pinned_bytes=int(pinned_bytes(padded.host_buffers, num_rows)),
        padding_bytes=int(held_bytes - np.sum(rows * (unpadded.device_bytes + unpadded.host_bytes))),
        shared_prefix_saved_bytes=0,
        fits=None if mixes is None else mixes >= deployment.partition.data_parallel,
        mixes=mixes,
    )


def _mixes_in_batches(deployment: _Deployment, card: ReplicaCard, num_rows: int) -> int | None:
    ledgers, replicas = deployment.ledgers, deployment.partition.data_parallel
    if ledgers.device_bytes is None:
        return None
    sessions = card.device_sessions(ledgers.device_bytes)
    if ledgers.host_bytes is not None:
        sessions = np.minimum(sessions, pinned_sessions(card.host_buffers, ledgers.host_bytes // replicas))
    return int(sessions) // num_rows * replicas
