"""The measured device: CUDA and ROCm builds of torch.

Nothing here initializes CUDA before a CudaDevice is made.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from offload_eval.core.experiment import DeviceName
from offload_eval.core.records import Evidence, Phase, PhaseSample
from offload_eval.errors import UnableError
from offload_eval.instruments.copy_profile import ProfiledCopy, profile_device_copies
from offload_eval.instruments.cuda_copies import CudaCopyBench
from offload_eval.instruments.cuda_link import CudaLink, PinnedLedger
from offload_eval.instruments.device import Tier


class CudaMemoryMeter:
    """Peaks from the allocator's own counters; device-wide use from looks at the token boundaries.

    Allocated: tensors, rounded to the allocator's blocks. Reserved: what the allocator holds from the device;
    what it keeps from prefill counts in decode too. Device used: everybody's, context and libraries included.
    """

    num_alloc_retries: int | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase: Phase = "prefill"
        self._samples = {"prefill": PhaseSample(), "decode": PhaseSample()}
        self._used_bytes = 0
        self._retries_before = _num_alloc_retries(device)
        self._begin_phase("prefill")

    def begin_decode(self) -> None:
        """Keeps the prefill peaks; the counters start again from what is live now."""
        self._end_phase()
        self._begin_phase("decode")

    def observe(self) -> None:
        """Looks at device-wide use; the driver answers without waiting for the device's work."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        self._used_bytes = max(self._used_bytes, total_bytes - free_bytes)

    def close(self) -> None:
        """Keeps the peaks of the phase that was running, and counts the allocator's retries."""
        self._end_phase()
        after = _num_alloc_retries(self._device)
        if after is not None and self._retries_before is not None:
            self.num_alloc_retries = after - self._retries_before

    def sample(self, phase: Phase) -> PhaseSample:
        """The phase's peaks; all None for a phase that was not reached."""
        return self._samples[phase]

    def _begin_phase(self, phase: Phase) -> None:
        self._phase = phase
        self._used_bytes = 0
        torch.cuda.reset_peak_memory_stats(self._device)
        self.observe()

    def _end_phase(self) -> None:
        self.observe()
        self._samples[self._phase] = PhaseSample(
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(self._device),
            peak_device_used_bytes=self._used_bytes,
        )


