"""The host ledger of a cell: how many sessions the host memory of its budget admits, and which ledger decides."""

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from offload_eval.bounds.cached_layers import CachedLayers, workload_lengths
from offload_eval.bounds.host_rows import num_resident
from offload_eval.bounds.ledgers import pinned_bytes, pinned_sessions
from offload_eval.bounds.session_card import SessionCard, session_card
from offload_eval.core.experiment import (
    BudgetSpec,
    DeviceName,
    OffloadedSpec,
    OffloadedStaticSpec,
    StrategySpec,
    StreamedSpec,
    Workload,
)
from offload_eval.core.judgement import Ledger
from offload_eval.core.shape import ModelShape

HOST_NOT_CHECKED: Final = "The sessions are the device ledger's; whether host memory holds their KV is not checked."
PINNED_ROUNDS: Final = "Each host buffer counts as torch's pinned allocator rounds it: up to a power of two bytes."
UPSTREAM_ALLOCATES: Final = (
    "transformers' offloading allocates its host memory by itself: the budget's counts here, and does not hold it "
    "in a run."
)
_UPSTREAM: Final = (OffloadedSpec, OffloadedStaticSpec)


def is_held_to_host(strategy: StrategySpec) -> bool:
    """Whether an enforced host budget stops the strategy: it does where the link allocates."""
    return not isinstance(strategy, _UPSTREAM)


def limiting_ledger(device_sessions: int, host_sessions: int | None, budget: BudgetSpec) -> Ledger | None:
    """Which ledger admits fewer sessions; the device's where both admit as many.

    Args:
        device_sessions: What the device ledger admits.
        host_sessions: What the host ledger admits; None: nothing of the strategy's is there.
        budget: None is returned where it states no host memory, and the device's is the only ledger.
    """
    if budget.host_bytes is None:
        return None
    return "host" if host_sessions is not None and host_sessions < device_sessions else "device"


def host_assumptions(card: SessionCard, strategy: StrategySpec, budget: BudgetSpec, device: DeviceName) -> list[str]:
    """What is taken for granted about the host ledger of a strategy that uses it."""
    if not card.host_buffers:
        return []
    if budget.host_bytes is None:
        return [HOST_NOT_CHECKED]
    return [
        *([PINNED_ROUNDS] if device == "cuda" else []),
        *([UPSTREAM_ALLOCATES] if isinstance(strategy, _UPSTREAM) else []),
    ]


def host_sessions(
    shape: ModelShape, bits: int, workload: Workload, strategy: StrategySpec, host_bytes: int, device: DeviceName
) -> int | None:
    """Sessions of one batch whose host buffers fit.

    Args:
        shape: The model's cache layout.
        bits: Bits of a value of the unquantized cache.
        workload: Its lengths; its batch does not matter.
        strategy: The cache strategy.
        host_bytes: What the buffers may take.
        device: On `cuda` each buffer counts as the pinned allocator rounds it, on `cpu` as it was asked for.

    Returns:
        None where the strategy has nothing on the host, or no card.
    """

    def fits(sessions: int) -> bool:
        asked = msgspec.structs.replace(workload, batch_size=sessions)
        card = session_card(shape, bits, workload_lengths(asked), of_known_batch(strategy, shape, bits, asked))
        assert not isinstance(card, str)
        return _host_bytes(card, sessions, device) <= host_bytes

    card = session_card(shape, bits, workload_lengths(workload), strategy)
    if isinstance(card, str) or not card.host_buffers:
        return None
    if isinstance(strategy, StreamedSpec) and strategy.resident_bytes is not None:
        return _most_that_fit(fits)  # the more sessions, the fewer layers stay off the host
    if device == "cuda":
        return int(pinned_sessions(card.host_buffers, host_bytes))
    return host_bytes // int(card.host_bytes)


def _host_bytes(card: SessionCard, sessions: int, device: DeviceName) -> int:
    if device == "cpu":
        return sessions * int(card.host_bytes)
    return int(pinned_bytes(card.host_buffers, np.asarray(sessions)))


def _most_that_fit(fits: Callable[[int], bool]) -> int:
    """The largest count that fits, where every smaller one does too; 0 where not even 1 does."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def of_known_batch(strategy: StrategySpec, shape: ModelShape, bits: int, workload: Workload) -> StrategySpec:
    """Resident bytes as the share of layers that they hold at this batch."""
    if not isinstance(strategy, StreamedSpec) or strategy.resident_bytes is None:
        return strategy
    layers = CachedLayers(shape, bits, None)
    layer_bytes = workload.batch_size * workload.cached_tokens * layers.widest_row_bytes
    if not layer_bytes:
        return strategy
    share = num_resident(strategy, layers.count, layer_bytes) / layers.count
    return msgspec.structs.replace(strategy, resident_bytes=None, resident_share=share)
