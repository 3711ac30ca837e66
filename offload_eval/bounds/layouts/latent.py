"""Multi-head latent attention: one latent and one rotary key a token, for all heads together.

Source: transformers 5.24, models/deepseek_v3 (the latent itself is cached since 5.15), models/deepseek_v32.
"""

from offload_eval.bounds.layouts.attention import Layers, repeated
from offload_eval.bounds.layouts.fields import Fields
from offload_eval.core.shape import Compression, LayerGroup, TransformersDifference


def latent_layer(fields: Fields, indexer_head_dim: int = 0) -> LayerGroup:
    """One MLA layer; the expanded head sizes and head counts do not reach the cache."""
    fields.ignore("v_head_dim", "head_dim", "num_key_value_heads")
    return LayerGroup(
        count=1,
        cache="latent",
        kv_heads=1,
        key_head_dim=fields.positive("kv_lora_rank"),
        value_head_dim=fields.positive("qk_rope_head_dim"),
        indexer_head_dim=indexer_head_dim,
    )


def mla(fields: Fields) -> Layers:
    """DeepSeek V2 and V3, GLM-4.7-Flash: every layer is latent."""
    return repeated(fields, latent_layer(fields), "full_attention")


def longcat(fields: Fields) -> Layers:
    """LongCat-Flash: two attentions, and so two caches, a layer."""
    return [latent_layer(fields)] * (2 * fields.layers("num_layers"))


def mla_with_indexer(fields: Fields) -> Layers:
    """DeepSeek V3.2, GLM-5: an indexer key a token, except on layers whose indexer_types entry is shared."""
    with_indexer, without = latent_layer(fields, fields.positive("index_head_dim")), latent_layer(fields)
    if fields.get("indexer_types") is None:
        return repeated(fields, with_indexer, "indexed_attention")
    layers = len(repeated(fields, with_indexer, "indexed_attention"))
    kinds = {"full": with_indexer, "shared": without}
    return [fields.choice("indexer_types", kind, kinds) for kind in fields.per_layer("indexer_types", layers)]


def deepseek_v4(fields: Fields) -> Layers:
    """DeepSeek-V4: on every layer a window of one shared key and value; on most, compressed entries as well.

    Source: transformers 5.24, models/deepseek_v4. compress_ratios lists 0, 4 or 128 a layer, the layer of the
    next-token predictor last; layer_types and compress_rates say the same in a converted config.
    """
    layers = fields.layers()
    if fields.get("layer_types") is not None:
        kinds = fields.per_layer("layer_types", layers)
        fields.ignore("compress_ratios")
    else:
        ratios = fields.sequence("compress_ratios")
        if ratios is None:
            raise fields.unknown("compress_ratios", "one entry for each layer is needed")
        if len(ratios) < layers:
            raise fields.invalid("compress_ratios", f"a list with an entry for each of {layers} layers")
        kinds = [fields.choice("compress_ratios", ratio, _KIND_OF_RATIO) for ratio in ratios[:layers]]
    by_kind = _deepseek_v4_kinds(fields)
    return [fields.choice("layer_types", kind, by_kind) for kind in kinds]


_KIND_OF_RATIO = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def _deepseek_v4_kinds(fields: Fields) -> dict[str, LayerGroup]:
    if fields.positive("num_key_value_heads") != 1:
        raise fields.unknown("num_key_value_heads", "one shared key and value is understood")
    window, width = fields.window("sliding_window"), fields.positive("head_dim")
    rates = Fields(
        fields.section("compress_rates") or {kind: ratio for ratio, kind in _KIND_OF_RATIO.items()},
        section="compress_rates",
    )
    sparse, heavy = (rates.positive(_KIND_OF_RATIO[ratio]) for ratio in (4, 128))
    plain = LayerGroup(
        count=1,
        cache="sliding",
        kv_heads=1,
        key_head_dim=width,
        window_tokens=window,
        transformers=TransformersDifference(copies_values=True),
    )
    return {
        "sliding_attention": plain,
        "compressed_sparse_attention": _compressed(
            window,
            width,
            Compression(ratio_tokens=sparse, indexer_head_dim=fields.positive("index_head_dim"), overlaps=True),
        ),
        "heavily_compressed_attention": _compressed(window, width, Compression(ratio_tokens=heavy)),
    }


def _compressed(window_tokens: int, width: int, compression: Compression) -> LayerGroup:
    return LayerGroup(
        count=1,
        cache="compressed",
        kv_heads=1,
        key_head_dim=width,
        window_tokens=window_tokens,
        compression=compression,
    )
