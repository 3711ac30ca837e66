"""The live-storage tracker, against bytes counted by hand."""

import pytest
import torch

from offload_eval.instruments.cpu import CpuDevice
from offload_eval.instruments.live_storage import LiveStorageTracker, TieredMemory


def test_a_view_adds_nothing_and_keeps_its_storage_alive():
    memory = TieredMemory()
    with LiveStorageTracker(memory):
        base = torch.empty(1000)
        view = base.view(10, 100)[:2]
        assert memory.device.live_bytes == 4000
        del base
        assert memory.device.live_bytes == 4000
        del view
    assert memory.device.live_bytes == 0


def test_the_peak_holds_what_lived_together():
    memory = TieredMemory()
    with LiveStorageTracker(memory):
        first = torch.empty(100, dtype=torch.uint8)
        second = torch.empty(50, dtype=torch.uint8)
        del first
        third = torch.empty(30, dtype=torch.uint8)
        assert (memory.device.live_bytes, memory.device.peak_bytes) == (80, 150)
        memory.device.restart_peak()
        assert memory.device.peak_bytes == 80
        del second, third


def test_death_is_seen_after_the_mode_is_off():
    memory = TieredMemory()
    with LiveStorageTracker(memory):
        kept = torch.ones(8, dtype=torch.uint8)
    assert memory.device.live_bytes == 8
    del kept
    assert memory.device.live_bytes == 0


def test_host_allocations_never_count_in_the_device_tier():
    device = CpuDevice()
    with device.open_link(timed=False) as link, device.measure_memory():
        buffer = link.empty_host((10, 4), torch.float32)
        part = buffer[2:5]
        assert device.live_bytes() == 0
        assert (device.tier_of(buffer), device.tier_of(part)) == ("host", "host")
        assert device.memory.host.live_bytes == 160
        on_device = part + 1
        assert (device.tier_of(on_device), device.live_bytes()) == ("device", 48)


def test_passing_the_cap_is_out_of_memory_and_frees_what_was_asked():
    device = CpuDevice()
    with device.capped(1000), device.measure_memory():
        held = torch.empty(900, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError, match="over its cap"):
            torch.empty(200, dtype=torch.uint8)
        assert device.live_bytes() == 900
        del held
        torch.empty(1000, dtype=torch.uint8)


def test_the_inner_tensors_of_a_quantized_tensor_are_counted():
    """A wrapper's logical size is not memory: 4-bit values, one scale and one shift for each group of 64."""
    quanto = pytest.importorskip("optimum.quanto")
    memory = TieredMemory()
    weights = torch.randn(64, 64, dtype=torch.bfloat16)
    with LiveStorageTracker(memory):
        scale, shift = quanto.MaxOptimizer()(weights, quanto.qint4, 0, 64)
        quantized = quanto.quantize_weight(weights, quanto.qint4, 0, scale, shift, 64)
        # `weights` itself was made before; views of it bring its 8,192 bytes in.
        held = memory.device.live_bytes - weights.nbytes
    assert quantized.shape == (64, 64)
    assert held == 64 * 64 // 2 + 64 * 2 + 64 * 2


def test_adopting_a_model_counts_tied_weights_once():
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    device = CpuDevice()
    device.adopt(model.parameters())
    assert device.live_bytes() == 160
