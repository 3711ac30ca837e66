"""Our offload: KV lives on the host, new tokens alone are written back, layers are fetched ahead of use.

Layout: a layer is rows, `[capacity, row_values]`, one a token, on the host and on the device alike (`host_rows.py`).
Any range of tokens is one contiguous piece, so an append and a prefetch are one copy each. Attention reads the rows as
strided views `[batch, kv_heads, tokens, head_dim]`.

Shape suffixes: T tokens, B batch, H kv_heads, D head_dim, R values of a row.
"""

from typing import Any, ClassVar

import torch

from offload_eval.bounds.host_rows import is_resident, num_resident
from offload_eval.core.experiment import DeviceName, StreamedSpec, Workload
from offload_eval.strategies.host_rows import RowFormat
from offload_eval.strategies.link import Link
from offload_eval.strategies.scratch_ring import HostRows, ScratchRing
from offload_eval.strategies.upstream import Cache, DynamicCache, DynamicLayer


class Streamed:
    """Full-attention layers are streamed, but for those that are resident; windows and states stay on the device."""

    uses_link: ClassVar[bool] = True

    def __init__(self, spec: StreamedSpec) -> None:
        self.spec = spec

    def refusal(self, _device: DeviceName, config: Any, _workload: Workload) -> str | None:
        """Needs a decoder-only model with a layer of full attention, whose KV no other layer reads."""
        if config.is_encoder_decoder:
            return "the streamed cache has no cross-attention: encoder-decoder models are not supported"
        if getattr(config.get_text_config(decoder=True), "num_kv_shared_layers", None):
            return "later layers of this model read the KV of earlier ones, which the scratch ring has reused by then"
        if not num_streamable(config):
            return "the model has no layer of full attention to stream"
        return None

    def prepare(self, _device: DeviceName) -> None:
        """Nothing to load."""

    def build_cache(self, config: Any, link: Link, capacity_tokens: int) -> Any:
        """Upstream's own cache, with every full-attention layer replaced by one that is streamed or resident."""
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
        num_layers = sum(map(_is_streamable, layers))
        placement = Placement(link, self.spec, num_layers, capacity_tokens)
        indices = iter(range(num_layers))
        return Cache(
            layers=[StreamedLayer(placement, next(indices)) if _is_streamable(layer) else layer for layer in layers]
        )


def num_streamable(config: Any) -> int:
    """Layers of full attention: those that can be streamed."""
    return sum(map(_is_streamable, DynamicCache(config=config.get_text_config(decoder=True)).layers))


def _is_streamable(layer: Any) -> bool:
    return type(layer) is DynamicLayer


class Placement:
    """Where each full-attention layer's KV lives, decided when the first one's form is known; a ring a device."""

    def __init__(self, link: Link, spec: StreamedSpec, num_layers: int, capacity_tokens: int) -> None:
        self.spec = spec
        self.capacity_tokens = capacity_tokens
        self._link = link
        self._num_layers = num_layers
        self._num_resident: int | None = None
        self._rings: dict[torch.device, ScratchRing] = {}

    def place(self, index: int, row_format: RowFormat) -> "ResidentRows | StreamedRows":
        """Allocates what a layer's KV needs on both tiers.

        Args:
            index: Of the layer among those of full attention.
            row_format: The form of its rows.
        """
        if self._num_resident is None:
            layer_bytes = self.capacity_tokens * row_format.row_values * row_format.dtype.itemsize
            self._num_resident = num_resident(self.spec, self._num_layers, layer_bytes)
        if is_resident(index, self._num_resident, self._num_layers):
            return ResidentRows(row_format.empty_rows(self.capacity_tokens))
        if row_format.device not in self._rings:
            num_streamed = self._num_layers - self._num_resident
            ring = ScratchRing(self._link, self.spec, num_streamed, self.capacity_tokens)
            self._rings[row_format.device] = ring
        return StreamedRows(self._rings[row_format.device], row_format)


class ResidentRows:
    """One layer's KV in a device buffer of full length."""

    def __init__(self, buffer_TR: torch.Tensor) -> None:
        self._buffer_TR = buffer_TR
        self.length_tokens = 0

    def open(self) -> torch.Tensor:
        """The rows, the layer's prefix in them."""
        return self._buffer_TR

    def append(self, new_TR: torch.Tensor) -> None:
        """Keeps rows that have been written after the prefix."""
        self.length_tokens += new_TR.shape[0]

    def payload_tensors(self) -> list[torch.Tensor]:
        """The buffer, whole: no other layer can use what is not filled."""
        return [self._buffer_TR]

    def restart(self) -> None:
        """Forgets the tokens and keeps the buffer."""
        self.length_tokens = 0


