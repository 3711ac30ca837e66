"""Brings the arithmetic together: one model, many lengths, batches and strategies, both ledgers, one answer."""

from typing import Final

import msgspec

from offload_eval.bounds.grid import Ledgers, PlanStrategy
from offload_eval.bounds.longest_session import longest_session
from offload_eval.bounds.plan_assumptions import plan_assumptions
from offload_eval.bounds.plan_cells import plan_cells, strategy_kind
from offload_eval.bounds.plan_footprint import footprint_parts, kv_cache_bytes, layer_rows
from offload_eval.bounds.plan_ledgers import activation_estimate, device_ledger, host_ledger
from offload_eval.bounds.plan_request import PlanRequest
from offload_eval.bounds.population import Deployment, sum_population
from offload_eval.core.plan import LongRequest, Plan, PopulationCell, SessionGroup

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
    long_requests = [request.check(each.name, each.prompt_tokens, each.output_tokens) for each in request.workloads]
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
        activations_estimate_bytes=activation_estimate(request, first.prompt_tokens),
        device=device_ledger(request, first.prompt_tokens),
        host=host_ledger(request.spec),
        admission=cells[0].admission,
        cells=cells,
        longest_sessions=tuple(
            found for strategy in request.strategies if (found := longest_session(request, strategy)) is not None
        ),
        long_requests=(*(each for each in long_requests if each is not None), *long_groups),
        population=population,
        assumptions=tuple(plan_assumptions(request, cells)),
    )


def _population(request: PlanRequest) -> tuple[tuple[PopulationCell, ...], list[LongRequest]]:
    spec = request.spec
    judged = [
        (group, request.check(group.name, group.prompt_tokens, group.max_new_tokens)) for group in spec.population
    ]
    admitted = [group for group, long_request in judged if long_request is None]
    long_requests = [long_request for _, long_request in judged if long_request is not None]
    if not admitted:
        return (), long_requests
    return tuple(_population_cell(request, admitted, strategy) for strategy in request.strategies), long_requests


def _population_cell(request: PlanRequest, groups: list[SessionGroup], strategy: PlanStrategy) -> PopulationCell:
    longest = max(group.prompt_tokens for group in groups)
    ledger = device_ledger(request, longest)
    deployment = Deployment(
        shape=request.model.shape,
        bits=request.bits,
        partition=request.spec.partition,
        ledgers=Ledgers(
            device_bytes=None if ledger is None else ledger.kv_bytes, host_bytes=request.spec.host.kv_bytes
        ),
        batching=request.spec.batching,
        encoder_tokens=request.spec.encoder_tokens,
    )
    sums = sum_population(groups, request.spec.percentile, strategy, deployment)
    admitted = {group.name for group in groups}
    left_out = tuple(group.name for group in request.spec.population if group.name not in admitted)
    cell = PopulationCell(strategy=strategy.label, kind=strategy_kind(strategy), left_out=left_out)
    if isinstance(sums, str):
        return msgspec.structs.replace(cell, refusal=sums)
    return msgspec.structs.replace(cell, sums=sums)
