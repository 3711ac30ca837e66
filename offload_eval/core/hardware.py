"""What a machine can do at most: one device, its memory, and its link to the host.

A profile bounds; it does not predict. Absent is None: a figure that nobody could source is left out.
"""

import msgspec

from offload_eval.core.base import Date, Name, PositiveInt, PositiveNumber, Strict, Text


class SourcedValue(Strict, frozen=True, kw_only=True):
    """A figure, and who says so. The unit is that of the field it is in."""

    value: PositiveNumber
    source: Text
    """The document or the measurement, and what was done to its figure (`halved: printed with sparsity`)."""
    date: Date
    """Of the document or the measurement; of the look-up where the document has none."""


class SourcedBytes(Strict, frozen=True, kw_only=True):
    """A whole number of bytes, and who says so."""

    value: PositiveInt
    source: Text
    """The document or the measurement."""
    date: Date
    """Of the document or the measurement; of the look-up where the document has none."""


class PeakFlops(Strict, frozen=True, kw_only=True):
    """Dense matrix products, without structured sparsity; a multiply-add is two operations."""

    bfloat16: SourcedValue | None = None
    """Tensor or matrix cores, accumulating in float32."""
    float16: SourcedValue | None = None
    """Tensor or matrix cores, accumulating in float32."""
    fp8: SourcedValue | None = None
    """Tensor or matrix cores, accumulating in float32."""
    tf32: SourcedValue | None = None
    """float32 tensors rounded to TF32 on tensor cores; torch does so only where it is allowed to."""
    float32: SourcedValue | None = None
    """IEEE float32 outside tensor cores: what a float32 product costs in torch by default."""


class LinkProfile(Strict, frozen=True, kw_only=True):
    """Copies between pinned host memory and one device, at sizes where bandwidth dominates."""

    name: Text
    """Such as `PCIe 5.0 x16`."""
    emulated: bool = False
    """Memory copies between the tiers of a CPU stand for the link: no link to a device was measured."""
    h2d_bytes_per_s: SourcedValue | None = None
    """Host to device, nothing going the other way."""
    d2h_bytes_per_s: SourcedValue | None = None
    """Device to host, nothing going the other way."""
    h2d_with_d2h_bytes_per_s: SourcedValue | None = None
    """Host to device, while device to host is busy too."""
    d2h_with_h2d_bytes_per_s: SourcedValue | None = None
    """Device to host, while host to device is busy too."""
    latency_s: SourcedValue | None = None
    """What one copy costs on top of its bytes."""


class HardwareProfile(Strict, frozen=True, kw_only=True):
    """One device and its link, from data sheets or from a calibration."""

    name: Name
    description: str = ""
    calibrated: bool = False
    """Measured on `machine`; else from documents."""
    machine: Text | None = None
    """Where a calibration ran; None for documents."""
    memory_bytes: SourcedBytes | None = None
    """The device memory's capacity, as sold; what a driver lets through differs by some percent."""
    memory_bytes_per_s: SourcedValue | None = None
    """Device memory, reads and writes together."""
    peak_flops_per_s: PeakFlops = msgspec.field(default_factory=PeakFlops)
    link: LinkProfile | None = None


def prefer_calibrated(calibrated: HardwareProfile, documented: HardwareProfile) -> HardwareProfile:
    """Fills what a calibration did not measure from documents; what it did measure takes precedence.

    The link is one measurement: it is taken whole, never mixed from both.
    """
    ours, theirs = calibrated.peak_flops_per_s, documented.peak_flops_per_s
    peaks = {name: getattr(ours, name) or getattr(theirs, name) for name in PeakFlops.__struct_fields__}
    return msgspec.structs.replace(
        calibrated,
        description=calibrated.description or documented.description,
        memory_bytes=calibrated.memory_bytes or documented.memory_bytes,
        memory_bytes_per_s=calibrated.memory_bytes_per_s or documented.memory_bytes_per_s,
        peak_flops_per_s=PeakFlops(**peaks),
        link=calibrated.link or documented.link,
    )