class StreamedRows:
    """One layer's KV on the host, visited through a ring of scratch."""

    def __init__(self, ring: ScratchRing, row_format: RowFormat) -> None:
        self.ring = ring
        self._rows = HostRows()
        self._ordinal = ring.enroll(self._rows, row_format)

    @property
    def length_tokens(self) -> int:
        """Tokens held."""
        return self._rows.length_tokens

    def open(self) -> torch.Tensor:
        """Scratch with the layer's prefix in it, until the ring comes round."""
        return self.ring.checkout(self._ordinal)

    def append(self, new_TR: torch.Tensor) -> None:
        """Writes back rows that have been written after the prefix."""
        self.ring.append(self._rows, new_TR)

    def payload_tensors(self) -> list[torch.Tensor]:
        """The rows in use on the host, and the ring's scratch, which all layers share."""
        assert self._rows.buffer is not None
        return [self._rows.buffer[: self.length_tokens], *self.ring.scratch]

    def restart(self) -> None:
        """Forgets the tokens, of every layer of the ring, and keeps the buffers."""
        self.ring.restart()


class StreamedLayer(DynamicLayer):  # type: ignore[misc]  # untyped upstream
    """One full-attention layer of upstream's cache, whose KV is where its placement says."""

    is_croppable = False

    def __init__(self, placement: Placement, index: int) -> None:
        super().__init__()
        self.placement = placement
        self.index = index
        self.rows: ResidentRows | StreamedRows | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates at full capacity, and once."""
        batch_size, kv_heads, _, key_head_dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.format = RowFormat(
            batch_size=batch_size,
            kv_heads=kv_heads,
            key_head_dim=key_head_dim,
            value_head_dim=value_states.shape[-1],
            dtype=self.dtype,
            device=self.device,
            host_dtype=self.placement.spec.host_dtype,
        )
        self.rows = self.placement.place(self.index, self.format)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends the new tokens, and returns all keys and values, on the device.

        New tokens are returned as they came; those before them as the host keeps them.

        Args:
            key_states: `[batch, kv_heads, new_tokens, key_head_dim]`.
            value_states: `[batch, kv_heads, new_tokens, value_head_dim]`.

        Returns:
            Views `[batch, kv_heads, tokens, head_dim]`, valid until the next update.

        Raises:
            ValueError: The tokens would pass the capacity the cache was built for.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.rows is not None
        capacity_tokens = self.placement.capacity_tokens
        start, end = self.rows.length_tokens, self.rows.length_tokens + key_states.shape[-2]
        if end > capacity_tokens:
            raise ValueError(f"{end} tokens in a streamed cache built for {capacity_tokens}")
        rows_TR = self.rows.open()
        new_TR = rows_TR[start:end]
        for part_TBHD, states in zip(self.format.keys_and_values(new_TR), (key_states, value_states), strict=True):
            part_TBHD.copy_(states.permute(2, 0, 1, 3))
        self.rows.append(new_TR)
        keys_TBHD, values_TBHD = self.format.keys_and_values(rows_TR[:end])
        return keys_TBHD.permute(1, 2, 0, 3), values_TBHD.permute(1, 2, 0, 3)

    def get_seq_length(self) -> int:
        """Tokens held."""
        return 0 if self.rows is None else self.rows.length_tokens

    def payload_tensors(self) -> list[torch.Tensor]:
        """What the layer holds on both tiers, and the scratch it shares."""
        return [] if self.rows is None else self.rows.payload_tensors()

    def reset(self) -> None:
        """Forgets the tokens and keeps the buffers."""
        if self.rows is not None:
            self.rows.restart()

    def crop(self, *_args: Any, **_kwargs: Any) -> None:
        """Refuses: rows already on the host are not taken back."""
        raise ValueError("a streamed cache cannot be cropped: assisted generation is not supported")

    def reorder_cache(self, *_args: Any, **_kwargs: Any) -> None:
        """Refuses: reordering would rewrite the whole host tier at every step."""
        raise ValueError("a streamed cache cannot be reordered: beam search is not supported")

    batch_repeat_interleave = batch_select_indices = reorder_cache
