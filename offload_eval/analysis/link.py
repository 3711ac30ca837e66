"""From timed copies to the link's latency and bandwidth, and to a hardware profile that bounds can use."""

import re
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from offload_eval.analysis.statistics import relative_spread
from offload_eval.core.hardware import HardwareProfile, LinkProfile, SourcedValue, prefer_calibrated
from offload_eval.core.link import CopySeries, LinkCalibration, LinkFit
from offload_eval.core.records import Direction
from offload_eval.errors import UnableError
from offload_eval.units import format_bytes

WIDE_SPREAD_RATIO: Final = 0.1
"""Of the median: samples that range wider were disturbed."""
LOOSE_FIT_RATIO: Final = 0.25
"""Past it a straight line does not describe the link's small and large copies alike."""
_LEAST_BYTES_SHARE: Final = 0.01
"""Of the largest copy's time: where bytes take less of it, their rate is lost in the latency's noise."""
_NAME_CHARACTERS: Final = 60


def fit_line(sizes_bytes: Sequence[int], times_s: Sequence[float]) -> tuple[float, float]:
    """Fits time = latency + bytes * seconds_per_byte, both at least 0.

    Least squares of the error relative to the time: the smallest copies weigh as much as the largest, whose noise
    alone is longer than a latency.

    Args:
        sizes_bytes: Of one copy each, with at least two different sizes.
        times_s: Of the same copies, above 0.

    Returns:
        Latency in seconds, and seconds per byte.
    """
    assert len(set(sizes_bytes)) > 1, "one size cannot tell latency from bandwidth"
    ones = [1 / time_s for time_s in times_s]
    sizes = [size_bytes / time_s for size_bytes, time_s in zip(sizes_bytes, times_s, strict=True)]
    one_one, one_size, size_size = _dot(ones, ones), _dot(ones, sizes), _dot(sizes, sizes)
    determinant = one_one * size_size - one_size**2
    latency_s = (sum(ones) * size_size - sum(sizes) * one_size) / determinant
    s_per_byte = (sum(sizes) * one_one - sum(ones) * one_size) / determinant
    if latency_s < 0:
        return 0.0, sum(sizes) / size_size
    if s_per_byte < 0:
        return sum(ones) / one_one, 0.0
    return latency_s, s_per_byte


def fit_link(series: Sequence[CopySeries]) -> list[LinkFit]:
    """Fits each direction, alone and opposed, of each kind of host memory and each layout, over its sizes."""
    groups: dict[tuple[object, ...], list[CopySeries]] = {}
    for each in series:
        groups.setdefault((each.direction, each.opposed, each.memory, each.layout), []).append(each)
    return [_fit(group) for group in groups.values() if len({each.size_bytes for each in group}) > 1]


def calibrated_profile(calibration: LinkCalibration, documented: HardwareProfile | None = None) -> HardwareProfile:
    """Makes the hardware profile of a calibration.

    The figures are those of contiguous copies, of pinned memory where there is some. An emulated link says so in its
    name, its flag, and the source of every figure.

    Args:
        calibration: What was measured.
        documented: Gives what a link's calibration does not measure: memory bandwidth and peaks.

    Raises:
        UnableError: No bandwidth came out of a direction alone.
    """
    memory = "pinned" if any(each.memory == "pinned" for each in calibration.series) else "pageable"
    used = [each for each in calibration.series if (each.memory, each.layout) == (memory, "contiguous")]
    fits = {(fit.direction, fit.opposed): fit for fit in fit_link(used)}
    lacking = [way for way in ("h2d", "d2h") if (way, False) not in fits or not fits[way, False].bandwidth_bytes_per_s]
    if lacking:
        raise UnableError(
            f"{' and '.join(lacking)} gave no bandwidth: times do not grow with the size; copy larger sizes"
        )
    figures = _Figures(calibration, used, fits)
    emulated = calibration.evidence == "emulated"
    link = LinkProfile(
        name=calibration.link,
        emulated=emulated,
        h2d_bytes_per_s=figures.bandwidth("h2d", opposed=False),
        d2h_bytes_per_s=figures.bandwidth("d2h", opposed=False),
        h2d_with_d2h_bytes_per_s=figures.bandwidth("h2d", opposed=True),
        d2h_with_h2d_bytes_per_s=figures.bandwidth("d2h", opposed=True),
        latency_s=figures.latency(),
    )
    device = calibration.device_model
    basis = device if documented is None else documented.name
    profile = HardwareProfile(
        name=_name(basis, "link-emulated" if emulated else "link-measured"),
        description=_description(emulated, device, documented),
        calibrated=True,
        machine=f"{device}, {calibration.machine.platform}",
        link=link,
    )
    return profile if documented is None else prefer_calibrated(profile, documented)


