"""Our offload: KV lives on the host, new tokens alone are written back, layers are fetched ahead of use.

Layout: a layer's rows, `[capacity, batch, kv_heads, key_head_dim + value_head_dim]`, one row a token, on the host
and in the device's scratch alike. Any range of tokens is one contiguous piece, so an append and a prefetch are
one copy each. Attention reads the scratch as strided views `[batch, kv_heads, tokens, head_dim]`.

Shape suffixes: T tokens, B batch, H kv_heads, D head_dim, E key_head_dim + value_head_dim.
"""

from typing import Any, ClassVar

import torch

from offload_eval.core.experiment import DeviceName, StreamedSpec, Workload
from offload_eval.strategies.link import Link, Transfer
from offload_eval.strategies.upstream import Cache, DynamicCache, DynamicLayer


class Streamed:
    """Layers of full attention are streamed; layers that keep a window or a state stay on the device."""

    uses_link: ClassVar[bool] = True

    def __init__(self, spec: StreamedSpec) -> None:
        self.spec = spec

    def refusal(self, _device: DeviceName, config: Any, _workload: Workload) -> str | None:
        """Needs a decoder-only model with a layer of full attention, whose KV no other layer reads."""
        if config.is_encoder_decoder:
            return "the streamed cache has no cross-attention: encoder-decoder models are not supported"
        if getattr(config.get_text_config(decoder=True), "num_kv_shared_layers", None):
            return "later layers of this model read the KV of earlier ones, which the scratch ring has reused by then"
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
        if not any(type(layer) is DynamicLayer for layer in layers):
            return "the model has no layer of full attention to stream"
        return None

    def prepare(self, _device: DeviceName) -> None:
        """Nothing to load."""

    def build_cache(self, config: Any, link: Link, capacity_tokens: int) -> Any:
        """Upstream's own cache, with every full-attention layer replaced by a streamed one."""
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
        num_streamed = sum(type(layer) is DynamicLayer for layer in layers)
        ring = ScratchRing(link, num_streamed, self.spec.prefetch_layers, capacity_tokens)
        return Cache(layers=[StreamedLayer(ring) if type(layer) is DynamicLayer else layer for layer in layers])


class HostRows:
    """One layer's KV in host memory: what the ring needs to know of a layer. It refers back to nothing."""

    def __init__(self) -> None:
        self.buffer_TBHE: torch.Tensor | None = None
        self.length_tokens = 0
        self.append: Transfer | None = None
        """The latest copy into the buffer."""


class StreamedLayer(DynamicLayer):  # type: ignore[misc]  # untyped upstream
    """One layer of upstream's cache, whose KV is in host memory.

    Computation visits the streamed layers of a ring in turn; `update` is one visit.
    """

    is_croppable = False

    def __init__(self, ring: "ScratchRing") -> None:
        super().__init__()
        self.ring = ring
        self.rows = HostRows()
        self.ordinal = ring.enroll(self.rows)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the host rows, at full capacity and once."""
        batch_size, kv_heads, _, self.key_head_dim = key_states.shape
        row_shape = (batch_size, kv_heads, self.key_head_dim + value_states.shape[-1])
        self.dtype, self.device = key_states.dtype, key_states.device
        self.rows.buffer_TBHE = self.ring.link.empty_host((self.ring.capacity_tokens, *row_shape), self.dtype)
        self.ring.prepare(row_shape, self.dtype, self.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends the new tokens, and returns all keys and values, on the device.

        Args:
            key_states: `[batch, kv_heads, new_tokens, key_head_dim]`.
            value_states: `[batch, kv_heads, new_tokens, value_head_dim]`.

        Returns:
            Views of the scratch, `[batch, kv_heads, tokens, head_dim]`, valid until the ring comes round.

        Raises:
            ValueError: The tokens would pass the capacity the cache was built for.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.rows.length_tokens, self.rows.length_tokens + key_states.shape[-2]
        if end > self.ring.capacity_tokens:
            raise ValueError(f"{end} tokens in a streamed cache built for {self.ring.capacity_tokens}")
        scratch_TBHE = self.ring.checkout(self.ordinal)
        new_TBHE = scratch_TBHE[start:end]
        new_TBHE[..., : self.key_head_dim] = key_states.permute(2, 0, 1, 3)
        new_TBHE[..., self.key_head_dim :] = value_states.permute(2, 0, 1, 3)
        self.ring.append(self.rows, new_TBHE)
        all_BHTE = scratch_TBHE[:end].permute(1, 2, 0, 3)
        return all_BHTE[..., : self.key_head_dim], all_BHTE[..., self.key_head_dim :]

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.rows.length_tokens

    def payload_tensors(self) -> list[torch.Tensor]:
        """The rows in use on the host, and the ring's scratch, which all layers share."""
        if self.rows.buffer_TBHE is None:
            return []
        return [self.rows.buffer_TBHE[: self.rows.length_tokens], *self.ring.slots]

    def reset(self) -> None:
        """Forgets the tokens and keeps the buffers."""
        self.ring.restart()

    def crop(self, *_args: Any, **_kwargs: Any) -> None:
        """Refuses: rows already on the host are not taken back."""
        raise ValueError("a streamed cache cannot be cropped: assisted generation is not supported")

    def reorder_cache(self, *_args: Any, **_kwargs: Any) -> None:
        """Refuses: reordering would rewrite the whole host tier at every step."""
        raise ValueError("a streamed cache cannot be reordered: beam search is not supported")

    batch_repeat_interleave = batch_select_indices = reorder_cache


