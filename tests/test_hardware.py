"""Hardware profiles: what ships agrees with arithmetic from other sources, and what is malformed is refused."""

import sysconfig
from pathlib import Path

import msgspec
import pytest

import offload_eval
from offload_eval.core.hardware import (
    HardwareProfile,
    LinkProfile,
    PeakFlops,
    SourcedBytes,
    SourcedValue,
    prefer_calibrated,
)
from offload_eval.errors import InputError
from offload_eval.store.hardware_file import (
    MAX_BYTES,
    dump_hardware,
    hardware_names,
    load_hardware,
    sourced_values,
)
from offload_eval.store.locations import shipped_folder

NAMES = hardware_names()

# Dense bfloat16 operations of one processor in a cycle, accumulating in float32. Ampere GA100: 4 tensor cores of 256
# multiply-adds; Hopper: twice that; GA102 and Ada: half of it, and half again on GeForce.
# Processors and clocks: archive-lib.hpctech.co.jp and glennklockwood.com (H100), a deviceQuery of PC2 (A100),
# sysrqmts.com (A10), the Ada white paper (RTX 4090), itcreations.com (L40S), fpsbench.com (L4).
TENSOR_CORES = {
    "h100-sxm": (132, 4096, 1.83e9, 0.001),
    "a100-sxm-80": (108, 2048, 1.41e9, 0.001),
    "a100-pcie-80": (108, 2048, 1.41e9, 0.001),
    "a10": (72, 1024, 1.695e9, 0.001),
    "rtx-4090": (128, 512, 2.52e9, 0.001),
    "l40s": (142, 1024, 2.52e9, 0.02),  # the data sheet repeats the L40's figure, at 2.49 GHz
    "l4": (60, 1024, 2.04e9, 0.04),  # the data sheet counts with a lower clock
}

# CUDA cores and boost clock, same sources, and stillwater-sc/KPU-Simulator for the RTX 3090.
CUDA_CORES = {
    "h100-sxm": (16_896, 1.98e9),
    "a100-sxm-80": (6_912, 1.41e9),
    "a100-pcie-80": (6_912, 1.41e9),
    "a10": (9_216, 1.695e9),
    "rtx-4090": (16_384, 2.52e9),
    "rtx-3090": (10_496, 1.695e9),
    "l40s": (18_176, 2.52e9),
    "l4": (7_424, 2.04e9),
}

# Bus width in bits and data rate of a pin: svethardware.cz (A100), AnandTech (H100), geektopia.es (H200),
# sysrqmts.com (A10), fpsbench.com (L4), itcreations.com (L40S), techgoing.com (RTX 4090), a spec dump (RTX 3090),
# emergentmind.com (MI300X: eight stacks of 662.4 GB/s).
MEMORY_BUS = {
    "a100-sxm-80": (5120, 3.186e9),
    "h100-sxm": (5120, 5.24e9),
    "h200-sxm": (6144, 6.2e9),
    "a10": (384, 12.5e9),
    "l4": (192, 12.5e9),
    "l40s": (384, 18e9),
    "rtx-4090": (384, 21e9),
    "rtx-3090": (384, 19.5e9),
    "mi300x": (8, 662.4e9 * 8),
}

# Line rate of a direction after 128b/130b coding; NVLink-C2C as announced.
LINE_RATES = {
    "PCIe 4.0 x16": 16e9 * 16 / 8 * 128 / 130,
    "PCIe 5.0 x16": 32e9 * 16 / 8 * 128 / 130,
    "NVLink-C2C": 450e9,
}

