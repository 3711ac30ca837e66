"""The link's calibration: the fit against known links, verification against planted faults, the profile it writes.

No expected number here comes from the code under test: they are the latency and the bandwidth that were put in.
"""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from factories import make_machine
from fake_cuda import FakeCuda
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from offload_eval.analysis.link import calibrated_profile, fit_line, fit_link, link_notes
from offload_eval.cli import link as link_module
from offload_eval.cli.app import app
from offload_eval.core.link import CopySeries, HostMemory, LinkCalibration
from offload_eval.core.machine import Accelerator
from offload_eval.errors import UnableError
from offload_eval.instruments import cuda_copies
from offload_eval.instruments.copies import Copy, CopyTimes
from offload_eval.instruments.cpu import CpuDevice
from offload_eval.instruments.cpu_copies import CpuCopyBench
from offload_eval.instruments.cuda_copies import CudaCopyBench
from offload_eval.instruments.host_memory import CgroupMemory
from offload_eval.instruments.host_memory import HostMemory as HostMemoryReading
from offload_eval.instruments.link_calibration import CopyKind, copy_sizes, fitting_bytes, measure_link, planned_copies
from offload_eval.instruments.numa import device_numa_node, host_numa_nodes
from offload_eval.store.hardware_file import dump_hardware, load_hardware, sourced_values

KIB, MIB = 1024, 1024**2
GPU = torch.device("cuda", 0)
SIZES = [2**power for power in range(12, 30)]
CARD = Accelerator(name="NVIDIA H200", uuid="GPU-1", memory_bytes=1, driver="1", pcie_generation=5, pcie_width=16)


def series_of(
    direction: str,
    latency_s: float,
    bytes_per_s: float,
    *,
    opposed: bool = False,
    memory: str = "pinned",
    **changes: Any,
) -> list[CopySeries]:
    """Exact times of a known link, three copies a sample, one sample of five far too long."""
    base = {
        "direction": direction,
        "opposed": opposed,
        "memory": memory,
        "layout": "contiguous",
        "copies_per_sample": 3,
    }
    found = []
    for size_bytes in SIZES:
        sample_s = 3 * (latency_s + size_bytes / bytes_per_s)
        samples_s = (sample_s, sample_s, 9 * sample_s, sample_s, sample_s)
        found.append(CopySeries(**base | {"size_bytes": size_bytes, "samples_s": samples_s} | changes))
    return found


def calibration(device: str = "cuda", **changes: Any) -> LinkCalibration:
    memory = "pinned" if device == "cuda" else "pageable"
    parts = [
        series_of("h2d", 8e-6, 55e9, memory=memory),
        series_of("d2h", 6e-6, 53e9, memory=memory),
        series_of("h2d", 9e-6, 42e9, memory=memory, opposed=True),
        series_of("d2h", 9e-6, 41e9, memory=memory, opposed=True),
        series_of("d2h", 9e-6, 30e9, memory=memory, layout="strided"),
    ]
    if device == "cuda":
        parts += [series_of("h2d", 2e-5, 9e9, memory="pageable"), series_of("d2h", 2e-5, 8e9, memory="pageable")]
    base = {
        "device": device,
        "evidence": {"cuda": "measured", "cpu": "emulated"}[device],
        "device_model": "NVIDIA H200" if device == "cuda" else "Test CPU",
        "link": "PCIe 5.0 x16" if device == "cuda" else "emulated: memory copies of Test CPU",
        "machine": make_machine(accelerator=CARD if device == "cuda" else None),
        "date": "2026-11-29",
        "series": tuple(each for part in parts for each in part),
    }
    return LinkCalibration(**base | changes)


