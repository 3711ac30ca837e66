"""Brings the arithmetic together: one model, many lengths, batches and strategies, both ledgers, one answer."""

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np

from offload_eval.bounds.activations import estimate_activation_bytes
from offload_eval.bounds.grid import Ledgers, PlanStrategy, StrategyGrid, replica_card, strategy_grid
from offload_eval.bounds.kv_views import Counts
from offload_eval.bounds.ledgers import UNLIMITED
from offload_eval.bounds.long_requests import check_request
from offload_eval.bounds.plan_assumptions import plan_assumptions
from offload_eval.bounds.plan_footprint import footprint_parts, kv_cache_bytes, layer_rows
from offload_eval.bounds.plan_request import PlanRequest, columns
from offload_eval.bounds.population import sum_population
from offload_eval.bounds.session_card import Lengths, Refusal
from offload_eval.core.plan import (
    Admission,
    DeviceLedger,
    HostLedger,
    LimitedBy,
    LongRequest,
    PagingSpec,
    Plan,
    PlanCell,
    PlanSpec,
    PopulationCell,
    SessionGroup,
)

STATEMENT: Final = (
    "An upper bound under the assumptions below, not a promise: what really fits has to be traced or measured."
)


def make_plan(request: PlanRequest) -> Plan:
    """Computes the plan.

    Args:
        request: At least one workload and one strategy. With a budget, the weights have to be known.

    Returns:
        Cells in the order of workloads, then strategies.

    Raises:
        InputError: There are more pipeline stages than layers.
    """
    first, shape = request.workloads[0], request.model.shape
    cells = tuple(plan_cells(request))
    long_requests = [_long(request, each.name, each.prompt_tokens, each.output_tokens) for each in request.workloads]
    population, long_groups = _population(request)
    return Plan(
        statement=STATEMENT,
        model=request.model.name,
        model_type=shape.model_type,
        model_source=request.model.source,
        context_tokens=shape.max_position_embeddings,
        dtype=request.model.dtype,
        kv_cache_dtype=request.spec.paging.kv_cache_dtype,
        cached_tokens=first.cached_tokens,
        kv_cache_bytes=kv_cache_bytes(request, first),
        parts=footprint_parts(request, first),
        layers=tuple(layer_rows(request, first)),
        activations_estimate_bytes=_activation_estimate(request, first.prompt_tokens),
        device=device_ledger(request, first.prompt_tokens),
        host=_host_ledger(request.spec),
        admission=cells[0].admission,
        cells=cells,
        long_requests=(*(each for each in long_requests if each is not None), *long_groups),
        population=population,
        assumptions=tuple(plan_assumptions(request, cells)),
    )


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
    ledgers = _ledgers(request, lengths.prompt_tokens)
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


