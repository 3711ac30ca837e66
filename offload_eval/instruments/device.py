"""One protocol for every device. `cuda` and `cpu` pass the same contract tests."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch

from offload_eval.core.experiment import DeviceName
from offload_eval.core.records import Direction, Evidence, Phase, PhaseSample
from offload_eval.instruments.copies import CopyBench
from offload_eval.instruments.copy_profile import ProfiledCopy
from offload_eval.instruments.transfers import TransferLog

Tier = Literal["device", "host"]


class Transfer(Protocol):
    """One submitted copy."""

    def wait(self) -> None:
        """Orders all later computation after the copy."""


class Link(Protocol):
    """The link between the tiers, with the account of what crossed it. Closed by its context manager."""

    log: TransferLog

    def __enter__(self) -> "Link":
        """Opens the link."""

    def __exit__(self, *exc_info: object) -> None:
        """Waits for every copy, settles the account and frees what the link held."""

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocates an uninitialized buffer in the host tier; HostCapError where the device's cap is passed."""

    def h2d(self, device: torch.Tensor, host: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        """Submits a copy into the device tier."""

    def d2h(self, host: torch.Tensor, device: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        """Submits a copy into the host tier."""

    def meter_copies(
        self,
        direction: Direction,
        sizes_bytes: Sequence[int],
        host_tensors: Callable[[], Iterable[torch.Tensor]],
        device: torch.device,
    ) -> AbstractContextManager[None]:
        """Accounts for copies that other code enqueues on the device's current stream inside the block.

        `host_tensors` gives their host sides: asked at the block's start for h2d, and at its end for d2h.
        """

    def meter_wait(self, device: torch.device) -> AbstractContextManager[None]:
        """Accounts for the time the device's current stream stands still inside the block."""


class MemoryMeter(Protocol):
    """Peaks of device memory, by phase, while its context is open."""

    def begin_decode(self) -> None:
        """Ends the prefill phase: its peaks are kept and the next ones start from what is live now."""

    def observe(self) -> None:
        """Looks at what has no peak counter of its own; called at every token boundary."""

    def sample(self, phase: Phase) -> PhaseSample:
        """The memory fields of a phase, after the context has closed; the transfer fields stay None."""

    num_alloc_retries: int | None
    """Times the allocator had to give cached blocks back and try again; None where there is no such allocator."""


class Device(Protocol):
    """Where a cell runs."""

    name: DeviceName
    evidence: Evidence
    torch_device: torch.device
    has_profiler: bool
    """Whether the device records copies by itself, apart from the link's account."""
    leak_tolerance_bytes: int
    """Live bytes may differ by as much before and after a cell that left nothing behind."""

    def synchronize(self) -> None:
        """Returns once everything submitted has run."""

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Takes tensors that were made before the device looked, such as weights, into the device ledger."""

    def live_bytes(self) -> int | None:
        """Device bytes live now that this process allocated; None where nothing counts them."""

    def live_storages(self) -> frozenset[int]:
        """Keys of the device storages that `live_bytes` counts; empty where the device cannot list them."""

    def storage_key(self, tensor: torch.Tensor) -> int | None:
        """Names a tensor's storage as `live_storages` does; None where it is not a counted one of the device tier."""

    def measure_memory(self) -> AbstractContextManager[MemoryMeter]:
        """Measures peaks while the context is open. Nothing is timed inside it."""

    def capped(self, cap_bytes: int | None, host_cap_bytes: int | None = None) -> AbstractContextManager[None]:
        """Makes allocations past `cap_bytes` of live device memory raise torch.OutOfMemoryError.

        On `cpu` the cap acts while `measure_memory` is open, since only the tracker sees allocations. Past
        `host_cap_bytes` a link's `empty_host` raises HostCapError, in every pass: on `cuda` each buffer counts as
        the pinned allocator rounds it, on `cpu` as it was asked for. Nothing else on the host is held to it.
        """

    def open_link(self, *, timed: bool) -> Link:
        """A link with a fresh account; `timed` adds clocks at every copy."""

    def open_copy_bench(self) -> CopyBench:
        """Raw copies over the same link, for its calibration; nothing of them enters an account."""

    def profile_copies(self) -> AbstractContextManager[list[ProfiledCopy]]:
        """Records copies with the device's own profiler, if it has one; the list is filled at the end.

        Raises:
            UnableError: At the end: the profiler's records cannot be had, or are not what they were.
        """

    def tier_of(self, tensor: torch.Tensor) -> Tier:
        """The ledger a tensor's storage belongs to."""

    def pinned_bytes(self) -> tuple[int | None, int | None]:
        """Pinned host bytes asked for and allocated, now; None where there is no pinned memory."""

    def release(self) -> None:
        """Collects garbage and hands cached memory back, between cells."""