class TestFit:
    @given(st.floats(1e-7, 1e-3), st.floats(1e8, 1e12))
    def test_a_known_link_is_found_again(self, latency_s: float, bytes_per_s: float) -> None:
        fitted_s, s_per_byte = fit_line(SIZES, [latency_s + size / bytes_per_s for size in SIZES])
        assert 1 / s_per_byte == pytest.approx(bytes_per_s, rel=1e-4)
        assert fitted_s == pytest.approx(latency_s, rel=1e-4)

    def test_neither_part_is_negative(self) -> None:
        """Times that grow faster than the size would give a negative latency, falling ones a negative bandwidth."""
        latency_s, s_per_byte = fit_line([1000, 2000, 4000], [1.0, 3.0, 8.0])
        assert latency_s == 0
        assert s_per_byte > 0
        assert fit_line([1000, 2000, 4000], [4.0, 3.0, 2.0])[1] == 0

    def test_a_latency_of_microseconds_survives_noise_of_the_largest_copies(self) -> None:
        """1 % of a copy of 512 MiB is 100 µs."""
        noise = [1 + 0.01 * (-1) ** index for index in range(len(SIZES))]
        times_s = [(1e-5 + size / 50e9) * each for size, each in zip(SIZES, noise, strict=True)]
        latency_s, s_per_byte = fit_line(SIZES, times_s)
        assert latency_s == pytest.approx(1e-5, rel=0.02)
        assert 1 / s_per_byte == pytest.approx(50e9, rel=0.02)

    def test_each_kind_of_copy_has_its_own_fit_of_its_medians(self) -> None:
        fits = fit_link(calibration().series)
        found = {(fit.direction, fit.opposed, fit.memory, fit.layout): fit.bandwidth_bytes_per_s for fit in fits}
        assert found == {
            ("h2d", False, "pinned", "contiguous"): pytest.approx(55e9),
            ("d2h", False, "pinned", "contiguous"): pytest.approx(53e9),
            ("h2d", True, "pinned", "contiguous"): pytest.approx(42e9),
            ("d2h", True, "pinned", "contiguous"): pytest.approx(41e9),
            ("d2h", False, "pinned", "strided"): pytest.approx(30e9),
            ("h2d", False, "pageable", "contiguous"): pytest.approx(9e9),
            ("d2h", False, "pageable", "contiguous"): pytest.approx(8e9),
        }
        assert all(fit.worst_error_ratio < 1e-6 and fit.num_sizes == len(SIZES) for fit in fits)

    def test_a_link_that_no_line_describes_is_said_to_be_so(self) -> None:
        bent = series_of("h2d", 1e-6, 50e9)
        bent[5] = msgspec.structs.replace(bent[5], samples_s=tuple(5 * each for each in bent[5].samples_s))
        seen = calibration(series=tuple(bent))
        (note,) = [note for note in link_notes(seen, fit_link(seen.series)) if "go by the size" in note]
        assert note.startswith("h2d alone, pinned, contiguous: ")

    def test_disturbed_samples_are_counted(self) -> None:
        """One sample of five takes three times as long; samples that are all alike are not remarked on."""
        noisy = calibration(series=tuple(series_of("h2d", 1e-6, 50e9)))
        assert any(note.startswith("18 of 18 medians") for note in link_notes(noisy, []))
        calm = tuple(msgspec.structs.replace(each, samples_s=each.samples_s[:2]) for each in noisy.series)
        assert not any("medians" in note for note in link_notes(calibration(series=calm), []))