class ScratchRing:
    """Device scratch for a few layers, reused in turn by all of them.

    Visit v uses slot v % slots. While visit v computes, the prefix of visit v + slots - 1 is fetched into the slot
    that visit v - 1 has just left: every earlier visit's attention is submitted by then, and the link starts a
    copy after all computation submitted before it. That the fetch also waits for two appends makes the bytes
    right: its own layer's last one (host rows complete) and the slot's last one (scratch rows read out).
    """

    def __init__(self, link: Link, num_layers: int, prefetch_layers: int, capacity_tokens: int) -> None:
        self.link = link
        self.capacity_tokens = capacity_tokens
        self.num_slots = min(prefetch_layers + 1, num_layers)
        self.slots: list[torch.Tensor] = []
        self._layers: list[HostRows] = []
        self._visit = 0
        self._fetches: dict[int, Transfer] = {}
        self._read_outs: dict[int, Transfer] = {}
        """The latest append out of each slot."""

    def enroll(self, rows: HostRows) -> int:
        """Adds a layer, and returns its place in the turn."""
        self._layers.append(rows)
        return len(self._layers) - 1

    def prepare(self, row_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Allocates the slots, once.

        Raises:
            ValueError: A layer's rows differ from those the slots were made for.
        """
        shape = (self.capacity_tokens, *row_shape)
        if not self.slots:
            self.slots = [torch.empty(shape, dtype=dtype, device=device) for _ in range(self.num_slots)]
        elif self.slots[0].shape != shape or self.slots[0].device != device:
            raise ValueError(f"streamed layers differ: rows {shape} on {device}, scratch {tuple(self.slots[0].shape)}")

    def restart(self) -> None:
        """Starts over with no tokens in any layer, once every copy under way is done."""
        for transfer in (*self._fetches.values(), *self._read_outs.values()):
            transfer.wait()
        self._visit = 0
        self._fetches.clear()
        self._read_outs.clear()
        for rows in self._layers:
            rows.length_tokens, rows.append = 0, None

    def checkout(self, ordinal: int) -> torch.Tensor:
        """Returns the slot of this visit, with the layer's prefix in it for all later computation.

        Raises:
            RuntimeError: The model visits its layers in another order than the first time.
        """
        if self._visit % len(self._layers) != ordinal:
            raise RuntimeError(
                f"streamed layer {ordinal} was used out of turn (visit {self._visit} of {len(self._layers)} layers); "
                "the model must use its layers in one fixed order"
            )
        slot = self._visit % self.num_slots
        if self._visit not in self._fetches:
            self._fetch(self._visit)
        ready = self._fetches.pop(self._visit, None) or self._read_outs.get(slot)
        if ready is not None:
            ready.wait()
        return self.slots[slot]

    def append(self, rows: HostRows, new_TBHE: torch.Tensor) -> None:
        """Writes the visit's new rows back, ends the visit, and fetches ahead into the slot that is free now."""
        assert rows.buffer_TBHE is not None
        end = rows.length_tokens + new_TBHE.shape[0]
        rows.append = self.link.d2h(rows.buffer_TBHE[rows.length_tokens : end], new_TBHE)
        rows.length_tokens = end
        self._read_outs[self._visit % self.num_slots] = rows.append
        ahead = self._visit + self.num_slots - 1
        self._visit += 1
        if ahead >= self._visit:
            self._fetch(ahead)

    def _fetch(self, visit: int) -> None:
        """Submits the copy of a layer's prefix; a layer that is empty, or full and therefore done, has none."""
        rows = self._layers[visit % len(self._layers)]
        tokens = rows.length_tokens
        if tokens == 0 or tokens >= self.capacity_tokens or rows.buffer_TBHE is None:
            return
        slot = visit % self.num_slots
        after = [append for append in (rows.append, self._read_outs.get(slot)) if append is not None]
        self._fetches[visit] = self.link.h2d(self.slots[slot][:tokens], rows.buffer_TBHE[:tokens], after)
