"""CudaLink's order and account, on simulated streams; the meter and the cap, on a scripted allocator."""

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import FIRST, SECOND, FakeCuda

from offload_eval.core.records import PhaseSample
from offload_eval.errors import HostCapError, UnableError
from offload_eval.instruments.cuda import CudaDevice, CudaMemoryMeter
from offload_eval.instruments.cuda_link import CudaLink, PinnedLedger
from offload_eval.instruments.host_cap import pinned_block_bytes

GPU = FIRST


def open_link(*, timed: bool = False) -> CudaLink:
    return CudaLink(GPU, PinnedLedger(), timed=timed)


def filled(value: float) -> torch.Tensor:
    return torch.full((4,), value)


def fetch_into_scratch_in_use(cuda: FakeCuda) -> bool:
    """Computation that reads the scratch is submitted before the fetch that overwrites it."""
    scratch, seen, host = filled(1), filled(0), filled(2)
    with open_link() as link:
        cuda.compute(5, lambda: seen.copy_(scratch))
        link.h2d(scratch, host)
    return seen.equal(filled(1)) and scratch.equal(filled(2))


def write_back_fresh_rows(cuda: FakeCuda) -> bool:
    """Computation that makes the rows is submitted before the copy that writes them back."""
    rows, host = filled(0), filled(0)
    with open_link() as link:
        cuda.compute(5, lambda: rows.fill_(3))
        link.d2h(host, rows)
    return host.equal(filled(3))


def compute_on_fetched(cuda: FakeCuda) -> bool:
    """Computation submitted after `wait` sees what was fetched."""
    scratch, seen, host = filled(0), filled(0), filled(2)
    with open_link() as link:
        cuda.copy_s = 5
        link.h2d(scratch, host).wait()
        cuda.compute(1, lambda: seen.copy_(scratch))
    return seen.equal(filled(2))


def fetch_what_was_written_back(cuda: FakeCuda) -> bool:
    """A fetch `after` a write-back of the same host rows brings the new ones."""
    rows, host, scratch = filled(3), filled(0), filled(0)
    with open_link() as link:
        cuda.copy_s = 5
        written = link.d2h(host, rows)
        cuda.copy_s = 1
        link.h2d(scratch, host, after=[written])
    return scratch.equal(filled(3))


SCENARIOS = [
    pytest.param(fetch_into_scratch_in_use, 0, id="h2d-behind-computation"),
    pytest.param(write_back_fresh_rows, 0, id="d2h-behind-computation"),
    pytest.param(compute_on_fetched, 1, id="computation-behind-wait"),
    pytest.param(fetch_what_was_written_back, 2, id="copy-behind-copy"),
]


@pytest.mark.parametrize(("scenario", "decisive_wait"), SCENARIOS)
def test_copies_and_computation_run_in_the_promised_order(
    scenario: Callable[[FakeCuda], bool], decisive_wait: int
) -> None:
    with FakeCuda() as cuda:
        assert scenario(cuda)
        assert cuda.num_waits == decisive_wait + 1


@pytest.mark.parametrize(("scenario", "decisive_wait"), SCENARIOS)
def test_one_missing_wait_is_seen_in_the_data(scenario: Callable[[FakeCuda], bool], decisive_wait: int) -> None:
    with FakeCuda(dropped_wait=decisive_wait) as cuda:
        assert not scenario(cuda)


def test_a_wait_that_was_enqueued_survives_the_reuse_of_its_event() -> None:
    """The second submission records the same event again; the first copy still waits for the first computation."""
    scratch, seen, other = filled(1), filled(0), filled(0)
    with FakeCuda() as cuda, open_link() as link:
        cuda.compute(5, lambda: seen.copy_(scratch))
        link.h2d(scratch, filled(2))
        cuda.compute(5)
        link.h2d(other, filled(2))
    assert seen.equal(filled(1))


def test_a_copy_in_flight_stays_so_when_others_are_submitted() -> None:
    """The later submission looks for completed copies and finds none: the wait still holds computation back."""
    scratch, seen = filled(0), filled(0)
    with FakeCuda() as cuda, open_link() as link:
        cuda.copy_s = 5
        early = link.h2d(scratch, filled(2))
        link.h2d(filled(0), filled(1))
        early.wait()
        cuda.compute(1, lambda: seen.copy_(scratch))
    assert seen.equal(filled(2))


def test_the_host_never_blocks_before_the_link_closes() -> None:
    """Nothing has run until the device is asked to, whatever was submitted and waited for."""
    scratch = filled(0)
    with FakeCuda():
        link = open_link()
        link.h2d(scratch, filled(2)).wait()
        assert scratch.equal(filled(0))
        link.__exit__()
    assert scratch.equal(filled(2))