class TestMeasuring:
    def test_a_paced_link_is_calibrated_to_its_pace(self) -> None:
        """64 KiB takes 6.6 ms at 10 MB/s, against which this machine's own copying is nothing."""
        with CpuDevice(link_bytes_per_s=10_000_000).open_copy_bench() as bench:
            series = [
                each
                for each in measure_link(bench, [16 * KIB, 64 * KIB], repeats=3)
                if each.layout == "contiguous" and each.size_bytes == 64 * KIB
            ]
        alone, opposed = ([each for each in series if each.opposed is state] for state in (False, True))
        assert len(alone) == len(opposed) == 2
        for each in alone:
            assert 64 * KIB / min(each.copy_times_s) == pytest.approx(10e6, rel=0.1)
        for each in opposed:
            assert 64 * KIB / min(each.copy_times_s) == pytest.approx(5e6, rel=0.1), "one thread serves both ways"

    def test_the_copy_thread_is_held_until_everything_is_queued(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However slow the queuing, no copy runs before its last submission: a gate, a clock and nine copies."""
        submitted: list[object] = []
        seen: list[int] = []
        with CpuCopyBench(lambda *_: seen.append(len(submitted))) as bench:
            submit = bench._thread.submit

            def submit_slowly(*arguments: Any) -> Any:
                time.sleep(0.001)
                submitted.append(arguments)
                return submit(*arguments)

            monkeypatch.setattr(bench._thread, "submit", submit_slowly)
            tensors = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
            bench.time_copies("h2d", "pageable", [Copy(*tensors)] * 3, [Copy(*tensors)] * 6)
        assert seen == [11] * 9

    @pytest.mark.parametrize("repeats", [3, 5])
    def test_sizes_and_repeats_are_those_asked_for(self, repeats: int) -> None:
        assert copy_sizes(100 * KIB) == [4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB]
        seen: list[CopyKind] = []
        with CpuDevice().open_copy_bench() as bench:
            series = measure_link(bench, copy_sizes(32 * KIB), repeats, seen.append)
            assert seen == planned_copies(bench, copy_sizes(32 * KIB))
        assert [(each.direction, each.size_bytes, each.layout, each.opposed) for each in series] == [
            (kind.direction, kind.size_bytes, kind.layout, kind.opposed) for kind in seen
        ]
        assert all(len(each.samples_s) == repeats for each in series)
        assert {each.size_bytes for each in series if each.layout == "strided"} == {4 * KIB, 8 * KIB, 16 * KIB}

    @pytest.mark.parametrize("fault", ["a flipped bit", "a copy too few", "nothing copied", "a short copy"])
    @pytest.mark.parametrize("direction", ["h2d", "d2h"])
    def test_a_planted_corruption_is_caught(self, fault: str, direction: str) -> None:
        class Faulty(CpuCopyBench):
            def time_copies(
                self, way: Any, memory: HostMemory, measured: Sequence[Copy], opposing: Sequence[Copy] = ()
            ) -> CopyTimes:
                if way != direction or len(measured) == 1:
                    return super().time_copies(way, memory, measured, opposing)
                if fault == "a copy too few":
                    return super().time_copies(way, memory, measured[:-1], opposing)
                if fault == "nothing copied":
                    return CopyTimes(1e-6, None)
                times = super().time_copies(way, memory, measured, opposing)
                spoilt = measured[1].target.reshape(-1)
                if fault == "a flipped bit":
                    spoilt[7] ^= 1
                else:
                    spoilt[-1:] = 0 if int(spoilt[-1]) else 1
                return times

        refusal = rf"{direction} copies of 4.00 KiB \(pageable, contiguous\): .* differ"
        with Faulty(lambda to, source, _: to.copy_(source)) as bench, pytest.raises(UnableError, match=refusal):
            measure_link(bench, copy_sizes(64 * KIB), repeats=3)

    def test_a_direction_that_is_not_opposed_to_the_end_is_no_figure(self) -> None:
        class Idle(CpuCopyBench):
            def time_copies(self, *arguments: Any) -> CopyTimes:
                return super().time_copies(*arguments)._replace(opposing_s=1e-9 if arguments[3:] else None)

        with (
            Idle(lambda target, source, _: target.copy_(source)) as bench,
            pytest.raises(UnableError, match="the other way ended first"),
        ):
            measure_link(bench, copy_sizes(8 * KIB), repeats=3)

    def test_buffers_take_half_of_the_free_memory_at_most(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = "offload_eval.instruments.link_calibration"
        reading = HostMemoryReading(total_bytes=100, available_bytes=1000 * MIB, swap_bytes=0, swap_used_bytes=0)
        monkeypatch.setattr(f"{module}.read_host_memory", lambda: reading)
        monkeypatch.setattr(f"{module}.read_cgroup_memory", lambda: CgroupMemory(None, None))
        with CpuDevice().open_copy_bench() as bench:
            assert fitting_bytes(bench) == 100 * MIB
            monkeypatch.setattr(f"{module}.read_cgroup_memory", lambda: CgroupMemory(300 * MIB, 200 * MIB))
            assert fitting_bytes(bench) == 10 * MIB
            monkeypatch.setattr(bench, "free_device_bytes", lambda: 120 * MIB)
            assert fitting_bytes(bench) == 20 * MIB


class SimulatedCuda(CudaCopyBench):
    """Its tiers are host memory; streams and events are the simulated ones."""

    def empty_host(self, num_bytes: int, memory: HostMemory) -> torch.Tensor:  # noqa: ARG002
        return torch.empty(num_bytes, dtype=torch.uint8)

    def empty_device(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


class TestCuda:
    """On simulated streams: pinned copies alone, since a pageable one is no queued work."""

    @pytest.fixture
    def cuda(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(SimulatedCuda, "host_memories", ("pinned",))
        with FakeCuda() as cuda:
            cuda.copy_s, cuda.bytes_per_s = 1e-5, 50e9
            yield

    @pytest.mark.usefixtures("cuda")
    def test_latency_and_bandwidth_are_the_devices(self) -> None:
        with SimulatedCuda(GPU) as bench:
            fits = fit_link(measure_link(bench, copy_sizes(MIB), repeats=3))
        assert len(fits) == 5
        for fit in fits:
            assert fit.latency_s == pytest.approx(1e-5, rel=1e-3)
            assert fit.bandwidth_bytes_per_s == pytest.approx(50e9, rel=1e-3)

    @pytest.mark.usefixtures("cuda")
    def test_copies_are_held_until_all_are_queued_and_start_together(self) -> None:
        """The gate's millisecond is in no time, and both directions have theirs from the same moment."""
        tensors = [torch.zeros(5000, dtype=torch.uint8) for _ in range(4)]
        with SimulatedCuda(GPU) as bench:
            ways = Copy(tensors[0], tensors[1]), Copy(tensors[2], tensors[3])
            times = bench.time_copies("h2d", "pinned", [ways[0]] * 3, [ways[1]] * 6)
            ended_s = {way: stream.now_s for way, stream in bench._streams.items()}
        assert times == (pytest.approx(3 * 1.01e-5), pytest.approx(6 * 1.01e-5))
        gate_s = 2_000_000 / 1e9
        assert ended_s == {"h2d": pytest.approx(gate_s + times[0]), "d2h": pytest.approx(gate_s + times[1])}

    @pytest.mark.usefixtures("cuda")
    def test_a_gate_that_opens_too_early_is_tried_again_for_longer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        spins: list[int] = []
        monkeypatch.setattr(torch.cuda, "_sleep", spins.append)
        monkeypatch.setattr("fake_cuda.FakeEvent.query", lambda _event: False)
        tensors = [torch.zeros(10, dtype=torch.uint8) for _ in range(2)]
        with SimulatedCuda(GPU) as bench:
            bench.time_copies("d2h", "pinned", [Copy(*tensors)])
            assert spins == [2_000_000]
            monkeypatch.setattr("fake_cuda.FakeEvent.query", lambda _event: len(spins) < 4)
            bench.time_copies("d2h", "pinned", [Copy(*tensors)])
        assert spins == [2_000_000, 2_000_000, 4_000_000, 8_000_000]

    @pytest.mark.usefixtures("cuda")
    def test_a_host_that_never_queues_in_time_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fake_cuda.FakeEvent.query", lambda _event: True)
        tensors = [torch.zeros(10, dtype=torch.uint8) for _ in range(2)]
        with SimulatedCuda(GPU) as bench, pytest.raises(UnableError, match="could not be queued"):
            bench.time_copies("d2h", "pinned", [Copy(*tensors)])
        assert cuda_copies._MOST_SPIN_CYCLES > 1e9


def test_pageable_copies_are_timed_between_two_synchronizations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy returns once the data is staged; without the second one the time would be the staging's."""
    target, source = torch.zeros(8, dtype=torch.uint8), torch.ones(8, dtype=torch.uint8)
    seen: list[bool] = []
    monkeypatch.setattr(torch.cuda, "Stream", dict)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: seen.append(torch.equal(target, source)))
    times = CudaCopyBench(GPU).time_copies("h2d", "pageable", [Copy(target, source)])
    assert seen == [False, True]
    assert times.measured_s > 0
    assert times.opposing_s is None


