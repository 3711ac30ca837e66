"""What every device must do; the same tests run on each one that is here."""

from collections.abc import Iterator

import pytest
import torch

from offload_eval.instruments.cpu import CpuDevice
from offload_eval.instruments.device import Device

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


def test_what_dies_is_no_longer_live(device: Device):
    device.release()
    before = device.live_bytes()
    with device.measure_memory():
        held = torch.zeros(MIB, dtype=torch.uint8, device=device.torch_device)
        assert device.live_bytes() == (before or 0) + MIB
        del held
    device.release()
    assert device.live_bytes() == before


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
