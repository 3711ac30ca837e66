"""What an operator computes and touches, from shapes alone."""

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
        weights: torch.Tensor = args[1]
        idle_bytes: int = weights.nbytes // weights.shape[0] * max(weights.shape[0] - args[0].shape[0], 0)
        return _total(inputs, outputs) - idle_bytes
    return _total(inputs, outputs)


def _total(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    distinct = {id(tensor): tensor.nbytes for tensor in (*inputs, *outputs)}
    return sum(distinct.values())