class TestNuma:
    def test_nodes_are_read_from_the_system(self, tmp_path: Path) -> None:
        for node, cores in {0: "0-3,8", 1: "4-7", 2: ""}.items():
            folder = tmp_path / f"sys/devices/system/node/node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(f"{cores}\n")
        assert host_numa_nodes(tmp_path, {2, 3}) == (0,)
        assert host_numa_nodes(tmp_path, {8, 5}) == (0, 1)
        slot = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
        slot.mkdir(parents=True)
        (slot / "numa_node").write_text("1\n")
        assert device_numa_node("0000:3b:00.0", tmp_path) == 1
        (slot / "numa_node").write_text("-1\n")
        assert device_numa_node("0000:3b:00.0", tmp_path) is None

    def test_a_system_that_says_nothing(self, tmp_path: Path) -> None:
        assert host_numa_nodes(tmp_path, {0}) == ()
        assert device_numa_node("0000:3b:00.0", tmp_path) is None
        assert device_numa_node(None) is None

    def test_a_process_on_the_wrong_node_is_told(self) -> None:
        far = calibration(device_numa_node=1, host_numa_nodes=(0,))
        assert any("numactl --cpunodebind=1" in note for note in link_notes(far, []))
        near = calibration(device_numa_node=1, host_numa_nodes=(1,))
        assert not any("numactl" in note for note in link_notes(near, []))