class _Figures:
    """The fits as sourced values."""

    def __init__(
        self,
        calibration: LinkCalibration,
        series: Sequence[CopySeries],
        fits: dict[tuple[Direction, bool], LinkFit],
    ) -> None:
        self._calibration = calibration
        self._series = series
        self._fits = fits

    def bandwidth(self, direction: Direction, *, opposed: bool) -> SourcedValue | None:
        fit = self._fits.get((direction, opposed))
        if fit is None or not fit.bandwidth_bytes_per_s:
            return None
        return self._sourced(fit.bandwidth_bytes_per_s, f"{direction}{_OPPOSED[opposed]}, {self._method(fit)}")

    def latency(self) -> SourcedValue | None:
        fit = max((self._fits[way, False] for way in _WAYS), key=lambda each: each.latency_s)
        if not fit.latency_s:
            return None
        return self._sourced(fit.latency_s, f"of {fit.direction}, the slower direction to start; {self._method(fit)}")

    def _sourced(self, value: float, method: str) -> SourcedValue:
        evidence = self._calibration.evidence
        what = "memory copies between the tiers of the cpu device" if evidence == "emulated" else "offload-eval link"
        return SourcedValue(value=value, source=f"{evidence}: {what}, {method}", date=self._calibration.date)

    def _method(self, fit: LinkFit) -> str:
        group = [each for each in self._series if (each.direction, each.opposed) == (fit.direction, fit.opposed)]
        sizes = [each.size_bytes for each in group]
        return (
            f"{fit.memory} host memory, fit of latency + bytes/bandwidth to the medians of {len(group[0].samples_s)} "
            f"samples at {len(sizes)} sizes from {format_bytes(min(sizes))} to {format_bytes(max(sizes))}, verified; "
            f"no median is further than {fit.worst_error_ratio:.0%} from it"
        )


_WAYS: Final[tuple[Direction, Direction]] = ("h2d", "d2h")
_OPPOSED: Final = {False: " alone", True: " with the other direction busy"}


def link_notes(calibration: LinkCalibration, fits: Sequence[LinkFit]) -> Iterator[str]:
    """Says what a reader of the figures has to know."""
    if calibration.evidence == "emulated":
        yield "Emulated: memory copies between the tiers of this CPU; one copy thread serves both directions in turn."
    else:
        yield "Pageable copies block the host: they are timed by its clock, one direction at a time."
    yield "Strided is device to host only: a sliding layer's window leaves as a view and comes back contiguous."
    spreads = [relative_spread(each.copy_times_s) or 0.0 for each in calibration.series]
    num_wide = sum(spread > WIDE_SPREAD_RATIO for spread in spreads)
    if num_wide:
        wide = f"{num_wide} of {len(spreads)} medians are of samples that range over more than {WIDE_SPREAD_RATIO:.0%}"
        yield f"{wide}: something else may use this machine; calibrate when it is idle, or raise --repeats."
    for fit in fits:
        if fit.worst_error_ratio > LOOSE_FIT_RATIO:
            way = f"{fit.direction}{_OPPOSED[fit.opposed]}, {fit.memory}, {fit.layout}"
            off = f"{fit.worst_error_ratio:.0%}"
            yield f"{way}: a median is {off} off latency + bytes/bandwidth; go by the size you copy."
    near, here = calibration.device_numa_node, calibration.host_numa_nodes
    if near is not None and here and here != (near,):
        nodes = ", ".join(map(str, here))
        yield f"Device on NUMA node {near}, process on {nodes}: try numactl --cpunodebind={near} --membind={near}."


def _fit(group: Sequence[CopySeries]) -> LinkFit:
    sizes = [each.size_bytes for each in group]
    medians_s = [median(each.copy_times_s) for each in group]
    latency_s, s_per_byte = fit_line(sizes, medians_s)
    errors = [
        abs(latency_s + size * s_per_byte - time_s) / time_s for size, time_s in zip(sizes, medians_s, strict=True)
    ]
    first, bytes_s = group[0], s_per_byte * max(sizes)
    return LinkFit(
        direction=first.direction,
        opposed=first.opposed,
        memory=first.memory,
        layout=first.layout,
        latency_s=latency_s,
        bandwidth_bytes_per_s=1 / s_per_byte if bytes_s > _LEAST_BYTES_SHARE * (latency_s + bytes_s) else None,
        worst_error_ratio=max(errors),
        num_sizes=len(group),
    )


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(left, right, strict=True))


def _name(basis: str, suffix: str) -> str:
    plain = re.sub(r"[^a-z0-9.]+", "-", basis.casefold()).strip("-.")[:_NAME_CHARACTERS]
    return f"{plain or 'device'}-{suffix}"


def _description(emulated: bool, device: str, documented: HardwareProfile | None) -> str:
    link = "link emulated by memory copies of a CPU" if emulated else "link measured"
    rest = "" if documented is None else f"; memory and peaks of {documented.name}, from documents"
    return f"{device}: {link}{rest}"