def test_buffers_live_until_their_copy_is_done_and_no_longer() -> None:
    with FakeCuda() as cuda, open_link() as link:
        rows = filled(1)
        storage = weakref.ref(rows.untyped_storage())
        link.d2h(filled(0), rows)
        del rows
        link.d2h(filled(0), filled(1))
        gc.collect()
        assert storage() is not None
        cuda.run()
        link.d2h(filled(0), filled(1))
        gc.collect()
        assert storage() is None


def test_steady_state_creates_no_events() -> None:
    def step() -> None:
        read_out = link.d2h(filled(0), filled(1))
        link.h2d(filled(0), filled(1), after=[read_out]).wait()
        cuda.run()

    with FakeCuda() as cuda, open_link() as link:
        step()
        created = cuda.num_events
        for _ in range(10):
            step()
        assert cuda.num_events == created


def test_a_completed_copy_orders_nothing_more() -> None:
    with FakeCuda() as cuda, open_link() as link:
        early = link.h2d(filled(0), filled(1))
        cuda.run()
        link.h2d(filled(0), filled(1))
        waits = cuda.num_waits
        early.wait()
        assert cuda.num_waits == waits


def test_bytes_are_counted_in_the_phase_that_submitted_them() -> None:
    with FakeCuda(), open_link() as link:
        link.d2h(torch.zeros(3, 5), torch.zeros(3, 5))
        link.log.phase = "decode"
        link.h2d(torch.zeros(7, dtype=torch.bfloat16), torch.zeros(7, dtype=torch.bfloat16))
        link.h2d(torch.zeros(0), torch.zeros(0))
        with link.meter_copies("d2h", [11, 5], list, GPU), link.meter_wait(GPU):
            pass
    prefill, decode = link.log.sample("prefill"), link.log.sample("decode")
    assert (prefill.h2d_bytes, prefill.d2h_bytes) == (0, 60)
    assert (prefill.num_h2d_copies, prefill.num_d2h_copies) == (0, 1)
    assert (decode.h2d_bytes, decode.d2h_bytes) == (14, 16)
    assert (decode.num_h2d_copies, decode.num_d2h_copies) == (1, 2), "a copy of nothing is none"
    assert decode.h2d_busy_s is None


class HostTensor:
    """What the link asks of a host tensor, on a machine that can pin none."""

    nbytes = 8

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned

    def is_pinned(self) -> bool:
        return self.pinned

    def untyped_storage(self) -> SimpleNamespace:
        return SimpleNamespace(data_ptr=lambda: 1)


def test_copies_of_memory_that_is_not_pinned_are_counted() -> None:
    """Our own buffers are known, of other tensors the driver is asked: here two of four are pageable."""
    ledger = PinnedLedger()
    ours = filled(0)
    ledger.enter(ours)
    with FakeCuda(), CudaLink(GPU, ledger, timed=False) as link:
        link.h2d(filled(0), filled(1))
        link.h2d(filled(0)[:2], ours[:2])
        link.log.phase = "decode"
        made: list[HostTensor] = []
        with link.meter_copies("d2h", [8, 8], lambda: made, GPU):
            made += [HostTensor(True), HostTensor(False)]
        left = [HostTensor(False)]
        with link.meter_copies("h2d", [8], lambda: left, GPU):
            left = []
    assert link.log.sample("prefill").num_pageable_copies == 1
    assert link.log.sample("decode").num_pageable_copies == 2, "d2h is looked at after the copies, h2d before"


def test_what_the_host_takes_to_enter_a_stream_is_not_busy_time() -> None:
    """The copy stream is idle, and would stand still for the 3 s between a clock's start and a copy of 5 s."""
    with FakeCuda() as cuda, open_link(timed=True) as link:
        cuda.copy_s, cuda.enter_s = 5, 3
        link.h2d(filled(0), filled(1))
        link.d2h(filled(0), filled(1))
    sample = link.log.sample("prefill")
    assert (sample.h2d_busy_s, sample.d2h_busy_s) == pytest.approx((5, 5))


def test_busy_and_exposed_time_of_a_fetch_that_computation_half_hides() -> None:
    """2 s of computation, then a 5 s fetch beside 3 s more: it is busy for 5 s, and computation stands still for 2."""
    with FakeCuda() as cuda, open_link(timed=True) as link:
        cuda.copy_s = 5
        cuda.compute(2)
        fetched = link.h2d(filled(0), filled(1))
        cuda.compute(3)
        link.log.phase = "decode"
        fetched.wait()
    prefill, decode = link.log.sample("prefill"), link.log.sample("decode")
    assert (prefill.h2d_busy_s, prefill.exposed_transfer_s) == pytest.approx((5, 0))
    assert (decode.h2d_busy_s, decode.exposed_transfer_s) == pytest.approx((0, 2))


