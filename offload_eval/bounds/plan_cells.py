"""The cells of a plan: every workload under every strategy, against the ledgers."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import numpy as np

from offload_eval.bounds.cached_layers import Lengths
from offload_eval.bounds.grid import PlanStrategy, StrategyGrid, replica_card, strategy_grid
from offload_eval.bounds.kv_views import Counts
from offload_eval.bounds.ledgers import UNLIMITED
from offload_eval.bounds.plan_ledgers import grid_ledgers
from offload_eval.bounds.plan_link import link_columns
from offload_eval.bounds.plan_request import PlanRequest, columns
from offload_eval.bounds.session_card import Refusal
from offload_eval.core.plan import Admission, LimitedBy, LongRequest, PagingSpec, PlanCell


def plan_cells(request: PlanRequest) -> Iterator[PlanCell]:
    """Every workload under every strategy, in the order of workloads, then strategies."""
    long_requests = [request.check(each.name, each.prompt_tokens, each.output_tokens) for each in request.workloads]
    by_strategy = [
        _strategy_cells(request, strategy, grid, long_requests)
        for strategy, grid in plan_grids(request, *columns(request.workloads))
    ]
    return chain.from_iterable(zip(*by_strategy, strict=True))


def _strategy_cells(
    request: PlanRequest,
    strategy: PlanStrategy,
    grid: StrategyGrid | Refusal,
    long_requests: list[LongRequest | None],
) -> Iterator[PlanCell]:
    label, kind = strategy.label, strategy_kind(strategy)
    filled = (
        _numbers(request, strategy, grid, long_requests) if not isinstance(grid, str) else repeat({"refusal": grid})
    )
    for workload, numbers in zip(request.workloads, filled, strict=False):
        yield PlanCell(
            strategy=label,
            kind=kind,
            workload=workload.name,
            prompt_tokens=workload.prompt_tokens,
            output_tokens=workload.output_tokens,
            batch_size=workload.batch_size,
            cached_tokens=workload.cached_tokens,
            **numbers,
        )


def _numbers(
    request: PlanRequest, strategy: PlanStrategy, grid: StrategyGrid, long_requests: list[LongRequest | None]
) -> Iterator[dict[str, Any]]:
    """The computed fields of each cell. Arrays are turned into lists once: a grid may have a million cells."""
    card, count = grid.card, len(long_requests)
    batch_sizes = np.array([each.batch_size for each in request.workloads], np.int64)
    arrays = {
        "kv_device_peak_bytes_per_session": card.device_bytes,
        "kv_host_bytes_per_session": card.host_bytes,
        "batch_device_bytes": grid.batch_device_bytes,
        "batch_pinned_bytes": grid.batch_pinned_bytes,
        "h2d_bytes_per_step": batch_sizes * card.h2d_bytes,
        "d2h_bytes_per_step": batch_sizes * card.d2h_bytes,
    }
    admitted = np.array([each is None for each in long_requests], np.bool_)
    columns: dict[str, list[Any]] = {name: _listed(array, count) for name, array in arrays.items()}
    columns |= link_columns(request, strategy, grid, batch_sizes, admitted)
    rows = zip(*columns.values(), strict=True)
    fits = [None] * count if grid.batch_fits is None else np.broadcast_to(grid.batch_fits, count).tolist()
    fixed_bytes, assumptions = card.device_fixed_bytes, card.assumptions
    for row, fit, admission, too_long in zip(rows, fits, _admissions(grid, long_requests), long_requests, strict=True):
        yield {
            **dict(zip(columns, row, strict=True)),
            "kv_device_bytes_fixed": fixed_bytes,
            "batch_fits": fit and too_long is None,
            "admission": admission,
            "assumptions": assumptions,
        }


def _listed(array: Counts, count: int) -> list[int]:
    listed: list[int] = np.broadcast_to(array, count).tolist()
    return listed


def _admissions(grid: StrategyGrid, long_requests: list[LongRequest | None]) -> Iterator[Admission | None]:
    if grid.limit is None:
        yield from repeat(None, len(long_requests))
        return
    count = len(long_requests)
    device, host, limits = (_sessions(each, count) for each in (grid.device_sessions, grid.host_sessions, grid.limit))
    host_decides = np.broadcast_to(grid.host_decides, count).tolist()
    for index, too_long in enumerate(long_requests):
        limited_by: LimitedBy | None = "host" if host_decides[index] else "device"
        if limits[index] is None:
            limited_by = None
        yield Admission(
            device_sessions=device[index],
            host_sessions=host[index],
            limit=limits[index] if too_long is None else 0,
            limited_by=limited_by if too_long is None else too_long.limited_by,
        )


def _sessions(sessions: Counts | None, count: int) -> list[int | None]:
    if sessions is None:
        return [None] * count
    return [None if each == UNLIMITED else each for each in _listed(sessions, count)]


def plan_grids(
    request: PlanRequest, lengths: Lengths, batch_sizes: Counts
) -> list[tuple[PlanStrategy, StrategyGrid | Refusal]]:
    """Every strategy over a grid; why there is none, where a strategy has no closed form for the model's layers.

    Args:
        request: Its workloads are not read.
        lengths: Prompt and output tokens.
        batch_sizes: Broadcasts with the lengths.
    """
    spec = request.spec
    lengths = replace(lengths, prefill_chunk_tokens=spec.prefill_chunk_tokens)
    ledgers = grid_ledgers(request, lengths.prompt_tokens)
    grids: list[tuple[PlanStrategy, StrategyGrid | Refusal]] = []
    for strategy in request.strategies:
        card = replica_card(request.model.shape, request.bits, lengths, strategy, spec.partition, spec.encoder_tokens)
        if isinstance(card, str):
            grids.append((strategy, card))
        else:
            grids.append((strategy, strategy_grid(card, batch_sizes, ledgers, spec.partition.data_parallel)))
    return grids


def strategy_kind(strategy: PlanStrategy) -> str:
    """`paged`, or the kind of a cache of transformers."""
    return "paged" if isinstance(strategy, PagingSpec) else strategy.kind