class CudaDevice:
    """The device that is current when this is made.

    Raises:
        UnableError: torch sees no CUDA or ROCm device.
    """

    name: DeviceName = "cuda"
    evidence: Evidence = "measured"
    has_profiler: bool = True
    leak_tolerance_bytes: int = 512
    """One block of the allocator, which rounds every request up to it: less than that no leak can be.
    Source: torch 2.13, c10/core/AllocatorConfig.h, kMinBlockSize."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UnableError(
                f"torch {torch.__version__} sees no CUDA or ROCm device; `offload-eval doctor` says what is "
                "missing, and `device: cpu` runs emulated"
            )
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._pinned = PinnedLedger()

    @property
    def uuid(self) -> str | None:
        """The device's UUID in NVML's form; None on a ROCm build, whose UUIDs have another."""
        uuid = getattr(torch.cuda.get_device_properties(self.torch_device), "uuid", None)
        return None if uuid is None or torch.version.hip else f"GPU-{uuid}"

    def synchronize(self) -> None:
        """Returns once every stream of the device is idle."""
        torch.cuda.synchronize(self.torch_device)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nothing to do: the allocator counts them already."""

    def live_bytes(self) -> int:
        """Bytes the allocator has handed out to this process, in its blocks' sizes."""
        return torch.cuda.memory_allocated(self.torch_device)

    def live_storages(self) -> frozenset[int]:
        """Addresses of the blocks that are handed out; only the native allocator lists them."""
        if torch.cuda.get_allocator_backend() != "native":
            return frozenset()
        blocks = (block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"])
        return frozenset(block["address"] for block in blocks if block["state"] == "active_allocated")

    def storage_key(self, tensor: torch.Tensor) -> int | None:
        """The address of the storage's data."""
        return tensor.untyped_storage().data_ptr() if tensor.device == self.torch_device else None

    @contextmanager
    def measure_memory(self) -> Iterator[CudaMemoryMeter]:
        """Resets the allocator's peaks and follows them."""
        meter = CudaMemoryMeter(self.torch_device)
        try:
            yield meter
        finally:
            meter.close()

    @contextmanager
    def capped(self, cap_bytes: int | None, host_cap_bytes: int | None = None) -> Iterator[None]:
        """Limits what the allocator may hold from the device, and what pinned buffers of `empty_host` may take.

        The cap is held against reserved bytes. At the cap the allocator gives its cached blocks back and
        tries again (`num_alloc_retries`), so what raises is live bytes plus what fragmentation strands, to
        within one segment (2 MiB, or 20 MiB for requests between 1 and 10 MiB). Context and libraries are
        outside it. Memory cached from before is given back first.

        The host cap is held against the buffers that are alive, each as the pinned allocator rounds it. What other
        code pins or allocates on the host, as upstream's offloading does, is outside it.
        """
        with ExitStack() as restore:
            restore.callback(setattr, self._pinned, "cap_bytes", None)
            self._pinned.cap_bytes = host_cap_bytes
            if cap_bytes is not None:
                total_bytes = torch.cuda.get_device_properties(self.torch_device).total_memory
                torch.cuda.empty_cache()
                restore.callback(torch.cuda.set_per_process_memory_fraction, 1.0, self.torch_device)
                torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total_bytes), self.torch_device)
            yield

    def open_link(self, *, timed: bool) -> CudaLink:
        """A fresh account, and two copy streams for each device that is copied to or from."""
        return CudaLink(self.torch_device, self._pinned, timed=timed)

    def open_copy_bench(self) -> CudaCopyBench:
        """Two copy streams of its own, and one that holds them."""
        return CudaCopyBench(self.torch_device)

    def profile_copies(self) -> AbstractContextManager[list[ProfiledCopy]]:
        """Every copy of this process between the host and any device, by CUPTI's or roctracer's records."""
        return profile_device_copies()

    def tier_of(self, tensor: torch.Tensor) -> Tier:
        """Device for tensors on a GPU, host for all others."""
        return "device" if tensor.device.type == "cuda" else "host"

    def pinned_bytes(self) -> tuple[int | None, int | None]:
        """Pinned bytes asked for, and the bytes the pinned allocator holds from the system for them.

        The allocator does not count requested bytes: they are known while every pinned block comes from this
        device's links, and None when other code, such as upstream's offloading, pins as well. The allocated
        bytes include freed blocks that the allocator keeps; `release` gives those back.
        Source: torch 2.13, ATen/core/CachingHostAllocator.h; `reserved_bytes` is the older name.
        """
        stats = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
        allocated_bytes = stats.get("reserved_bytes.current", stats.get("allocated_bytes.current"))
        active_requests = stats.get("active_requests.current")
        requested_bytes = None if active_requests is None else self._pinned.requested_bytes(active_requests)
        return requested_bytes, allocated_bytes

    def release(self) -> None:
        """Collects garbage and gives cached memory back, device and pinned."""
        gc.collect()
        self.synchronize()
        torch.cuda.empty_cache()
        # Private, as torch.cuda has no public name for it; without it pinned bytes add up over the cells.
        empty_host_cache: Callable[[], Any] | None = getattr(torch._C, "_host_emptyCache", None)
        if empty_host_cache is not None:
            empty_host_cache()


def _num_alloc_retries(device: torch.device) -> int | None:
    """The native allocator's count; cudaMallocAsync has none and reports zero."""
    if torch.cuda.get_allocator_backend() != "native":
        return None
    retries: int | None = torch.cuda.memory_stats(device).get("num_alloc_retries")
    return retries
