"""What a plan assumes, in words."""

from collections.abc import Iterator, Sequence
from typing import Final

from offload_eval.bounds.activations import ACTIVATIONS_ASSUMPTION
from offload_eval.bounds.plan_link import hardware_assumptions
from offload_eval.bounds.plan_request import PlanRequest
from offload_eval.core.plan import PlanCell

_SWAP_ASSUMPTION: Final = "Swap never counts as KV capacity, on the device or on the host."


def plan_assumptions(request: PlanRequest, cells: Sequence[PlanCell]) -> Iterator[str]:
    """Every assumption once: the plan's own, then those of its strategies."""
    yield from _own(request)
    strategies: dict[str, dict[str, None]] = {}
    for cell in cells:
        for assumption in cell.assumptions:
            strategies.setdefault(assumption, {})[cell.strategy] = None
    for assumption, names in strategies.items():
        yield f"{', '.join(names)}: {assumption}"


def _own(request: PlanRequest) -> Iterator[str]:
    yield (
        f"{request.bits}-bit values before any quantizer. A session of P prompt and G generated tokens caches "
        "P + G - 1: the last token is never cached."
    )
    yield (
        "Every session is at its full length. Logits, score matrices, quantizer transients and fragmentation are not "
        "counted."
    )
    yield from _ledger_assumptions(request)
    yield from hardware_assumptions(request)
    yield from _partition_assumptions(request)
    yield from _model_assumptions(request)


def _ledger_assumptions(request: PlanRequest) -> Iterator[str]:
    spec = request.spec
    if request.budget is not None:
        if request.budget.weights_bytes is None:
            yield f"Weights: {request.model.weights_source}."
        if request.budget.runtime_bytes == request.budget.reserve_bytes == 0:
            yield "Neither runtime nor reserve is stated: the device context and fragmentation get nothing."
        if spec.estimate_activations:
            yield ACTIVATIONS_ASSUMPTION
        elif spec.activations_bytes == 0:
            yield "No device memory is kept for activations."
    if spec.host.kv_bytes is None:
        yield "Host memory is not stated, so that no strategy is limited by it."
    else:
        yield (
            "Pinned buffers are rounded up to powers of two, as torch's host allocator does; the sessions of a "
            "strategy are one batch, which shares them."
        )
    yield _SWAP_ASSUMPTION


def _partition_assumptions(request: PlanRequest) -> Iterator[str]:
    partition = request.spec.partition
    if partition.tensor_parallel * partition.pipeline_parallel > 1:
        yield "The budget is one rank's; weights are divided evenly over ranks, and nothing of them is replicated."
        yield "A session's device KV is the fullest rank's; its host KV and link bytes are all ranks' of a replica."
    if partition.tensor_parallel > 1:
        yield (
            "kv heads and states are divided over tensor-parallel ranks, rounded up; heads are replicated where there "
            "are too few, latents and indexer keys always."
        )
        yield from _uneven_heads(request)
    if partition.pipeline_parallel > 1:
        yield "The fullest pipeline stage decides; layers that are counted below are the whole model's."
    if partition.data_parallel > 1:
        yield "Replicas are filled alike and share one host; a batch, and a population, is one replica's."


def _model_assumptions(request: PlanRequest) -> Iterator[str]:
    config_dtype = request.model.config_dtype
    if config_dtype not in (None, request.model.dtype):
        yield f"The config's own dtype is {config_dtype}; counted is {request.model.dtype} (--dtype)."
    caches = {group.cache for group in request.model.shape.layer_groups}
    if "cross" in caches and request.spec.encoder_tokens is None:
        yield (
            "Prompt and generated tokens are the decoder's. Cross-attention reads the model's fixed count of encoder "
            "tokens, or else as many as the decoder caches; --encoder-tokens states it."
        )
    if not request.model.shape.in_transformers:
        yield "The model's cache is its own code, not transformers': there is the ideal view only."
    if request.spec.population:
        yield (
            "Prefixes, and prompts of beams, are shared in a paged engine alone: whole blocks, in layers that keep "
            "every token and in windows that hold the whole session; not in layers with a state."
        )
        batches = "one left-padded batch" if request.spec.batching == "one" else "one left-padded batch for each group"
        yield f"Caches of transformers hold the population as {batches}; a paged engine holds each session."
        if request.spec.percentile is not None:
            yield (
                f"At {request.spec.percentile} every session generates its own group's {request.spec.percentile}. "
                "That is no percentile of the sum, which can lie far above it where lengths are skewed."
            )


def _uneven_heads(request: PlanRequest) -> Iterator[str]:
    ranks = request.spec.partition.tensor_parallel
    heads = sorted({group.kv_heads for group in request.model.shape.layer_groups if group.kv_heads > 1})
    uneven = [count for count in heads if max(count, ranks) % min(count, ranks)]
    if uneven:
        listed = " and ".join(map(str, uneven))
        yield f"{ranks} ranks and {listed} kv heads do not divide: the fullest rank is counted, and engines refuse it."