def test_the_directions_run_side_by_side_and_copies_of_one_direction_in_line() -> None:
    """Two 5 s fetches and one 5 s write-back: 10 s pass, not 15."""
    with FakeCuda() as cuda, open_link(timed=True) as link:
        cuda.copy_s = 5
        for transfer in [
            link.h2d(filled(0), filled(1)),
            link.d2h(filled(0), filled(1)),
            link.h2d(filled(0), filled(1)),
        ]:
            transfer.wait()
    sample = link.log.sample("prefill")
    assert (sample.h2d_busy_s, sample.d2h_busy_s, sample.exposed_transfer_s) == pytest.approx((10, 5, 10))


def test_each_device_has_copy_streams_and_a_compute_stream_of_its_own() -> None:
    """A wait for the second device's copy holds the second device alone; the first one's fetch runs beside it."""
    with FakeCuda() as cuda, open_link(timed=True) as link:
        cuda.copy_s = 5
        far, seen_far, near = cuda.on_second_device(filled(0)), filled(0), filled(0)
        cuda.compute(2, device=SECOND)
        fetched = link.h2d(far, filled(2))
        link.h2d(near, filled(3))
        fetched.wait()
        cuda.compute(1, lambda: seen_far.copy_(far), device=SECOND)
        cuda.compute(1)
    assert seen_far.equal(filled(2))
    assert near.equal(filled(3))
    assert cuda.second_compute_stream.now_s == 2 + 5 + 1, "behind its own computation, then the copy"
    assert cuda.compute_stream.now_s == 1, "nothing on the first device waited"
    sample = link.log.sample("prefill")
    assert (sample.h2d_busy_s, sample.exposed_transfer_s) == pytest.approx((10, 5))


def test_computation_of_the_second_device_is_behind_its_copy_and_a_copy_behind_its_computation() -> None:
    rows, host = filled(0), filled(0)
    with FakeCuda() as cuda, open_link() as link:
        cuda.on_second_device(rows)
        cuda.compute(5, lambda: rows.fill_(3), device=SECOND)
        link.d2h(host, rows)
    assert host.equal(filled(3))


def test_copies_of_other_code_are_timed_on_the_stream_they_are_enqueued_on() -> None:
    """A 4 s copy on the compute stream between other work: busy for 4 s, and exposed for all of it."""
    with FakeCuda() as cuda, open_link(timed=True) as link:
        cuda.compute(3)
        with link.meter_wait(GPU), link.meter_copies("d2h", [16], list, GPU):
            cuda.compute(4)
        cuda.compute(3)
    sample = link.log.sample("prefill")
    assert (sample.d2h_busy_s, sample.exposed_transfer_s, sample.d2h_bytes) == pytest.approx((4, 4, 16))


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (torch.zeros(4), torch.zeros(5)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.float16)),
        (torch.zeros(2, 3).T, torch.zeros(3, 2)),
    ],
)
def test_a_copy_that_would_convert_or_gather_is_refused_and_not_counted(
    target: torch.Tensor, source: torch.Tensor
) -> None:
    with FakeCuda(), open_link() as link:
        with pytest.raises(ValueError, match="copy"):
            link.h2d(target, source)
        assert link.log.sample("prefill").h2d_bytes == 0


def test_a_transfer_of_another_kind_of_link_is_refused() -> None:
    with FakeCuda(), open_link() as link, pytest.raises(TypeError, match="SimpleNamespace"):
        link.h2d(filled(0), filled(1), after=[SimpleNamespace(wait=lambda: None)])


def test_requested_pinned_bytes_are_known_while_all_pinned_blocks_are_ours() -> None:
    ledger = PinnedLedger()
    kept, dropped, empty = torch.empty(10), torch.empty(3, dtype=torch.int8), torch.empty(0)
    for buffer in (kept, dropped, empty):
        ledger.enter(buffer)
    assert ledger.requested_bytes(active_requests=2) == 43
    assert ledger.requested_bytes(active_requests=3) is None
    view = kept[1:]
    del dropped, buffer, kept
    gc.collect()
    assert ledger.requested_bytes(active_requests=1) == 40, "a view keeps the storage"
    del view
    gc.collect()
    assert ledger.requested_bytes(active_requests=0) == 0


@pytest.mark.parametrize(
    ("asked_bytes", "block_bytes"), [(0, 0), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1025, 2048), (2**40 + 1, 2**41)]
)
def test_a_pinned_block_is_the_next_power_of_two(asked_bytes: int, block_bytes: int) -> None:
    assert pinned_block_bytes(asked_bytes) == block_bytes