class TestProfile:
    def test_a_measured_link_keeps_its_figures_through_the_file(self, tmp_path: Path) -> None:
        profile = calibrated_profile(calibration())
        path = tmp_path / "card.yaml"
        path.write_text(dump_hardware(profile))
        assert load_hardware(path) == profile
        assert (profile.name, profile.calibrated) == ("nvidia-h200-link-measured", True)
        assert profile.machine == "NVIDIA H200, Linux-6.1-x86_64"
        link = profile.link
        assert link is not None
        assert not link.emulated
        figures = {path[-1]: figure for path, figure in sourced_values(profile)}
        assert {name: figure.value for name, figure in figures.items()} == {
            "h2d_bytes_per_s": pytest.approx(55e9),
            "d2h_bytes_per_s": pytest.approx(53e9),
            "h2d_with_d2h_bytes_per_s": pytest.approx(42e9),
            "d2h_with_h2d_bytes_per_s": pytest.approx(41e9),
            "latency_s": pytest.approx(8e-6),
        }
        assert all(figure.source.startswith("measured: offload-eval link, ") for figure in figures.values())
        assert all("pinned host memory, fit of latency" in figure.source for figure in figures.values())
        assert {figure.date for figure in figures.values()} == {"2026-11-29"}

    def test_an_emulated_link_says_so_at_every_figure(self) -> None:
        profile = calibrated_profile(calibration("cpu"), load_hardware("h200-sxm"))
        assert profile.name == "h200-sxm-link-emulated"
        assert "emulated" in profile.description
        assert profile.link is not None
        assert profile.link.emulated
        assert profile.link.name.startswith("emulated")
        figures = {path: figure.source for path, figure in sourced_values(profile)}
        own = {path: source for path, source in figures.items() if path[0] == "link"}
        assert len(own) == 5
        assert all(source.startswith("emulated: ") and "measured" not in source for source in own.values())
        documented = dict(sourced_values(load_hardware("h200-sxm")))
        assert all(figures[path] == each.source for path, each in documented.items() if path[0] != "link")

    def test_what_gives_no_bandwidth_makes_no_profile(self) -> None:
        flat = tuple(msgspec.structs.replace(each, samples_s=(1e-5,) * 3) for each in series_of("h2d", 1, 1))
        with pytest.raises(UnableError, match="h2d and d2h gave no bandwidth"):
            calibrated_profile(calibration(series=flat))

    def test_a_latency_of_nothing_is_left_out(self) -> None:
        series = (*series_of("h2d", 0, 55e9), *series_of("d2h", 0, 53e9))
        grown = tuple(
            msgspec.structs.replace(each, samples_s=(each.size_bytes / 1e12 * each.size_bytes,)) for each in series
        )
        link = calibrated_profile(calibration(series=grown)).link
        assert link is not None
        assert (link.latency_s, link.h2d_with_d2h_bytes_per_s) == (None, None)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["link", *arguments])


QUICK = ("--device", "cpu", "--most-mib", "1", "--repeats", "3")


