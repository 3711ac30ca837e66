"""What the link of a run is held against: its calibrated profile, or on the emulated device the pace it was given."""

from typing import Final

from offload_eval.core.hardware import HardwareProfile, LinkProfile, SourcedValue
from offload_eval.core.records import Direction, Evidence, RunRecord

COPY_GAP_S: Final[dict[Evidence, float]] = {"emulated": 2e-4, "measured": 1e-5}
"""What timing a copy by itself may add to its bytes and the link's latency before the link counts as slow: to wake a
thread, or between two events. A calibration times copies in a row, and its latency has none of it."""


def fitting_hardware(record: RunRecord, hardware: HardwareProfile | None) -> HardwareProfile | None:
    """The profile, where its link is one of the record's rung: memory copies of a CPU for an emulated run, or not."""
    if hardware is None or hardware.link is None:
        return None
    return hardware if hardware.link.emulated == (record.evidence == "emulated") else None


def fitting_link(record: RunRecord, hardware: HardwareProfile | None) -> LinkProfile | None:
    """The link that a record's copies are held against; None where nothing is known of it."""
    fitting = fitting_hardware(record, hardware)
    if fitting is not None:
        return fitting.link
    pace_bytes_per_s = record.spec.cpu.link_bytes_per_s
    if record.evidence != "emulated" or pace_bytes_per_s is None:
        return None
    pace = SourcedValue(value=pace_bytes_per_s, source="cpu.link_bytes_per_s", date=record.started_at_utc[:10])
    return LinkProfile(
        name="the pace of cpu.link_bytes_per_s", emulated=True, h2d_bytes_per_s=pace, d2h_bytes_per_s=pace
    )


def latency_of(link: LinkProfile) -> float:
    """Seconds that one copy costs on top of its bytes; 0 where the profile states none, as a fit may find none."""
    return 0.0 if link.latency_s is None else link.latency_s.value


def bandwidth_of(link: LinkProfile, direction: Direction, contended_share: float) -> float | None:
    """Bytes per second of one direction while the other one is busy for a share of the time.

    Args:
        link: Calibrated.
        direction: The one in question.
        contended_share: 0: the other direction is idle; 1: it is busy all the time.
    """
    alone, contended = (
        (link.h2d_bytes_per_s, link.h2d_with_d2h_bytes_per_s)
        if direction == "h2d"
        else (link.d2h_bytes_per_s, link.d2h_with_h2d_bytes_per_s)
    )
    if alone is None:
        return None
    # One thread serves both ways of the emulated link in turn: a copy has it to itself while it is busy.
    if contended is None or link.emulated:
        return float(alone.value)
    return alone.value + contended_share * (contended.value - alone.value)
