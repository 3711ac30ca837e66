"""What every device must do; the same tests run on each one that is here."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from offload_eval.errors import HostCapError
from offload_eval.execution.cell import exhausted_ledger
from offload_eval.instruments.copies import Copy
from offload_eval.instruments.cpu import CpuDevice
from offload_eval.instruments.device import Device
from offload_eval.instruments.link_calibration import copy_sizes, fitting_bytes, measure_link

HAS_CUDA = torch.cuda.is_available()
MIB = 1024**2


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not HAS_CUDA, reason="no CUDA")])]
)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "cpu":
        yield CpuDevice()
        return
    from offload_eval.instruments.cuda import CudaDevice

    yield CudaDevice()


def test_evidence_follows_the_device(device: Device):
    assert device.evidence == {"cpu": "emulated", "cuda": "measured"}[device.name]


def test_a_round_trip_over_the_link_keeps_the_data(device: Device):
    sent = torch.randn(64, 1024).to(device.torch_device)
    received = torch.zeros_like(sent)
    with device.open_link(timed=True) as link:
        host = link.empty_host((64, 1024), torch.float32)
        back = link.h2d(received, host, after=[link.d2h(host, sent)])
        back.wait()
        device.synchronize()
        assert torch.equal(received, sent)
        assert device.tier_of(host) == "host"
        assert device.tier_of(received) == "device"


def test_a_copy_starts_after_computation_submitted_before_it(device: Device):
    values = torch.zeros(4 * MIB, device=device.torch_device)
    with device.open_link(timed=False) as link:
        host = link.empty_host((4 * MIB,), torch.float32)
        for step in range(50):
            values.fill_(step)
        link.d2h(host, values).wait()
        device.synchronize()
        assert bool((host == 49).all())


def test_computation_after_wait_sees_the_copy(device: Device):
    target = torch.zeros(4 * MIB, device=device.torch_device)
    with device.open_link(timed=False) as link:
        host = link.empty_host((4 * MIB,), torch.float32)
        host.fill_(7)
        link.h2d(target, host).wait()
        total = target.sum()
        device.synchronize()
        assert float(total) == 7 * 4 * MIB


def test_bytes_are_counted_by_direction_and_phase(device: Device):
    on_device = torch.zeros(1000, dtype=torch.uint8, device=device.torch_device)
    with device.open_link(timed=False) as link:
        host = link.empty_host((1000,), torch.uint8)
        link.d2h(host, on_device).wait()
        link.log.phase = "decode"
        link.h2d(on_device[:300], host[:300]).wait()
        link.h2d(on_device[300:], host[300:]).wait()
    prefill, decode = link.log.sample("prefill"), link.log.sample("decode")
    assert (prefill.h2d_bytes, prefill.d2h_bytes) == (0, 1000)
    assert (decode.h2d_bytes, decode.d2h_bytes) == (1000, 0)
    assert decode.h2d_busy_s is None, "an untimed link has no times"


def test_copies_are_counted_and_those_of_other_host_memory_than_the_links_apart(device: Device):
    """Three copies, of which one is from memory that the link did not make."""
    on_device = torch.zeros(1000, dtype=torch.uint8, device=device.torch_device)
    with device.open_link(timed=False) as link:
        host = link.empty_host((1000,), torch.uint8)
        link.h2d(on_device, host).wait()
        link.d2h(host[500:], on_device[500:]).wait()
        link.log.phase = "decode"
        link.h2d(on_device, torch.empty(1000, dtype=torch.uint8)).wait()
    prefill, decode = link.log.sample("prefill"), link.log.sample("decode")
    assert (prefill.num_h2d_copies, prefill.num_d2h_copies, prefill.num_pageable_copies) == (1, 1, 0)
    assert (decode.num_h2d_copies, decode.num_d2h_copies, decode.num_pageable_copies) == (1, 0, 1)


def test_a_profile_sees_every_copy_with_its_bytes_and_its_memory(device: Device):
    """Where the device has a profiler: 30,000 bytes to the device, and a quarter of them back."""
    if not device.has_profiler:
        assert device.name == "cpu"
        with pytest.raises(NotImplementedError):
            device.profile_copies()
        return
    with device.profile_copies() as profile:
        on_device = torch.zeros(30_000, dtype=torch.uint8, device=device.torch_device)
        with device.open_link(timed=False) as link:
            host = link.empty_host((30_000,), torch.uint8)
            link.h2d(on_device, host).wait()
            link.d2h(host[:7_500], on_device[:7_500]).wait()
    seen = {(copy.direction, copy.size_bytes, copy.is_pageable) for copy in profile}
    assert {("h2d", 30_000, False), ("d2h", 7_500, False)} <= seen
    assert all(copy.duration_s > 0 for copy in profile)


def test_closing_the_link_finishes_every_copy(device: Device):
    """Nobody waits for these copies; the data must be there and the account whole all the same."""
    on_device = torch.ones(4, MIB, dtype=torch.uint8, device=device.torch_device)
    with device.open_link(timed=True) as link:
        hosts = [link.empty_host((MIB,), torch.uint8).zero_() for _ in range(4)]
        for host, row in zip(hosts, on_device, strict=True):
            link.d2h(host, row)
    assert all(bool((host == 1).all()) for host in hosts)
    assert link.log.sample("prefill").d2h_bytes == 4 * MIB


def test_a_run_that_ends_in_prefill_has_no_decode_peak(device: Device):
    with device.measure_memory() as meter:
        torch.zeros(MIB, dtype=torch.uint8, device=device.torch_device)
    assert (meter.sample("prefill").peak_allocated_bytes or 0) >= MIB
    assert meter.sample("decode").peak_allocated_bytes is None


def test_a_timed_link_gives_busy_and_exposed_time(device: Device):
    on_device = torch.zeros(32 * MIB, dtype=torch.uint8, device=device.torch_device)
    with device.open_link(timed=True) as link:
        host = link.empty_host((32 * MIB,), torch.uint8)
        link.d2h(host, on_device).wait()
    sample = link.log.sample("prefill")
    assert sample.d2h_busy_s is not None
    assert sample.exposed_transfer_s is not None
    assert sample.d2h_busy_s > 0
    assert sample.exposed_transfer_s > 0
    assert link.log.sample("decode").d2h_busy_s == 0


def test_mismatched_and_strided_copies_are_refused(device: Device):
    on_device = torch.zeros(10, 10, device=device.torch_device)
    with device.open_link(timed=False) as link:
        host = link.empty_host((10, 10), torch.float32)
        with pytest.raises(ValueError, match="copy from"):
            link.h2d(on_device[:5], host)
        with pytest.raises(ValueError, match="contiguous"):
            link.h2d(on_device[:, :5], host[:, :5])


def test_peaks_are_kept_by_phase(device: Device):
    device.release()
    with device.measure_memory() as meter:
        kept = torch.zeros(2 * MIB, dtype=torch.uint8, device=device.torch_device)
        transient = torch.zeros(6 * MIB, dtype=torch.uint8, device=device.torch_device)
        del transient
        meter.begin_decode()
        later = torch.zeros(3 * MIB, dtype=torch.uint8, device=device.torch_device)
        meter.observe()
        del later
    prefill, decode = meter.sample("prefill"), meter.sample("decode")
    assert prefill.peak_allocated_bytes is not None
    assert decode.peak_allocated_bytes is not None
    assert prefill.peak_allocated_bytes - decode.peak_allocated_bytes == 3 * MIB
    assert kept.nbytes == 2 * MIB


def test_a_cap_raises_out_of_memory_and_is_lifted_afterwards(device: Device):
    device.release()
    live = device.live_bytes() or 0
    with device.capped(live + 64 * MIB), device.measure_memory():
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(256 * MIB, dtype=torch.uint8, device=device.torch_device)
        fits = torch.zeros(8 * MIB, dtype=torch.uint8, device=device.torch_device)
        del fits
    with device.measure_memory():
        torch.zeros(256 * MIB, dtype=torch.uint8, device=device.torch_device)


def test_a_host_buffer_past_the_cap_is_refused_and_the_cap_is_lifted_afterwards(device: Device):
    """Powers of two, so that both ledgers agree: 6 MiB hold 4 and 2 MiB, and then no byte more."""
    with device.open_link(timed=False) as link:
        with device.capped(None, 6 * MIB):
            first, second = link.empty_host((4, MIB), torch.uint8), link.empty_host((MIB,), torch.float16)
            with pytest.raises(HostCapError, match=r"of 1 B was asked for.*hold .*6,291,456 bytes.*cap is 6\.00 MiB"):
                link.empty_host((1,), torch.uint8)
            del first
            third = link.empty_host((MIB,), torch.float32)
        more = link.empty_host((MIB,), torch.float32)
    assert [buffer.nbytes for buffer in (second, third, more)] == [2 * MIB, 4 * MIB, 4 * MIB]


def test_a_host_cap_counts_as_the_host_ledger_and_leaves_the_device_alone(device: Device):
    with device.capped(None, 1), device.measure_memory(), device.open_link(timed=False) as link:
        on_device = torch.zeros(MIB, dtype=torch.uint8, device=device.torch_device)
        with pytest.raises(MemoryError) as raised:
            link.empty_host((2,), torch.uint8)
    assert exhausted_ledger(raised.value) == "host"
    assert on_device.nbytes == MIB


def test_three_bytes_are_four_to_a_pinned_allocator(device: Device):
    with device.capped(None, 3), device.open_link(timed=False) as link:
        expected = nullcontext() if device.name == "cpu" else pytest.raises(HostCapError, match="of 4 B was asked for")
        with expected:
            assert link.empty_host((3,), torch.uint8).nbytes == 3


def test_what_dies_is_no_longer_live(device: Device):
    device.release()
    before = device.live_bytes()
    with device.measure_memory():
        held = torch.zeros(MIB, dtype=torch.uint8, device=device.torch_device)
        assert device.live_bytes() == (before or 0) + MIB
        del held
    device.release()
    assert device.live_bytes() == before


def test_raw_copies_are_timed_both_ways_at_once_and_bring_their_data(device: Device):
    with device.open_copy_bench() as bench:
        for memory in bench.host_memories:
            host_source, host_target = bench.empty_host(MIB, memory), bench.empty_host(MIB, memory)
            device_source, device_target = bench.empty_device(MIB), bench.empty_device(MIB)
            assert host_source.is_pinned() == (memory == "pinned")
            host_source.fill_(1)
            device_source.fill_(2)
            measured = [Copy(device_target, host_source)]
            opposing = [Copy(host_target, device_source)] * 2 if memory in bench.opposable_memories else []
            times = bench.time_copies("h2d", memory, measured, opposing)
            assert bool((device_target == 1).all())
            assert times.measured_s > 0
            if opposing:
                assert bool((host_target == 2).all())
                assert times.opposing_s is not None
                assert times.opposing_s > 0


def test_a_strided_source_arrives_as_the_view_shows_it(device: Device):
    with device.open_copy_bench() as bench:
        source = bench.empty_device(8 * 5 * 256).copy_(torch.arange(8 * 5 * 256) % 251)
        window = source.view(8, 5, 256)[:, 1:]
        target = bench.empty_host(8 * 4 * 256, bench.host_memories[0]).view(8, 4, 256)
        bench.time_copies("d2h", bench.host_memories[0], [Copy(target, window)])
        assert torch.equal(target, window.cpu())


def test_a_calibration_covers_every_kind_of_copy(device: Device):
    with device.open_copy_bench() as bench:
        assert fitting_bytes(bench) > MIB
        series = measure_link(bench, copy_sizes(16 * 1024), repeats=3)
        assert {each.memory for each in series} == set(bench.host_memories)
        opposed = {each.memory for each in series if each.opposed}
        assert opposed == set(bench.opposable_memories)
    assert {(each.direction, each.layout) for each in series} == {
        ("h2d", "contiguous"),
        ("d2h", "contiguous"),
        ("d2h", "strided"),
    }
    assert {each.size_bytes for each in series} == {4096, 8192, 16384}
    assert all(len(each.samples_s) == 3 for each in series)


@pytest.mark.skipif(HAS_CUDA, reason="the pace is the emulated link's")
def test_a_paced_link_keeps_its_bandwidth():
    device = CpuDevice(link_bytes_per_s=100 * MIB)
    on_device = torch.zeros(10 * MIB, dtype=torch.uint8)
    with device.open_link(timed=True) as link:
        host = link.empty_host((10 * MIB,), torch.uint8)
        for _ in range(2):
            link.d2h(host, on_device).wait()
    busy_s = link.log.sample("prefill").d2h_busy_s
    assert busy_s is not None
    assert busy_s == pytest.approx(0.2, rel=0.15)
