"""`offload-eval link`: calibrates this machine's link, prints it, and writes a hardware profile."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from offload_eval.analysis.link import calibrated_profile, fit_link, link_notes
from offload_eval.analysis.statistics import relative_spread
from offload_eval.cli.console import print_json, progress_console, result_console
from offload_eval.core.experiment import CpuSpec, DeviceName
from offload_eval.core.hardware import HardwareProfile
from offload_eval.core.link import CopySeries, LinkCalibration, LinkFit
from offload_eval.core.machine import Machine
from offload_eval.errors import ExitCode, InputError, UnableError
from offload_eval.execution.devices import accelerator_uuid, open_device, resolve_device
from offload_eval.instruments.copies import CopyBench
from offload_eval.instruments.device import Device
from offload_eval.instruments.environment import read_machine
from offload_eval.instruments.link_calibration import (
    LEAST_BYTES,
    CopyKind,
    copy_sizes,
    fitting_bytes,
    measure_link,
    planned_copies,
)
from offload_eval.instruments.numa import device_numa_node, host_numa_nodes
from offload_eval.reporting.link_text import render_link
from offload_eval.store.hardware_file import dump_hardware, load_hardware
from offload_eval.units import MIB, format_bytes

DEFAULT_MOST_MIB: Final[dict[DeviceName, int]] = {"cuda": 512, "cpu": 64}


def link_command(
    *, device: str, most_mib: int | None, repeats: int, out: Path | None, hardware: str | None, json_output: bool
) -> int:
    """Times the copies and prints what they give.

    Args:
        device: auto, cuda or cpu.
        most_mib: The largest copy; None: the device's default, or less where memory is short.
        repeats: Samples of each series.
        out: Where the hardware profile goes; nothing is overwritten.
        hardware: The profile that gives memory bandwidth and peaks.
        json_output: One JSON object instead of the tables.

    Returns:
        0.

    Raises:
        InputError: The output file cannot be made, or the hardware profile is wrong.
        UnableError: The device is missing, memory is short, or a copy brought wrong data.
    """
    documented = _documented(hardware, out)
    if out is not None:
        _check_writable(out)
    name = resolve_device(device)
    torch.set_num_threads(1)
    chosen = open_device(name, CpuSpec())
    calibration = _calibrate(chosen, most_mib, repeats)
    fits = fit_link(calibration.series)
    console = result_console()
    if json_output:
        print_json(msgspec.json.encode(_document(calibration, fits, out)).decode())
    else:
        for part in render_link(calibration, fits):
            console.print(part, highlight=False)
    if out is not None:
        profile = calibrated_profile(calibration, documented)
        with out.open("x", encoding="utf-8") as file:
            file.write(dump_hardware(profile))
    if out is not None and not json_output:
        console.print(f"hardware profile: {out}", markup=False, highlight=False, soft_wrap=True)
    return ExitCode.DONE


def _documented(hardware: str | None, out: Path | None) -> HardwareProfile | None:
    if hardware is None:
        return None
    if out is None:
        raise InputError(f"--hardware {hardware}: needs --out, the profile that it completes")
    return load_hardware(hardware)


def _check_writable(out: Path) -> None:
    """Before anything is timed."""
    if out.suffix not in (".yaml", ".yml"):
        raise InputError(f"--out {out}: is no YAML file's name; allowed: a name that ends in .yaml")
    try:
        if out.exists():
            raise InputError(f"--out {out}: exists, and nothing is overwritten; give another name, or remove it")
        if not out.parent.is_dir():
            raise InputError(f"--out {out}: there is no folder {out.parent}; make it, or give another one")
        out.open("x").close()
        out.unlink()
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written: {error.strerror}; give another name or folder") from error


def _calibrate(device: Device, most_mib: int | None, repeats: int) -> LinkCalibration:
    evidence = device.evidence
    assert evidence in ("emulated", "measured")
    with device.open_copy_bench() as bench:
        default = DEFAULT_MOST_MIB[device.name]
        sizes = copy_sizes(_most_bytes(bench, (most_mib or default) * MIB, is_default=most_mib is None))
        with _progress(len(planned_copies(bench, sizes))) as on_series:
            series = measure_link(bench, sizes, repeats, on_series)
        pci_address = bench.pci_address
    machine = read_machine(with_accelerator=device.name == "cuda", accelerator_uuid=accelerator_uuid(device.name))
    model = torch.cuda.get_device_name(device.torch_device) if device.name == "cuda" else machine.cpu
    return LinkCalibration(
        device=device.name,
        evidence=evidence,
        device_model=model,
        link=_link_name(machine, device.name, model),
        machine=machine,
        date=datetime.now(UTC).date().isoformat(),
        device_numa_node=device_numa_node(pci_address),
        host_numa_nodes=host_numa_nodes(),
        series=series,
    )


def _most_bytes(bench: CopyBench, most_bytes: int, *, is_default: bool) -> int:
    """What was asked for, if memory has room for its buffers; a default gives way."""
    fitting = fitting_bytes(bench)
    if fitting >= most_bytes:
        return most_bytes
    if is_default and fitting >= 2 * LEAST_BYTES:
        return fitting
    raise UnableError(
        f"copies of {format_bytes(most_bytes)} need more memory than is free; --most-mib allows at most "
        f"{format_bytes(fitting)} now"
    )


def _link_name(machine: Machine, device: DeviceName, model: str) -> str:
    """By the slot's generation and width, where NVML says; an emulated link is called so."""
    if device == "cpu":
        return f"emulated: memory copies of {model}"
    accelerator = machine.accelerator
    if accelerator is None or accelerator.pcie_generation is None or accelerator.pcie_width is None:
        return f"host link of {model}"
    return f"PCIe {accelerator.pcie_generation}.0 x{accelerator.pcie_width}"


class _SeriesProgress:
    """Moves the bar as each series starts."""

    def __init__(self, progress: Progress, num_series: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=num_series)
        self._num_started = 0

    def __call__(self, kind: CopyKind) -> None:
        self._progress.update(self._task, description=kind.words, completed=self._num_started)
        self._num_started += 1


@contextmanager
def _progress(num_series: int) -> Iterator[_SeriesProgress]:
    console = progress_console()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    text = TextColumn("{task.description}", markup=False)
    with Progress(text, *columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield _SeriesProgress(progress, num_series)


def _document(calibration: LinkCalibration, fits: Sequence[LinkFit], out: Path | None) -> dict[str, Any]:
    """The contract for scripts: `copies[]` with raw samples and medians, `fits[]`."""
    document: dict[str, Any] = msgspec.to_builtins(calibration)
    del document["series"]
    return document | {
        "copies": [_copies(each) for each in calibration.series],
        "fits": msgspec.to_builtins(fits),
        "notes": list(link_notes(calibration, fits)),
        "profile": None if out is None else str(out),
    }


def _copies(series: CopySeries) -> dict[str, Any]:
    times_s: Sequence[float] = series.copy_times_s
    bytes_per_s = series.size_bytes / median(times_s)
    document: dict[str, Any] = msgspec.to_builtins(series)
    return document | {
        "median_s": median(times_s),
        "median_bytes_per_s": bytes_per_s,
        "median_gb_per_s": bytes_per_s / 1e9,
        "spread_ratio": relative_spread(times_s),
    }
