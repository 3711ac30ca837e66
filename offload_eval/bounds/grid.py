"""One strategy over a whole grid of lengths and batches, on every rank, against both ledgers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload_eval.bounds.cached_layers import Lengths
from offload_eval.bounds.kv_views import Counts
from offload_eval.bounds.ledgers import UNLIMITED, pinned_bytes, pinned_sessions, refuse_overflow, sessions_that_fit
from offload_eval.bounds.paged import paged_card
from offload_eval.bounds.partition import rank_shapes
from offload_eval.bounds.session_card import HostBuffers, Refusal, SessionCard, session_card
from offload_eval.core.experiment import StrategySpec
from offload_eval.core.plan import PagingSpec, PartitionSpec
from offload_eval.core.shape import ModelShape

Mask = NDArray[np.bool_]
PlanStrategy = PagingSpec | StrategySpec
"""A paged engine, or a cache of transformers."""


@dataclass(frozen=True, kw_only=True)
class Ledgers:
    """What the KV cache may take."""

    device_bytes: Counts | int | None = None
    """Of one rank; None: no budget is stated."""
    host_bytes: int | None = None
    """Of the host that every rank is in; None: not stated."""


@dataclass(frozen=True, kw_only=True)
class ReplicaCard:
    """One session over the ranks of a replica: the card of one rank of each stage."""

    stages: tuple[SessionCard, ...]
    tensor_parallel: int
    assumptions: tuple[str, ...]
    """Of the whole model, not of a stage."""

    @property
    def device_bytes(self) -> Counts:
        """A session's on the fullest rank."""
        most: Counts = np.maximum.reduce([card.device_peak_bytes for card in self.stages])
        return most

    @property
    def device_fixed_bytes(self) -> int:
        """Whatever the sessions, on the fullest rank."""
        return max(card.device_fixed_bytes for card in self.stages)

    @property
    def host_bytes(self) -> Counts:
        """A session's, of all ranks."""
        return self._all_ranks([card.host_bytes for card in self.stages])

    @property
    def h2d_bytes(self) -> Counts:
        """A session's at the last decode step, of all ranks."""
        return self._all_ranks([card.h2d_bytes for card in self.stages])

    @property
    def d2h_bytes(self) -> Counts:
        """A session's at the last decode step, of all ranks."""
        return self._all_ranks([card.d2h_bytes for card in self.stages])

    @property
    def host_buffers(self) -> tuple[HostBuffers, ...]:
        """Pinned buffers of all ranks."""
        return tuple(
            HostBuffers(count=self.tensor_parallel * each.count, bytes=each.bytes)
            for card in self.stages
            for each in card.host_buffers
        )

    def batch_device_bytes(self, sessions: Counts) -> Counts:
        """The fullest rank's, for a batch."""
        ranks = [card.device_fixed_bytes + sessions * card.device_peak_bytes for card in self.stages]
        most: Counts = np.maximum.reduce(ranks)
        return most

    def device_sessions(self, available_bytes: Counts | int) -> Counts:
        """Sessions that every rank has room for."""
        least: Counts = np.minimum.reduce(
            [
                sessions_that_fit(available_bytes - card.device_fixed_bytes, card.device_peak_bytes)
                for card in self.stages
            ]
        )
        return least

    def _all_ranks(self, of_stages: Sequence[Counts]) -> Counts:
        total: Counts = self.tensor_parallel * np.add.reduce(list(of_stages))
        return total


def replica_card(
    shape: ModelShape,
    bits: int,
    lengths: Lengths,
    strategy: PlanStrategy,
    partition: PartitionSpec,
    encoder_tokens: int | None = None,
) -> ReplicaCard | Refusal:
    """The card of one session, spread over a replica's ranks; why there is none, where the strategy has none."""
    whole = _card(shape, bits, lengths, strategy, encoder_tokens)
    if isinstance(whole, str):
        return whole
    shapes = rank_shapes(shape, partition.tensor_parallel, partition.pipeline_parallel)
    stages = []
    for number, stage in enumerate(shapes, start=1):
        card = whole if stage == shape else _card(stage, bits, lengths, strategy, encoder_tokens)
        if isinstance(card, str):
            return f"stage {number} of {len(shapes)}: {card}"
        stages.append(card)
    return ReplicaCard(stages=tuple(stages), tensor_parallel=partition.tensor_parallel, assumptions=whole.assumptions)


def _card(
    shape: ModelShape, bits: int, lengths: Lengths, strategy: PlanStrategy, encoder_tokens: int | None
) -> SessionCard | Refusal:
    if isinstance(strategy, PagingSpec):
        return paged_card(shape, bits, lengths, strategy, encoder_tokens)
    return session_card(shape, bits, lengths, strategy, encoder_tokens)


@dataclass(frozen=True, kw_only=True)
class StrategyGrid:
    """Arrays over the grid; lengths and batches broadcast. Sessions and limits are of the whole deployment."""

    card: ReplicaCard
    batch_device_bytes: Counts
    batch_pinned_bytes: Counts
    device_sessions: Counts | None
    """None without a budget."""
    host_sessions: Counts | None
    """None where nothing is pinned, or no host capacity is stated."""
    limit: Counts | None
    batch_fits: Mask | None

    @property
    def host_decides(self) -> Mask:
        """Where the host ledger is the smaller one."""
        if self.device_sessions is None or self.host_sessions is None:
            return np.asarray(False)
        return self.host_sessions < self.device_sessions


def strategy_grid(card: ReplicaCard, batch_sizes: Counts, ledgers: Ledgers, data_parallel: int = 1) -> StrategyGrid:
    """Lays a card over batches and ledgers.

    Args:
        card: One session at each of the lengths.
        batch_sizes: Sessions of one replica; broadcasts with the lengths.
        ledgers: The two capacities.
        data_parallel: Replicas; they share the host.
    """
    device = None if ledgers.device_bytes is None else card.device_sessions(ledgers.device_bytes)
    host = None
    if card.host_buffers and ledgers.host_bytes is not None:
        host = pinned_sessions(card.host_buffers, ledgers.host_bytes // data_parallel)
    limit = device if device is None or host is None else np.minimum(device, host)
    longest_bytes = float(np.max(card.device_bytes + card.host_bytes, initial=0))
    refuse_overflow(longest_bytes * float(np.max(batch_sizes, initial=0)), "the largest batch")
    batch_device_bytes = card.batch_device_bytes(batch_sizes)
    return StrategyGrid(
        card=card,
        batch_device_bytes=batch_device_bytes,
        batch_pinned_bytes=np.broadcast_to(pinned_bytes(card.host_buffers, batch_sizes), batch_device_bytes.shape),
        device_sessions=_deployment(device, data_parallel),
        host_sessions=_deployment(host, data_parallel),
        limit=_deployment(limit, data_parallel),
        batch_fits=None if limit is None else batch_sizes <= limit,
    )


def _deployment(sessions: Counts | None, data_parallel: int) -> Counts | None:
    if sessions is None:
        return None
    return np.where(sessions == UNLIMITED, UNLIMITED, sessions * data_parallel)
