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


def grid_ledgers(request: PlanRequest, prompt_tokens: Counts) -> Ledgers:
    """What the KV cache may take, for prompts of each length."""
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


def activation_estimate(request: PlanRequest, prompt_tokens: int) -> int | None:
    """Bytes of one session's prefill; None where the closed form does not cover the model."""
    tokens = _prefilled(request, np.asarray(prompt_tokens, np.int64))
    estimate = estimate_activation_bytes(request.model.shape, tokens, request.bits)
    return None if estimate is None else int(estimate)


def _activations_bytes(request: PlanRequest, prompt_tokens: int) -> int:
    if not request.spec.estimate_activations:
        return request.spec.activations_bytes
    return activation_estimate(request, prompt_tokens) or 0


def host_ledger(spec: PlanSpec) -> HostLedger:
    """The host's memory, and what of it pinned KV may take."""
    return HostLedger(
        memory_bytes=spec.host.memory_bytes,
        limit_bytes=spec.host.limit_bytes,
        reserve_bytes=spec.host.reserve_bytes,
        kv_bytes=spec.host.kv_bytes,
    )