class TestCommand:
    def test_json_has_raw_samples_medians_and_fits(self) -> None:
        result = invoke(*QUICK, "--json")
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        assert (document["device"], document["evidence"]) == ("cpu", "emulated")
        assert document["link"].startswith("emulated")
        assert max(each["size_bytes"] for each in document["copies"]) == MIB
        for each in document["copies"]:
            assert each["memory"] == "pageable"
            times_s = sorted(sample_s / each["copies_per_sample"] for sample_s in each["samples_s"])
            assert len(times_s) == 3
            assert each["median_s"] == pytest.approx(times_s[1])
            assert each["median_gb_per_s"] == pytest.approx(each["size_bytes"] / times_s[1] / 1e9)
            assert each["spread_ratio"] == pytest.approx((times_s[2] - times_s[0]) / times_s[1])
        ways = {(fit["direction"], fit["opposed"], fit["layout"]) for fit in document["fits"]}
        assert len(ways) == len(document["fits"]) == 5
        assert all(fit["latency_s"] >= 0 and fit["bandwidth_bytes_per_s"] > 0 for fit in document["fits"])

    def test_every_table_of_an_emulated_link_says_so(self) -> None:
        text = invoke(*QUICK).stdout
        assert "GB/s, emulated, pageable: median of 3" in text
        assert "bytes/bandwidth, emulated" in text
        assert "emulated on a CPU" in text
        assert "measured on the device" not in text

    def test_trace_bounds_times_with_the_profile_and_says_that_it_is_emulated(
        self, tiny_config_dir: Path, tmp_path: Path
    ) -> None:
        path = tmp_path / "here.yaml"
        result = invoke(*QUICK, "--out", str(path), "--hardware", "h100-sxm")
        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines()[-1] == f"hardware profile: {path}"
        arguments = ["--model", str(tiny_config_dir), "--prompt-tokens", "40", "--strategy", "streamed", "--json"]
        traced = CliRunner().invoke(app, ["trace", *arguments, "--hardware", str(path)])
        assert traced.exit_code == 0, traced.output
        (streamed,) = json.loads(traced.stdout)["strategies"]
        latency, link = streamed["latency"], load_hardware(path).link
        assert (latency["hardware"], latency["calibrated"]) == ("h100-sxm-link-emulated", True)
        assert link is not None
        assert link.h2d_bytes_per_s is not None
        assert latency["tpot"]["h2d_s"] == pytest.approx(streamed["decode"]["h2d_bytes"] / link.h2d_bytes_per_s.value)
        assert any("emulated, not measured" in each for each in latency["assumptions"])

    def test_nothing_is_overwritten(self, tmp_path: Path) -> None:
        path = tmp_path / "here.yaml"
        path.write_text("kept")
        result = invoke(*QUICK, "--out", str(path))
        assert (result.exit_code, path.read_text()) == (2, "kept")
        assert "exists, and nothing is overwritten" in result.stderr

    def test_a_place_that_cannot_be_written_is_refused_before_anything_is_timed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        timed: list[Any] = []
        monkeypatch.setattr("offload_eval.cli.link.measure_link", lambda *_: timed.append(1))
        (tmp_path / "dangling.yaml").symlink_to(tmp_path / "nowhere" / "x.yaml")
        for name in ("dangling.yaml", f"{'x' * 300}.yaml"):
            result = invoke(*QUICK, "--out", str(tmp_path / name))
            assert result.exit_code == 2
            assert "cannot be written" in result.stderr
        assert not timed
        assert not list(tmp_path.glob("x*"))

    @pytest.mark.parametrize(
        ("arguments", "fragment"),
        [
            (("--out", "x.txt"), "is no YAML file's name"),
            (("--out", "nowhere/x.yaml"), "there is no folder nowhere"),
            (("--hardware", "h100-sxm"), "needs --out"),
            (("--hardware", "h1000", "--out", "x.yaml"), "no profile of that name"),
        ],
    )
    def test_bad_input_ends_with_2_before_anything_is_timed(
        self, arguments: tuple[str, ...], fragment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(link_module, "measure_link", lambda *_: pytest.fail("timed"))
        result = invoke(*QUICK, *arguments)
        assert result.exit_code == 2
        assert fragment in result.stderr
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("arguments", [("--repeats", "2"), ("--most-mib", "0"), ("--device", "tpu")])
    def test_a_usage_error_ends_with_2(self, arguments: tuple[str, ...]) -> None:
        assert invoke(*arguments).exit_code == 2

    @pytest.mark.skipif(torch.cuda.is_available(), reason="a device is there")
    def test_without_a_device_cuda_ends_with_3(self) -> None:
        result = invoke("--device", "cuda")
        assert result.exit_code == 3
        assert "--device cpu" in result.stderr

    def test_memory_that_is_short_cuts_the_default_and_refuses_what_was_asked(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link_module, "fitting_bytes", lambda _bench: 40 * KIB)
        result = invoke("--device", "cpu", "--repeats", "3", "--json")
        assert max(each["size_bytes"] for each in json.loads(result.stdout)["copies"]) == 32 * KIB
        refused = invoke(*QUICK)
        assert refused.exit_code == 3
        assert "--most-mib allows at most 40.00 KiB now" in refused.stderr
