"""The share of a model's cache that each rank of a replica holds."""

from typing import Final

import msgspec

from offload_eval.core.shape import LayerGroup, LinearState, ModelShape
from offload_eval.errors import InputError

_REPLICATED: Final = ("latent", "compressed")
"""One vector a token for all heads: every tensor-parallel rank needs all of it."""


def rank_shapes(shape: ModelShape, tensor_parallel: int, pipeline_parallel: int) -> tuple[ModelShape, ...]:
    """The cache layout of one rank of each pipeline stage, first stage first; a stage's ranks hold equal shares.

    Tensor parallel: kv heads are divided, rounded up, and replicated where there are fewer heads than ranks; latents,
    indexer keys and compressed entries are replicated; states are divided. Pipeline parallel: whole layers, as
    evenly as they go.

    Raises:
        InputError: There are more stages than layers, or layers may be parted from those whose KV they read.
    """
    if pipeline_parallel > 1 and any(group.cache == "shared" for group in shape.layer_groups):
        raise InputError(
            f"pipeline_parallel is {pipeline_parallel}; allowed: 1, since layers of this model read earlier layers' KV"
        )
    divided = msgspec.structs.replace(
        shape, layer_groups=tuple(_tensor_share(group, tensor_parallel) for group in shape.layer_groups)
    )
    return tuple(_stage(divided, first, last) for first, last in _stage_layers(shape, pipeline_parallel))


def _tensor_share(group: LayerGroup, ranks: int) -> LayerGroup:
    difference = group.transformers
    if difference is not None and difference.kv_heads is not None:
        difference = msgspec.structs.replace(difference, kv_heads=_share(difference.kv_heads, ranks))
    return msgspec.structs.replace(
        group,
        kv_heads=group.kv_heads if group.cache in _REPLICATED else _share(group.kv_heads, ranks),
        state=None if group.state is None else _state_share(group.state, ranks),
        transformers=difference,
    )


def _state_share(state: LinearState, ranks: int) -> LinearState:
    return msgspec.structs.replace(
        state,
        conv_channels=_share(state.conv_channels, ranks),
        recurrent_values=_share(state.recurrent_values, ranks),
    )


def _share(whole: int, ranks: int) -> int:
    return -(-whole // ranks)


def _stage_layers(shape: ModelShape, stages: int) -> list[tuple[int, int]]:
    """The first layer of each stage and the one after its last.

    Layers left over go one each to the stages before the last, backwards. Source: vLLM, distributed/utils.py
    (get_pp_indices).
    """
    num_layers = sum(group.count for group in shape.layer_groups) // shape.caches_per_layer
    if stages > num_layers:
        raise InputError(f"pipeline_parallel is {stages}; allowed: 1 to {num_layers}, the model's layers")
    sizes = [num_layers // stages] * stages
    for index in range(num_layers % stages):
        sizes[-index - 2] += 1
    ends = [sum(sizes[: index + 1]) for index in range(stages)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _stage(shape: ModelShape, first: int, last: int) -> ModelShape:
    held = shape.order[first * shape.caches_per_layer : last * shape.caches_per_layer]
    kept = list(dict.fromkeys(held))
    groups = tuple(msgspec.structs.replace(shape.layer_groups[index], count=held.count(index)) for index in kept)
    return msgspec.structs.replace(shape, layer_groups=groups, layer_order=tuple(map(kept.index, held)))