def test_the_cap_on_pinned_buffers_counts_rounded_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 bytes, buffers of 5 and 3 take 8 and 4: 4 are left, which a buffer of 5 does not fit and one of 4 does."""
    empty, ledger = torch.empty, PinnedLedger()
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, **_: empty(shape, dtype=dtype))
    ledger.cap_bytes = 16
    with FakeCuda(), CudaLink(GPU, ledger, timed=False) as link:
        kept = [link.empty_host((size,), torch.uint8) for size in (5, 3)]
        with pytest.raises(HostCapError, match=r"of 8 B was asked for.*hold 12 B.*cap is 16 B"):
            link.empty_host((5,), torch.uint8)
        kept.append(link.empty_host((2, 2), torch.uint8))
        kept.pop(0)
        kept.append(link.empty_host((4,), torch.int16))
    assert [buffer.nbytes for buffer in kept] == [3, 4, 8]


def test_the_host_cap_is_lifted_however_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedAllocator(monkeypatch)
    device = CudaDevice()
    with pytest.raises(HostCapError), device.capped(None, 250):
        device._pinned.refuse_past_cap(251)
    device._pinned.refuse_past_cap(251)


class ScriptedAllocator:
    """torch.cuda's counters, set by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.reserved = self.free = self.retries = 0
        self.peaks = (0, 0)
        self.fractions: list[float] = []
        names = {
            "reset_peak_memory_stats": lambda _device: self.touch(reset=True),
            "max_memory_allocated": lambda _device: self.peaks[0],
            "max_memory_reserved": lambda _device: self.peaks[1],
            "mem_get_info": lambda _device: (self.free, 1000),
            "memory_stats": lambda _device: {"num_alloc_retries": self.retries},
            "get_allocator_backend": lambda: "native",
            "is_available": lambda: True,
            "current_device": lambda: 3,
            "empty_cache": lambda: None,
            "get_device_properties": lambda _device: SimpleNamespace(total_memory=1000, uuid="abcd"),
            "set_per_process_memory_fraction": lambda fraction, device: self.fractions.append((fraction, device)),
        }
        for name, stand_in in names.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def touch(self, allocated: int | None = None, reserved: int | None = None, *, reset: bool = False) -> None:
        self.allocated = self.allocated if allocated is None else allocated
        self.reserved = self.reserved if reserved is None else reserved
        low = (0, 0) if reset else self.peaks
        self.peaks = (max(low[0], self.allocated), max(low[1], self.reserved))


def test_each_phase_has_its_own_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode starts from what is live at the boundary, not from prefill's peak."""
    allocator = ScriptedAllocator(monkeypatch)
    allocator.touch(100, 200)
    allocator.free, allocator.retries = 700, 5
    meter = CudaMemoryMeter(GPU)
    allocator.touch(400, 600)
    allocator.free = 300
    meter.observe()
    allocator.touch(150, 600)
    allocator.free = 350
    meter.begin_decode()
    allocator.touch(180, 600)
    allocator.retries = 7
    meter.close()
    assert meter.sample("prefill") == PhaseSample(
        peak_allocated_bytes=400, peak_reserved_bytes=600, peak_device_used_bytes=700
    )
    assert meter.sample("decode") == PhaseSample(
        peak_allocated_bytes=180, peak_reserved_bytes=600, peak_device_used_bytes=650
    )
    assert meter.num_alloc_retries == 2


def test_a_run_that_ends_in_prefill_has_no_decode_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = ScriptedAllocator(monkeypatch)
    meter = CudaMemoryMeter(GPU)
    allocator.touch(400, 600)
    meter.close()
    assert meter.sample("prefill").peak_allocated_bytes == 400
    assert meter.sample("decode") == PhaseSample()


def test_the_cap_is_a_share_of_the_card_and_is_lifted_however_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = ScriptedAllocator(monkeypatch)
    device = CudaDevice()
    with pytest.raises(torch.OutOfMemoryError), device.capped(250):
        raise torch.OutOfMemoryError
    with device.capped(None):
        pass
    with device.capped(5000):
        pass
    card = torch.device("cuda", 3)
    assert allocator.fractions == [(0.25, card), (1.0, card), (1.0, card), (1.0, card)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is there")
def test_without_a_device_the_error_names_the_way_out() -> None:
    with pytest.raises(UnableError, match="offload-eval doctor"):
        CudaDevice()


def test_tiers_are_told_by_where_a_tensor_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedAllocator(monkeypatch)
    device = CudaDevice()
    assert device.tier_of(torch.zeros(1)) == "host"
    assert device.tier_of(SimpleNamespace(device=torch.device("cuda", 0))) == "device"
    assert device.uuid == "GPU-abcd"
