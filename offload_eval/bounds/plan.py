"""Brings the arithmetic together: one model, many lengths, batches and strategies, both ledgers, one answer."""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
import numpy as np

from offload_eval.bounds.grid import Ledgers, PlanStrategy
from offload_eval.bounds.longest_session import fitting_prompt_tokens, longest_session
from offload_eval.bounds.plan_assumptions import plan_assumptions
from offload_eval.bounds.plan_cells import plan_cells, strategy_kind
from offload_eval.bounds.plan_footprint import footprint_parts, kv_cache_bytes, layer_rows
from offload_eval.bounds.plan_ledgers import activation_estimate, device_ledger, host_ledger
from offload_eval.bounds.plan_link import plan_hardware
from offload_eval.bounds.plan_request import PlanRequest
from offload_eval.bounds.population import Deployment, sum_population
from offload_eval.core.plan import DeviceLedger, LongRequest, Plan, PopulationCell, SessionGroup

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
    answering = next((cell for cell in cells if cell.refusal is None), cells[0])
    requests = [(each.name, each.prompt_tokens, each.output_tokens) for each in request.workloads]
    requests += [(each.name, each.prompt_tokens, each.max_new_tokens) for each in request.spec.population]
    population = _population(request)
    estimate = activation_estimate(request, np.asarray(first.prompt_tokens, np.int64))
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
        activations_estimate_bytes=None if estimate is None else int(estimate),
        device=device_ledger(request, first.prompt_tokens),
        host=host_ledger(request.spec),
        hardware=plan_hardware(request.hardware),
        strategy=answering.strategy,
        admission=answering.admission,
        cells=cells,
        longest_sessions=tuple(
            found for strategy in request.strategies if (found := longest_session(request, strategy)) is not None
        ),
        long_requests=tuple(_long_requests(request, cells.index(answering), dict.fromkeys(requests))),
        population=population,
        population_device=_population_ledger(request) if population else None,
        assumptions=tuple(plan_assumptions(request, cells)),
    )


def _long_requests(
    request: PlanRequest, answering: int, asked: Iterable[tuple[str, int, int]]
) -> Iterator[LongRequest]:
    """What becomes of each request (name, prompt and output tokens) that is too long.

    Args:
        request: What is asked.
        answering: The index of the strategy that has to admit a suggestion.
        asked: The requests.
    """
    for name, prompt_tokens, output_tokens in asked:
        found = request.check(name, prompt_tokens, output_tokens)
        if found is not None and found.outcome == "suggested":
            fitting = fitting_prompt_tokens(request, request.strategies[answering], output_tokens)
            found = msgspec.structs.replace(found, fitting_prompt_tokens=fitting)
        if found is not None:
            yield found


def _admitted(request: PlanRequest) -> list[SessionGroup]:
    """The groups of the population that are not too long."""
    groups = request.spec.population
    return [each for each in groups if request.check(each.name, each.prompt_tokens, each.max_new_tokens) is None]


def _population(request: PlanRequest) -> tuple[PopulationCell, ...]:
    admitted = _admitted(request)
    return tuple(_population_cell(request, admitted, strategy) for strategy in request.strategies if admitted)


def _population_cell(request: PlanRequest, groups: list[SessionGroup], strategy: PlanStrategy) -> PopulationCell:
    ledger = _population_ledger(request)
    deployment = Deployment(
        shape=request.model.shape,
        bits=request.bits,
        partition=request.spec.partition,
        ledgers=Ledgers(
            device_bytes=None if ledger is None else ledger.kv_bytes, host_bytes=request.spec.host.kv_bytes
        ),
        batching=request.spec.batching,
        encoder_tokens=request.spec.encoder_tokens,
        prefill_chunk_tokens=request.spec.prefill_chunk_tokens,
    )
    sums = sum_population(groups, request.spec.percentile, strategy, deployment)
    admitted = {group.name for group in groups}
    left_out = tuple(group.name for group in request.spec.population if group.name not in admitted)
    cell = PopulationCell(strategy=strategy.label, kind=strategy_kind(strategy), left_out=left_out)
    if isinstance(sums, str):
        return msgspec.structs.replace(cell, refusal=sums)
    return msgspec.structs.replace(cell, sums=sums)


def _population_ledger(request: PlanRequest) -> DeviceLedger | None:
    """One rank's device memory while the longest admitted prompt of the population is prefilled."""
    return device_ledger(request, max((group.prompt_tokens for group in _admitted(request)), default=0))
