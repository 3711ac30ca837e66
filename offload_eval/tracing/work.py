"""What an operator computes and touches, from shapes alone."""

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any, Final

import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

_ATEN: Final = torch.ops.aten
_RENAMES: Final = (_ATEN._unsafe_view.default, _ATEN._reshape_alias.default, _ATEN.lift_fresh.default)
"""Views by another name."""
_READS_ROWS: Final = (
    _ATEN.embedding.default,
    _ATEN.index.Tensor,
    _ATEN.index_select.default,
    _ATEN.gather.default,
)
_WRITES_ROWS: Final = {
    _ATEN.index_copy_.default: 3,
    _ATEN.index_put_.default: 2,
    _ATEN.scatter_.src: 3,
}
"""Operators that write part of a tensor, and which argument is that part."""


_CAUSAL_AT: Final = {
    _ATEN._scaled_dot_product_flash_attention.default: 4,
    _ATEN._scaled_dot_product_efficient_attention.default: 6,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: 4,
}
"""Fused attention, and the place of `is_causal`: query `[batch, heads, new_tokens, head_dim]` comes first, then keys
`[batch, kv_heads, tokens, head_dim]`."""
_EXPERTS_PER_TOKEN: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")


def experts_per_token(config: Any) -> int:
    """Experts of a layer that one token is routed to, under the names that families give it; 1 where none is found."""
    text = config.get_text_config(decoder=True)
    found = (getattr(text, name, None) for name in _EXPERTS_PER_TOKEN)
    return next((count for count in found if isinstance(count, int) and count > 0), 1)


class WorkAccount:
    """Adds up what operators compute and read.

    Args:
        weights: The model's parameters and buffers.
        experts_per_token: Experts of a layer that one token is routed to.
    """

    def __init__(self, weights: Sequence[torch.Tensor], experts_per_token: int = 1) -> None:
        self._experts_per_token = experts_per_token
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self._sums: Counter[str] = Counter()
        self._read: dict[int, int] = {}
        """Storage of a weight -> bytes of it that this forward pass has read."""

    def add(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        """Counts one operator."""
        flops = matmul_flops(func, args, kwargs, result)
        self._sums["matmul_flops"] += flops
        self._sums["touched_bytes"] += touched_bytes(func, args, inputs, outputs)
        if func in _CAUSAL_AT:
            new_tokens, tokens = args[0].shape[-2], args[1].shape[-2]
            self._sums["attention_flops"] += flops
            if _is_causal(func, args, kwargs):
                # Of the last new_tokens columns the kernel skips the triangle above the diagonal.
                self._sums["hidden_flops"] += flops * (new_tokens - 1) // (2 * tokens)
        self._read_weights(func, args, inputs, outputs)

    def start_forward(self) -> None:
        """A forward pass reads its weights anew."""
        self._sums["weights_read_bytes"] += sum(self._read.values())
        self._read.clear()

    def counts(self) -> dict[str, int]:
        """What has been counted since the last restart."""
        names = ("matmul_flops", "attention_flops", "hidden_flops", "touched_bytes")
        read_bytes = self._sums["weights_read_bytes"] + sum(self._read.values())
        return {name: self._sums[name] for name in names} | {"weights_read_bytes": read_bytes}

    def restart(self) -> None:
        """Starts a phase."""
        self._sums.clear()
        self._read.clear()

    def _bytes_read(self, func: Any, args: tuple[Any, ...], weight: torch.Tensor, outputs: list[torch.Tensor]) -> int:
        """Of embeddings the rows that are looked up, of experts the fewest that any token needs."""
        whole = distinct_bytes(weight)
        if func in _READS_ROWS:
            rows = sum(output.nbytes for output in outputs)
            return min(rows, self._of_one_token(weight) if weight.dim() > 2 else whole)
        if func is _ATEN._grouped_mm.default and weight is args[1]:
            return self._of_one_token(weight)
        return whole

    def _of_one_token(self, experts: torch.Tensor) -> int:
        """Bytes of as many of a layer's experts, `[experts, in, out]`, as one token is routed to."""
        num_experts = int(experts.shape[0])
        return distinct_bytes(experts) // num_experts * min(num_experts, self._experts_per_token)

    def _read_weights(
        self, func: Any, args: tuple[Any, ...], inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        if func.is_view or func in _RENAMES:
            return
        for tensor in inputs:
            storage = tensor.untyped_storage()
            if storage._cdata in self._weights:
                read = self._bytes_read(func, args, tensor, outputs)
                self._read[storage._cdata] = max(read, self._read.get(storage._cdata, 0))


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    place = _CAUSAL_AT[func]
    return bool(args[place] if len(args) > place else kwargs.get("is_causal", False))


def distinct_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor names, those of an expanded dimension once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return prod(sizes) * tensor.itemsize


def _idle_bytes(args: tuple[Any, ...]) -> int:
    """Experts beyond the count of tokens that are routed."""
    weights: torch.Tensor = args[1]
    idle_bytes: int = weights.nbytes // weights.shape[0] * max(weights.shape[0] - args[0].shape[0], 0)
    return idle_bytes


def matmul_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations of a matrix product, a convolution or an attention; 0 for anything else.

    Source: torch.utils.flop_counter, whose attention formulas count the whole score matrix, causal or not; the two
    operators below have no formula there.
    """
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if func is _ATEN._scaled_dot_product_flash_attention_for_cpu.default:
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if func is _ATEN._grouped_mm.default:
        rows, depth = args[0].shape[-2:]
        return 2 * int(rows) * int(depth) * int(args[1].shape[-1])
    return 0


def touched_bytes(func: Any, args: tuple[Any, ...], inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    """Bytes that an operator reads and writes, each tensor once; of experts, those that tokens can reach.

    Args:
        func: The operator.
        args: Its positional arguments.
        inputs: All tensors among its arguments.
        outputs: All tensors it returned.
    """
    if func.is_view or func in _RENAMES:
        return 0
    if func in _READS_ROWS:
        return 2 * sum(output.nbytes for output in outputs)
    if func in _WRITES_ROWS:
        return 2 * int(args[_WRITES_ROWS[func]].nbytes)
    if func is _ATEN._grouped_mm.default:
        return _total(inputs, outputs) - _idle_bytes(args)
    return _total(inputs, outputs)


def _total(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    distinct = {id(tensor): distinct_bytes(tensor) for tensor in (*inputs, *outputs)}
    return sum(distinct.values())