def device_ledger(request: PlanRequest, prompt_tokens: int) -> DeviceLedger | None:
    """One rank's device memory, for prompts of a length; None without a budget."""
    budget = request.budget
    if budget is None:
        return None
    weights_bytes = budget.weights_bytes or request.model.weights_bytes
    assert weights_bytes is not None, "a budget comes with the weights"
    partition = request.spec.partition
    rank_weights_bytes = -(-weights_bytes // (partition.tensor_parallel * partition.pipeline_parallel))
    activations_bytes = _activations_bytes(request, prompt_tokens)
    taken_bytes = rank_weights_bytes + activations_bytes + budget.runtime_bytes + budget.reserve_bytes
    return DeviceLedger(
        budget_bytes=budget.device_bytes,
        weights_bytes=rank_weights_bytes,
        activations_bytes=activations_bytes,
        runtime_bytes=budget.runtime_bytes,
        reserve_bytes=budget.reserve_bytes,
        kv_bytes=max(0, budget.device_bytes - taken_bytes),
    )


def _ledgers(request: PlanRequest, prompt_tokens: Counts) -> Ledgers:
    host_bytes = request.spec.host.kv_bytes
    ledger = device_ledger(request, 0)
    if ledger is None:
        return Ledgers(host_bytes=host_bytes)
    if not request.spec.estimate_activations:
        return Ledgers(device_bytes=ledger.kv_bytes, host_bytes=host_bytes)
    estimate = estimate_activation_bytes(request.model.shape, _prefilled(request, prompt_tokens), request.bits)
    without = ledger.budget_bytes - ledger.weights_bytes - ledger.runtime_bytes - ledger.reserve_bytes
    return Ledgers(device_bytes=without if estimate is None else without - estimate, host_bytes=host_bytes)


def _prefilled(request: PlanRequest, prompt_tokens: Counts) -> Counts:
    chunk = request.spec.prefill_chunk_tokens
    return prompt_tokens if chunk is None else np.minimum(prompt_tokens, chunk)


def _activation_estimate(request: PlanRequest, prompt_tokens: int) -> int | None:
    tokens = _prefilled(request, np.asarray(prompt_tokens, np.int64))
    estimate = estimate_activation_bytes(request.model.shape, tokens, request.bits)
    return None if estimate is None else int(estimate)


def _activations_bytes(request: PlanRequest, prompt_tokens: int) -> int:
    if not request.spec.estimate_activations:
        return request.spec.activations_bytes
    return _activation_estimate(request, prompt_tokens) or 0


def _host_ledger(spec: PlanSpec) -> HostLedger:
    return HostLedger(
        memory_bytes=spec.host.memory_bytes,
        limit_bytes=spec.host.limit_bytes,
        reserve_bytes=spec.host.reserve_bytes,
        kv_bytes=spec.host.kv_bytes,
    )


def plan_cells(request: PlanRequest) -> Iterator[PlanCell]:
    """Every workload under every strategy, in the order of workloads, then strategies."""
    grids = plan_grids(request, *columns(request.workloads))
    for index, workload in enumerate(request.workloads):
        long_request = _long(request, workload.name, workload.prompt_tokens, workload.output_tokens)
        for strategy, grid in grids:
            base = PlanCell(
                strategy=strategy.label,
                kind=strategy_kind(strategy),
                workload=workload.name,
                prompt_tokens=workload.prompt_tokens,
                output_tokens=workload.output_tokens,
                batch_size=workload.batch_size,
                cached_tokens=workload.cached_tokens,
            )
            if isinstance(grid, str):
                yield msgspec.structs.replace(base, refusal=grid)
            else:
                yield _filled(base, grid, index, long_request)


def _filled(cell: PlanCell, grid: StrategyGrid, index: int, long_request: LongRequest | None) -> PlanCell:
    card = grid.card
    admission = _admission(grid, index, long_request)
    fits = None if grid.batch_fits is None else bool(grid.batch_fits[index]) and long_request is None
    return msgspec.structs.replace(
        cell,
        kv_device_bytes_per_session=int(card.device_bytes[index]),
        kv_device_bytes_fixed=card.device_fixed_bytes,
        kv_host_bytes_per_session=int(card.host_bytes[index]),
        batch_device_bytes=int(grid.batch_device_bytes[index]),
        batch_pinned_bytes=int(grid.batch_pinned_bytes[index]),
        h2d_bytes_per_step=cell.batch_size * int(card.h2d_bytes[index]),
        d2h_bytes_per_step=cell.batch_size * int(card.d2h_bytes[index]),
        batch_fits=fits,
        admission=admission,
        assumptions=card.stages[0].assumptions,
    )


def _admission(grid: StrategyGrid, index: int, long_request: LongRequest | None) -> Admission | None:
    if grid.limit is None:
        return None
    limit = _sessions(grid.limit, index)
    limited_by: LimitedBy | None = None if limit is None else "device"
    if np.broadcast_to(grid.host_decides, grid.limit.shape)[index]:
        limited_by = "host"
    if long_request is not None:
        limit, limited_by = 0, long_request.limited_by
    return Admission(
        device_sessions=_sessions(grid.device_sessions, index),
        host_sessions=_sessions(grid.host_sessions, index),
        limit=limit,
        limited_by=limited_by,
    )


def _sessions(sessions: Counts | None, index: int) -> int | None:
    if sessions is None:
        return None
    count = int(np.broadcast_to(sessions, (max(sessions.size, index + 1),))[index])
    return None if count >= UNLIMITED // 2**20 else count


def _long(request: PlanRequest, name: str, prompt_tokens: int, output_tokens: int) -> LongRequest | None:
    return check_request(name, prompt_tokens, output_tokens, request.limit, request.spec.long_requests)


def _population(request: PlanRequest) -> tuple[tuple[PopulationCell, ...], list[LongRequest]]:
    spec = request.spec
    judged = [
        (group, _long(request, group.name, group.prompt_tokens, group.max_new_tokens)) for group in spec.population
    ]
    admitted = [group for group, long_request in judged if long_request is None]
    long_requests = [long_request for _, long_request in judged if long_request is not None]
    if not admitted:
        return (), long_requests
    return tuple(_population_cell(request, admitted, strategy) for strategy in request.strategies), long_requests


def _population_cell(request: PlanRequest, groups: list[SessionGroup], strategy: PlanStrategy) -> PopulationCell:
    longest = max(group.prompt_tokens for group in groups)
    ledger = device_ledger(request, longest)
    sums = sum_population(
        groups,
        request.spec.percentile,
        request.model.shape,
        request.bits,
        strategy,
        request.spec.partition,
        Ledgers(device_bytes=None if ledger is None else ledger.kv_bytes, host_bytes=request.spec.host.kv_bytes),
        request.spec.encoder_tokens,
    )
    cell = PopulationCell(strategy=strategy.label, kind=strategy_kind(strategy))
    if isinstance(sums, str):
        return msgspec.structs.replace(cell, refusal=sums)
    return msgspec.structs.replace(cell, sums=sums)
