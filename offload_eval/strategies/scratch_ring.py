"""Device scratch for a few layers, reused in turn by all that are streamed on one device.

Shape suffixes: T tokens, R values of a row.
"""

import torch

from offload_eval.bounds.host_rows import num_slots
from offload_eval.core.experiment import StreamedSpec
from offload_eval.strategies.host_rows import RowFormat
from offload_eval.strategies.link import Link, Transfer


class HostRows:
    """One layer's KV in host memory: what the ring needs to know of a layer. It refers back to nothing."""

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None
        self.length_tokens = 0
        self.append: Transfer | None = None
        """The latest copy into the buffer."""


class ScratchRing:
    """Slots of scratch, in the host's form of rows; visit v uses slot v % slots.

    Computation visits the streamed layers in one fixed order. A slot is free when the rows in it have been read: of
    native rows, which attention reads where they are, one visit later, when its attention is submitted; of quantized
    rows at once, since they are read into a layer of working rows. Then the prefix of the next visit that uses the
    slot is fetched: the link starts a copy after all computation submitted before it. That the fetch also waits for
    two appends makes the bytes right: its own layer's last one (host rows complete) and the slot's last one (scratch
    rows read out). What is still in its slot is not fetched again.

    Args:
        link: The link.
        spec: How far ahead to fetch, and the host's form of rows.
        num_layers: Layers that may come; fewer, where a model's layers lie on several devices.
        capacity_tokens: Tokens that a layer can hold.
    """

    def __init__(self, link: Link, spec: StreamedSpec, num_layers: int, capacity_tokens: int) -> None:
        self.link = link
        self.capacity_tokens = capacity_tokens
        self.slots: list[torch.Tensor] = []
        self._spec = spec
        self._num_layers = num_layers
        self._format: RowFormat | None = None
        self._work_TR: torch.Tensor | None = None
        """Of a quantized host: the rows that attention reads."""
        self._layers: list[HostRows] = []
        self._visit = 0
        self._held: dict[int, HostRows] = {}
        """Whose rows are in a slot, or on their way into it."""
        self._awaited: dict[int, Transfer] = {}
        """What must be over before a slot is used: the fetch into it, or the append out of it by another layer."""
        self._read_outs: dict[int, Transfer] = {}
        """The latest append out of each slot."""

    @property
    def num_slots(self) -> int:
        """Slots in use once every layer has been visited."""
        return num_slots(self._spec, self._num_layers)

    @property
    def scratch(self) -> list[torch.Tensor]:
        """Every slot, and the working rows of a quantized host."""
        return [*self.slots, *([] if self._work_TR is None else [self._work_TR])]

    def enroll(self, rows: HostRows, row_format: RowFormat) -> int:
        """Adds a layer and allocates its host rows, at full capacity and once; returns its place in the turn.

        Raises:
            ValueError: Its rows differ from those of the layers before it.
        """
        if self._format is None:
            self._format = row_format
            if row_format.host_dtype != "native":
                self._work_TR = row_format.empty_rows(self.capacity_tokens)
        elif self._format != row_format:
            raise ValueError(f"streamed layers differ: {row_format}, and {self._format} before")
        rows.buffer = self.link.empty_host(self._shape, row_format.host_torch_dtype)
        self._layers.append(rows)
        return len(self._layers) - 1

    def restart(self) -> None:
        """Starts over with no tokens in any layer, once every copy under way is done."""
        for transfer in (*self._awaited.values(), *self._read_outs.values()):
            transfer.wait()
        self._visit = 0
        self._held.clear()
        self._awaited.clear()
        self._read_outs.clear()
        for rows in self._layers:
            rows.length_tokens, rows.append = 0, None

    def checkout(self, ordinal: int) -> torch.Tensor:
        """Begins a visit.

        Args:
            ordinal: The layer's place in the turn.

        Returns:
            `[capacity, row_values]`, the layer's prefix in it for all later computation, valid until the next visit
            begins.

        Raises:
            RuntimeError: The model visits its layers in another order than the first time.
        """
        assert self._format is not None
        if ordinal == 0 and self._visit == len(self._layers):
            self._num_layers = len(self._layers)  # the others are on other devices
        if self._visit % self._num_layers != ordinal:
            raise RuntimeError(
                f"streamed layer {ordinal} was used out of turn (visit {self._visit} of {self._num_layers} layers); "
                "the model must use its layers in one fixed order"
            )
        slot = self._slot(self._visit)
        self._fetch(self._visit)
        if slot in self._awaited:
            self._awaited.pop(slot).wait()
        if self._work_TR is None:
            return self.slots[slot]
        tokens = self._layers[ordinal].length_tokens
        if tokens:
            self._format.dequantize(self.slots[slot][:tokens], self._work_TR[:tokens])
        return self._work_TR

    def append(self, rows: HostRows, new_TR: torch.Tensor) -> None:
        """Writes the visit's new rows back, ends the visit, and fetches ahead into the slot that is free now."""
        assert rows.buffer is not None
        assert self._format is not None
        slot, start, end = self._slot(self._visit), rows.length_tokens, rows.length_tokens + new_TR.shape[0]
        new = self.slots[slot][start:end]
        if self._work_TR is not None:
            self._format.quantize(new_TR, new)
        rows.append = self.link.d2h(rows.buffer[start:end], new)
        rows.length_tokens = end
        self._read_outs[slot] = rows.append
        self._visit += 1
        for ahead in range(self._visit, self._visit + min(self._spec.prefetch_layers, self.num_slots)):
            self._fetch(ahead)

    def _fetch(self, visit: int) -> None:
        """Submits the copy of a layer's prefix into its slot, unless it is there, on its way, or not wanted."""
        rows, slot = self._rows(visit), self._slot(visit)
        if rows is None or self._held.get(slot) is rows:
            return
        tokens = rows.length_tokens
        if tokens == self.capacity_tokens:
            return  # it will not be visited again
        if slot == len(self.slots):
            assert self._format is not None
            dtype, device = self._format.host_torch_dtype, self._format.device
            self.slots.append(torch.empty(self._shape, dtype=dtype, device=device))
        self._held[slot] = rows
        read_out = self._read_outs.get(slot)
        if tokens:
            assert rows.buffer is not None
            after = [append for append in (rows.append, read_out) if append is not None]
            self._awaited[slot] = self.link.h2d(self.slots[slot][:tokens], rows.buffer[:tokens], after)
        elif read_out is not None:
            self._awaited[slot] = read_out

    def _slot(self, visit: int) -> int:
        return visit % self.num_slots

    def _rows(self, visit: int) -> HostRows | None:
        """The layer of a visit; None while it is not known, since layers still enroll."""
        if visit >= len(self._layers) < self._num_layers:
            return None
        return self._layers[visit % self._num_layers]

    @property
    def _shape(self) -> tuple[int, ...]:
        assert self._format is not None
        return self._format.host_shape(self.capacity_tokens)
