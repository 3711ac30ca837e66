"""The form of KV rows on the device and on the host: as computed, or quantized on the device.

A token is one row: the keys of all sessions and heads, then their values. Any range of tokens is one contiguous
piece. Only new rows are ever quantized, so that error does not accumulate; reading rows back allocates nothing.

Shape suffixes: T tokens, B batch, H kv_heads, D head_dim, R values of a row, P bytes of a quantized row, C bytes of a
quantized head, G groups of a head, V values of a group.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch

from offload_eval.bounds.host_rows import codes_bytes, group_size, host_head_bytes, numbers_a_group
from offload_eval.core.experiment import HostDtype

_LEVELS: Final = {"int8": 255, "int4": 15}
_LARGEST_FP8: Final = 448.0
"""Of float8_e4m3fn."""
_PIECE_VALUES: Final = 2**23
_MOST_PIECES: Final = 8
"""A long prompt is quantized in pieces, which bounds their float32 working space; in few, each of many operators."""


class RowFormat(NamedTuple):
    """One layer's rows."""

    batch_size: int
    kv_heads: int
    key_head_dim: int
    value_head_dim: int
    dtype: torch.dtype
    device: torch.device
    host_dtype: HostDtype

    @property
    def row_values(self) -> int:
        """Values of a row."""
        return self.batch_size * self.kv_heads * (self.key_head_dim + self.value_head_dim)

    def empty_rows(self, tokens: int) -> torch.Tensor:
        """Rows on the device, as attention reads them: `[tokens, row_values]`."""
        return torch.empty(tokens, self.row_values, dtype=self.dtype, device=self.device)

    def host_shape(self, tokens: int) -> tuple[int, int]:
        """Of rows in the form in which they cross the link."""
        if self.host_dtype == "native":
            return tokens, self.row_values
        return tokens, self.batch_size * self.kv_heads * sum(head.host_bytes for head in self._heads)

    @property
    def host_torch_dtype(self) -> torch.dtype:
        """Of rows in the form in which they cross the link: bytes, where they are quantized."""
        return self.dtype if self.host_dtype == "native" else torch.uint8

    def keys_and_values(self, rows_TR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of rows: `[tokens, batch, kv_heads, key_head_dim]`, and the values alike."""
        keys, values = rows_TR.split([self._sessions_heads * head.head_dim for head in self._heads], dim=-1)
        return self._by_head(keys, self.key_head_dim), self._by_head(values, self.value_head_dim)

    def quantize(self, rows_TR: torch.Tensor, host_TP: torch.Tensor) -> None:
        """Quantizes rows, on their device.

        Args:
            rows_TR: New rows.
            host_TP: Where their quantized form goes.
        """
        tokens = max(1, _PIECE_VALUES // self.row_values, -(-rows_TR.shape[0] // _MOST_PIECES))
        for rows, host in zip(rows_TR.split(tokens), host_TP.split(tokens), strict=True):
            for head, values_TBHD, host_TBHC in self._both(rows, host):
                head.quantize(values_TBHD, host_TBHC)

    def dequantize(self, host_TP: torch.Tensor, rows_TR: torch.Tensor) -> None:
        """Reads quantized rows back, in place and without working space.

        Args:
            host_TP: Quantized rows, on the device.
            rows_TR: Where the rows go.
        """
        for head, values_TBHD, host_TBHC in self._both(rows_TR, host_TP):
            head.dequantize(host_TBHC, values_TBHD)

    def _both(
        self, rows_TR: torch.Tensor, host_TP: torch.Tensor
    ) -> Iterator[tuple["QuantizedHead", torch.Tensor, torch.Tensor]]:
        """How heads are quantized, and views of both forms by head; keys and values at once where they are alike."""
        keys, values = self._heads
        if keys == values:
            shape = (2 * self.batch_size, self.kv_heads, -1)
            yield keys, rows_TR.unflatten(-1, shape), host_TP.unflatten(-1, shape)
            return
        hosts = host_TP.split([self._sessions_heads * head.host_bytes for head in self._heads], dim=-1)
        for head, part, host in zip(self._heads, self.keys_and_values(rows_TR), hosts, strict=True):
            if head.head_dim:
                yield head, part, self._by_head(host, head.host_bytes)

    def _by_head(self, part_TR: torch.Tensor, width: int) -> torch.Tensor:
        by_head: torch.Tensor = part_TR.unflatten(-1, (self.batch_size, self.kv_heads, width))
        return by_head

    @property
    def _sessions_heads(self) -> int:
        return self.batch_size * self.kv_heads

    @property
    def _heads(self) -> tuple["QuantizedHead", "QuantizedHead"]:
        return (
            QuantizedHead(self.key_head_dim, self.dtype, self.host_dtype),
            QuantizedHead(self.value_head_dim, self.dtype, self.host_dtype),
        )


class QuantizedHead(NamedTuple):
    """One head's key or value: its codes, then a scale a group, then, of integers, an offset a group."""

    head_dim: int
    dtype: torch.dtype
    host_dtype: HostDtype

    @property
    def host_bytes(self) -> int:
        """Bytes of its quantized form."""
        return host_head_bytes(self.host_dtype, self.head_dim, self.dtype.itemsize)

    def quantize(self, values_TBHD: torch.Tensor, host_TBHC: torch.Tensor) -> None:
        """Fills in scales, offsets and codes."""
        values = self._by_group(values_TBHD).float()
        scale_TBHG1, offset_TBHG1 = self._numbers(host_TBHC)
        if offset_TBHG1 is None:
            _fill_scale(scale_TBHG1, values.abs().amax(-1, keepdim=True) / _LARGEST_FP8)
            steps = (values / scale_TBHG1.float()).clamp_(-_LARGEST_FP8, _LARGEST_FP8)
            codes = steps.to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            levels = _LEVELS[self.host_dtype]
            least, most = values.aminmax(dim=-1, keepdim=True)
            offset_TBHG1.copy_(least)
            _fill_scale(scale_TBHG1, (most - least) / levels)
            steps = (values - offset_TBHG1.float()) / scale_TBHG1.float()
            codes = steps.round_().clamp_(0, levels).to(torch.uint8)
        self._pack(codes.flatten(-2), host_TBHC)

    def dequantize(self, host_TBHC: torch.Tensor, values_TBHD: torch.Tensor) -> None:
        """Writes the values, in place."""
        self._unpack(host_TBHC, values_TBHD)
        scale_TBHG1, offset_TBHG1 = self._numbers(host_TBHC)
        values_TBHGV = self._by_group(values_TBHD)
        if offset_TBHG1 is None:
            values_TBHGV.mul_(scale_TBHG1)
        else:
            torch.addcmul(offset_TBHG1, values_TBHGV, scale_TBHG1, out=values_TBHGV)
        if self.dtype == torch.float16:  # a scale is rounded up, and may lead past the largest value
            values_TBHD.clamp_(-torch.finfo(self.dtype).max, torch.finfo(self.dtype).max)

    def _by_group(self, values_TBHD: torch.Tensor) -> torch.Tensor:
        by_group: torch.Tensor = values_TBHD.unflatten(-1, (-1, group_size(self.head_dim)))
        return by_group

    def _numbers(self, host_TBHC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        codes = codes_bytes(self.host_dtype, self.head_dim, self.dtype.itemsize)
        numbers = host_TBHC[..., codes:].view(self.dtype)
        groups = numbers.unflatten(-1, (numbers_a_group(self.host_dtype), -1)).unsqueeze(-1)
        return groups[..., 0, :, :], groups[..., 1, :, :] if self.host_dtype != "fp8" else None

    def _pack(self, codes_TBHD: torch.Tensor, host_TBHC: torch.Tensor) -> None:
        if self.host_dtype != "int4":
            host_TBHC[..., : self.head_dim] = codes_TBHD
            return
        half = -(-self.head_dim // 2)
        host_TBHC[..., :half] = codes_TBHD[..., :half]
        host_TBHC[..., : self.head_dim - half].bitwise_or_(codes_TBHD[..., half:] << 4)

    def _unpack(self, host_TBHC: torch.Tensor, values_TBHD: torch.Tensor) -> None:
        if self.host_dtype != "int4":
            codes = host_TBHC[..., : self.head_dim]
            values_TBHD.copy_(codes.view(torch.float8_e4m3fn) if self.host_dtype == "fp8" else codes)
            return
        # A byte is a number of at most 8 bits, exact in every dtype: both of its halves come out by arithmetic.
        half = -(-self.head_dim // 2)
        low, high = values_TBHD[..., :half], values_TBHD[..., half:]
        low.copy_(host_TBHC[..., :half])
        high.copy_(host_TBHC[..., : self.head_dim - half])
        high.mul_(1 / 16).floor_()
        low[..., : self.head_dim - half].sub_(high, alpha=16)


def _fill_scale(scale_TBHG1: torch.Tensor, wanted_TBHG1: torch.Tensor) -> None:
    """Rounds scales up, so that every value of a group stays within its codes; a group without a range has any."""
    rounding = torch.finfo(scale_TBHG1.dtype)
    least_step = rounding.smallest_normal * rounding.eps
    rounded_up = wanted_TBHG1 * (1 + rounding.eps / 2) + least_step
    scale_TBHG1.copy_(torch.where(wanted_TBHG1 > 0, rounded_up, 1.0))