GOOD = """
name: card
memory_bytes: {value: 24 GB, source: data sheet, date: 2026-11-29}
peak_flops_per_s:
  bfloat16: {value: 125e12, source: data sheet, date: 2026-11-29}
link:
  name: PCIe 4.0 x16
  h2d_bytes_per_s: {value: 26.03 GB, source: measured, date: 2026-11-29}
  latency_s: {value: 1e-5, source: measured, date: 2026-11-29}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "card.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def figure(found: SourcedValue | SourcedBytes | None) -> float:
    assert found is not None
    return found.value


def test_the_profiles_that_ship():
    expected = "a10 a100-pcie-80 a100-sxm-80 b200 gh200 h100-pcie h100-sxm h200-sxm l4 l40s mi300x rtx-3090 rtx-4090"
    assert expected.split() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_shipped_profile_is_named_by_its_file_and_every_figure_is_sourced(name: str):
    profile = load_hardware(name)
    assert profile.name == name
    assert not profile.calibrated
    figures = dict(sourced_values(profile))
    assert {
        ("memory_bytes",),
        ("memory_bytes_per_s",),
        ("link", "h2d_bytes_per_s"),
        ("link", "d2h_bytes_per_s"),
    } <= set(figures)
    assert all(len(each.source) > 20 and "2020" < each.date <= "2026-11-29" for each in figures.values())
    assert all(each.source.startswith("measured: ") for path, each in figures.items() if path[0] == "link")


@pytest.mark.parametrize("name", NAMES)
def test_shipped_profile_loads_by_name_in_any_case_by_path_and_back_from_its_dump(name: str, tmp_path: Path):
    profile = load_hardware(name)
    assert load_hardware(name.upper()) == profile
    assert load_hardware(f"{name}.yaml", relative_to=shipped_folder("hardware")) == profile
    assert load_hardware(write(tmp_path, dump_hardware(profile))) == profile


@pytest.mark.parametrize("name", NAMES)
def test_peaks_are_dense_and_halve_with_each_doubling_of_the_width(name: str):
    peaks = load_hardware(name).peak_flops_per_s
    if name == "rtx-3090":
        assert peaks.bfloat16 is None
        return
    half = figure(peaks.bfloat16)
    assert figure(peaks.float16) == pytest.approx(half, rel=1e-9)
    assert peaks.fp8 is None or figure(peaks.fp8) == pytest.approx(2 * half, rel=0.015)
    assert peaks.tf32 is None or figure(peaks.tf32) == pytest.approx(half / 2, rel=0.015)
    assert figure(peaks.float32) < 0.51 * half


@pytest.mark.parametrize("name", TENSOR_CORES)
def test_tensor_core_peak_follows_from_processors_and_clock(name: str):
    processors, flops_a_cycle, clock, tolerance = TENSOR_CORES[name]
    peak = figure(load_hardware(name).peak_flops_per_s.bfloat16)
    assert peak == pytest.approx(processors * flops_a_cycle * clock, rel=tolerance)


@pytest.mark.parametrize("name", CUDA_CORES)
def test_float32_peak_is_that_of_the_cuda_cores(name: str):
    cores, clock = CUDA_CORES[name]
    assert figure(load_hardware(name).peak_flops_per_s.float32) == pytest.approx(2 * cores * clock, rel=0.003)


@pytest.mark.parametrize("name", MEMORY_BUS)
def test_memory_bandwidth_is_bus_width_times_data_rate(name: str):
    bits, rate = MEMORY_BUS[name]
    assert figure(load_hardware(name).memory_bytes_per_s) == pytest.approx(bits * rate / 8, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_link_stays_under_its_line_rate_and_shares_it(name: str):
    link = load_hardware(name).link
    assert link is not None
    line_rate = LINE_RATES[link.name]
    alone = figure(link.h2d_bytes_per_s), figure(link.d2h_bytes_per_s)
    assert all(0.6 * line_rate < each < line_rate for each in alone)
    both = link.h2d_with_d2h_bytes_per_s, link.d2h_with_h2d_bytes_per_s
    for contended, free in zip(both, alone, strict=True):
        assert contended is None or 0.4 * free < contended.value < free


def test_a_file_says_sizes_and_exponents_its_own_way(tmp_path: Path):
    """YAML 1.1 reads `125e12` and `1e-5` as text; here they are numbers, and sizes are exact."""
    profile = load_hardware(write(tmp_path, GOOD))
    assert profile.memory_bytes == SourcedBytes(value=24_000_000_000, source="data sheet", date="2026-11-29")
    assert profile.link is not None
    assert figure(profile.peak_flops_per_s.bfloat16) == 125e12
    assert figure(profile.link.h2d_bytes_per_s) == 26_030_000_000
    assert figure(profile.link.latency_s) == 1e-5
    assert profile.memory_bytes_per_s is None


@pytest.mark.parametrize("text", ["4.1 TB", "8.2 GB", "64.1 GB"])
def test_a_decimal_fraction_of_a_size_is_exact(text: str, tmp_path: Path):
    """In binary floating point 8.2 * 1e9 is 8199999999.999999, which is no whole number of bytes."""
    profile = load_hardware(write(tmp_path, GOOD.replace("24 GB", text)))
    number, unit = text.split()
    assert figure(profile.memory_bytes) == int(number.replace(".", "")) * {"TB": 10**11, "GB": 10**8}[unit]


MALFORMED = {
    "an empty file": (GOOD, "", "is empty; allowed: a mapping with name, description, calibrated"),
    "a list": (GOOD, "- 1\n", "allowed: a mapping with name"),
    "no YAML": ("link:", "link: [", "not valid YAML: line"),
    "a key given twice": ("name: card", "name: card\nname: board", "name: the key is given twice (lines 2 and 3)"),
    "an unknown key": ("memory_bytes:", "memory_byte:", "memory_byte: unknown key; allowed:", "mean 'memory_bytes'?"),
    "an unknown dtype": (
        "bfloat16:",
        "bf16:",
        "peak_flops_per_s.bf16: unknown key; allowed: bfloat16, float16, fp8, tf32, float32",
    ),
    "no source": (
        "125e12, source: data sheet,",
        "125e12,",
        "peak_flops_per_s.bfloat16.source: required, and missing; allowed: text that is not empty",
    ),
    "an empty source": ("26.03 GB, source: measured", "26.03 GB, source: ''", "link.h2d_bytes_per_s.source: ''"),
    "a bare number": (
        "{value: 24 GB, source: data sheet, date: 2026-11-29}",
        "24_000_000_000",
        "memory_bytes: 24000000000 (integer) is not allowed; allowed: a mapping with value, source, date",
    ),
    "no size": ("26.03 GB", "26.03 Gb", "link.h2d_bytes_per_s.value: '26.03 Gb' is not a size; allowed: an integer"),
    "a negative bandwidth": (
        "26.03 GB",
        "-1",
        "h2d_bytes_per_s.value: -1 (integer)",
        "a number > 0, or a number with",
    ),
    "a peak of zero": ("125e12", "0", "bfloat16.value: 0 (integer) is not allowed; allowed: a number > 0"),
    "a peak in words": ("125e12", "125 TFLOPS", "bfloat16.value: '125 TFLOPS' (text) is not allowed"),
    "an infinite peak": (
        "125e12",
        "125e400",
        "bfloat16.value: '125e400' (text) is not allowed; allowed: a number > 0",
    ),
    "a fraction of a byte": (
        "24 GB",
        "24.5",
        "memory_bytes.value: 24.5 (decimal number)",
        "an integer >= 1, or a number",
    ),
    "a date the other way round": (
        "26.03 GB, source: measured, date: 2026-11-29",
        "26.03 GB, source: measured, date: 29.11.2026",
        "h2d_bytes_per_s.date: '29.11.2026' (text) is not allowed; allowed: a date as YYYY-MM-DD",
    ),
    "no day of the calendar": (
        "24 GB, source: data sheet, date: 2026-11-29",
        "24 GB, source: data sheet, date: 2026-02-30",
        "memory_bytes.date: '2026-02-30' is no day of the calendar; allowed: a date as YYYY-MM-DD",
    ),
    "a name with a space": ("name: card", "name: my card", "name: 'my card' (text) is not allowed; allowed: letters"),
    "no link name": ("  name: PCIe 4.0 x16\n", "", "link.name: required, and missing"),
    "a calibration without its machine": ("name: card", "name: card\ncalibrated: true", "machine: required where"),
    "a machine without a calibration": (
        "name: card",
        "name: card\nmachine: lab",
        "machine: stated, but calibrated is",
    ),
    "a word for a switch": (
        "name: card",
        "name: card\ncalibrated: maybe",
        "calibrated: 'maybe' (text)",
        "true or false",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_profile_is_refused_with_file_path_value_and_what_is_allowed(case: str, tmp_path: Path):
    old, new, *fragments = MALFORMED[case]
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(InputError) as caught:
        load_hardware(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    ("location", "fragment"),
    [
        ("h100", "no such file, and no profile of that name; near: h100-sxm, gh200, h100-pcie"),
        ("quantum", "allowed: a YAML file, or one of a10, a100-pcie-80"),
        ("", "the hardware is given as ''"),
        (".", "not a regular file"),
        ("a\0b", "no such file"),
        (Path("h100-sxm"), "no such file"),
    ],
)
def test_a_location_that_names_no_profile_is_refused(location: str | Path, fragment: str, tmp_path: Path):
    with pytest.raises(InputError) as caught:
        load_hardware(location, relative_to=tmp_path)
    assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("content", "fragment"), [(b"name: \xff", "byte 6 is not UTF-8"), (b"#" * (MAX_BYTES + 1), "which no profile has")]
)
def test_a_file_of_other_bytes_is_refused(content: bytes, fragment: str, tmp_path: Path):
    path = tmp_path / "card.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=fragment):
        load_hardware(path)


def test_profiles_are_found_where_a_wheel_puts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    installed = tmp_path / "share" / "offload-eval" / "hardware"
    installed.mkdir(parents=True)
    write(installed, GOOD)
    monkeypatch.setattr(offload_eval, "__file__", str(tmp_path / "site" / "offload_eval" / "__init__.py"))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert hardware_names() == ["card"]
    assert load_hardware("card").name == "card"


def calibration() -> HardwareProfile:
    def measured(value: float) -> SourcedValue:
        return SourcedValue(value=value, source="offload-eval link: median of 9, \x85\n spread 1 %", date="2026-11-28")

    link = LinkProfile(name="PCIe 5.0 x16", h2d_bytes_per_s=measured(1 / 3 * 1e11), latency_s=measured(9.7e-6))
    peaks = PeakFlops(bfloat16=measured(7.1e14))
    return HardwareProfile(name="lab", calibrated=True, machine="1e3", peak_flops_per_s=peaks, link=link)


def test_a_calibrated_profile_loads_back_equal(tmp_path: Path):
    """Floats to the last bit, a machine that looks like a number, control characters."""
    assert load_hardware(write(tmp_path, dump_hardware(calibration()))) == calibration()


def test_what_a_calibration_states_takes_precedence_and_the_link_is_taken_whole():
    documented = load_hardware("h200-sxm")
    merged = prefer_calibrated(calibration(), documented)
    assert merged.link == calibration().link
    assert merged.peak_flops_per_s.bfloat16 == calibration().peak_flops_per_s.bfloat16
    assert merged.peak_flops_per_s.fp8 == documented.peak_flops_per_s.fp8
    assert (merged.memory_bytes, merged.memory_bytes_per_s) == (documented.memory_bytes, documented.memory_bytes_per_s)
    assert (merged.calibrated, merged.machine, merged.name) == (True, "1e3", "lab")


def test_every_field_says_what_it_is():
    """Field names carry the unit: each figure is bytes, bytes a second, operations a second or seconds."""
    for struct in (HardwareProfile, LinkProfile):
        for field in msgspec.structs.fields(struct):
            if "Sourced" in str(field.type):
                assert field.name.endswith(("_bytes", "_bytes_per_s", "_s")), field.name
