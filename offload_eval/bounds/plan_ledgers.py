"""The two ledgers of a plan."""

import numpy as np

from offload_eval.bounds.activations import estimate_activation_bytes
from offload_eval.bounds.grid import Ledgers
from offload_eval.bounds.kv_views import Counts
from offload_eval.bounds.plan_request import PlanRequest
from offload_eval.core.plan import DeviceLedger, HostLedger, PlanSpec


def device_ledger(request: PlanRequest, prompt_tokens: int) -> DeviceLedger | None:
    """One rank's device memory, for prompts of a length; None without a budget."""
    budget = request.budget
    if budget is None:
        return None
    tokens = np.asarray(prompt_tokens, np.int64)
    activations_bytes = int(_activation_bytes(request, tokens))
    return DeviceLedger(
        budget_bytes=budget.device_bytes,
        weights_bytes=_rank_weights_bytes(request),
        activations_bytes=activations_bytes,
        prefill_tokens=int(_prefilled(request, tokens)) if request.spec.estimate_activations else None,
        runtime_bytes=budget.runtime_bytes,
        reserve_bytes=budget.reserve_bytes,
        kv_bytes=max(0, _without_activations(request) - activations_bytes),
        budget_from=request.hardware.name if request.hardware is not None and request.budget_is_hardwares else None,
    )


def grid_ledgers(request: PlanRequest, prompt_tokens: Counts) -> Ledgers:
    """What the KV cache may take, for prompts of each length."""
    host_bytes = request.spec.host.kv_bytes
    if request.budget is None:
        return Ledgers(host_bytes=host_bytes)
    available_bytes = _without_activations(request) - _activation_bytes(request, prompt_tokens)
    return Ledgers(device_bytes=np.maximum(available_bytes, 0), host_bytes=host_bytes)


def host_ledger(spec: PlanSpec) -> HostLedger:
    """The host's memory, and what of it pinned KV may take."""
    return HostLedger(
        memory_bytes=spec.host.memory_bytes,
        limit_bytes=spec.host.limit_bytes,
        reserve_bytes=spec.host.reserve_bytes,
        kv_bytes=spec.host.kv_bytes,
    )


def activation_estimate(request: PlanRequest, prompt_tokens: Counts) -> Counts | None:
    """Bytes of one session's prefill on a rank; None where the closed form does not cover the model."""
    ranks = request.spec.partition.tensor_parallel
    return estimate_activation_bytes(request.model.shape, _prefilled(request, prompt_tokens), request.bits, ranks)


def _activation_bytes(request: PlanRequest, prompt_tokens: Counts) -> Counts:
    if not request.spec.estimate_activations:
        return np.full_like(prompt_tokens, request.spec.activations_bytes)
    estimate = activation_estimate(request, prompt_tokens)
    assert estimate is not None, "asking for an estimate that does not exist is refused"
    return estimate


def _without_activations(request: PlanRequest) -> int:
    assert request.budget is not None, "there is a budget"
    taken_bytes = _rank_weights_bytes(request) + request.budget.runtime_bytes + request.budget.reserve_bytes
    return request.budget.device_bytes - taken_bytes


def _rank_weights_bytes(request: PlanRequest) -> int:
    assert request.budget is not None, "there is a budget"
    weights_bytes = request.budget.weights_bytes or request.model.weights_bytes
    assert weights_bytes is not None, "a budget comes with the weights"
    partition = request.spec.partition
    return -(-weights_bytes // (partition.tensor_parallel * partition.pipeline_parallel))


def _prefilled(request: PlanRequest, prompt_tokens: Counts) -> Counts:
    chunk = request.spec.prefill_chunk_tokens
    return prompt_tokens if chunk is None else np.minimum(prompt_tokens, chunk)
