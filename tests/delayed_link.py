"""A link whose copies happen as late, and in as odd an order, as real streams may let them."""

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch


class DelayedTransfer:
    """A copy that has been submitted and happens when it must, or when chance has it."""

    def __init__(
        self, link: "DelayedLink", target: torch.Tensor, source: torch.Tensor, after: Sequence["DelayedTransfer"]
    ) -> None:
        self.link, self.target, self.source, self.after = link, target, source, tuple(after)
        self.is_done = False

    def run(self) -> None:
        if self.is_done:
            return
        for earlier in self.after:
            earlier.run()
        for earlier in self.link.earlier_in_stream(self):
            earlier.run()
        self.target.copy_(self.source)
        self.is_done = True

    def wait(self) -> None:
        self.run()


class DelayedLink:
    """Each direction is one stream: its copies keep their order; the two directions keep none between them.

    A copy that nobody waits for happens at a random later submission, or never. It starts after all computation
    submitted before it, as the contract says, and may still be running while any later computation runs: so the
    bytes it reads or writes must not be touched until someone has waited. To make a violation visible, buffers of
    the host tier start out as NaN or ones, and a copy takes what it finds when it happens.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._streams: dict[str, list[DelayedTransfer]] = {"h2d": [], "d2h": []}
        self.num_bytes = {"h2d": 0, "d2h": 0}

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, float("nan") if dtype.is_floating_point else 0xFF, dtype=dtype)

    def h2d(self, device: torch.Tensor, host: torch.Tensor, after: Sequence[DelayedTransfer] = ()) -> DelayedTransfer:
        return self._submit("h2d", device, host, after)

    def d2h(self, host: torch.Tensor, device: torch.Tensor, after: Sequence[DelayedTransfer] = ()) -> DelayedTransfer:
        return self._submit("d2h", host, device, after)

    def meter_copies(self, *_: object) -> AbstractContextManager[None]:
        return nullcontext()

    def meter_wait(self, *_: object) -> AbstractContextManager[None]:
        return nullcontext()

    def earlier_in_stream(self, transfer: DelayedTransfer) -> list[DelayedTransfer]:
        stream = next(stream for stream in self._streams.values() if transfer in stream)
        return stream[: stream.index(transfer)]

    def _submit(
        self, direction: str, target: torch.Tensor, source: torch.Tensor, after: Sequence[DelayedTransfer]
    ) -> DelayedTransfer:
        self.num_bytes[direction] += target.nbytes
        transfer = DelayedTransfer(self, target, source, after)
        self._streams[direction] = [queued for queued in self._streams[direction] if not queued.is_done]
        self._streams[direction].append(transfer)
        pending = [queued for stream in self._streams.values() for queued in stream]
        for queued in self._random.sample(pending, k=self._random.randint(0, len(pending))):
            if self._random.random() < 0.3:
                queued.run()
        return transfer
