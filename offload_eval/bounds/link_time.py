"""The least time that bytes take over a link, each direction alone and both at once; over whole grids of lengths."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offload_eval.core.hardware import HardwareProfile, LinkProfile, SourcedValue
from offload_eval.errors import InputError

COPIES_ON_THE_COMPUTE_STREAM: Final = ("offloaded", "offloaded_static")
"""Strategies whose write-back waits in line with computation. Source: transformers 5.24, cache_utils.Cache.offload."""
COPYING: Final = (*COPIES_ON_THE_COMPUTE_STREAM, "streamed")
"""Strategies that move the cache over the link."""
Seconds = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """Seconds that the same bytes take; lower bounds, without what each copy costs on top of its bytes."""

    h2d_s: Seconds
    """Nothing goes the other way."""
    d2h_s: Seconds
    contended_h2d_s: Seconds
    """The other direction starts at the same moment, and contends for as long as it lasts."""
    contended_d2h_s: Seconds

    @property
    def both_s(self) -> Seconds:
        """Both are over: when the slower one is, or, where they hinder each other more, one after the other."""
        at_once = np.maximum(self.contended_h2d_s, self.contended_d2h_s)
        alone = np.maximum(self.h2d_s, self.d2h_s)
        least: Seconds = np.maximum(alone, np.minimum(self.h2d_s + self.d2h_s, at_once))
        return least


def link_times(h2d_bytes: ArrayLike, d2h_bytes: ArrayLike, hardware: HardwareProfile) -> LinkTimes:
    """Computes how long copies keep the link of a profile busy.

    Args:
        h2d_bytes: To the device.
        d2h_bytes: Back; broadcasts with `h2d_bytes`.
        hardware: Read only where there are bytes. What the other direction takes from one is nothing where that is
            not stated.

    Raises:
        InputError: The profile lacks a figure that is needed; the message names it.
    """
    h2d, d2h = np.asarray(h2d_bytes, np.float64), np.asarray(d2h_bytes, np.float64)
    ways = (bool(np.any(h2d)), bool(np.any(d2h)))
    if not any(ways):
        nothing = np.zeros(np.broadcast_shapes(h2d.shape, d2h.shape))
        return LinkTimes(h2d_s=nothing, d2h_s=nothing, contended_h2d_s=nothing, contended_d2h_s=nothing)
    link = _link(hardware)
    h2d_rate = needed_figure(hardware, "link.h2d_bytes_per_s", link.h2d_bytes_per_s) if ways[0] else 1.0
    d2h_rate = needed_figure(hardware, "link.d2h_bytes_per_s", link.d2h_bytes_per_s) if ways[1] else 1.0
    h2d_opposed = _stated(link.h2d_with_d2h_bytes_per_s, h2d_rate)
    d2h_opposed = _stated(link.d2h_with_h2d_bytes_per_s, d2h_rate)
    h2d_s, d2h_s = h2d / h2d_opposed, d2h / d2h_opposed
    # The shorter transfer contends with the longer one for as long as it lasts, and no longer.
    return LinkTimes(
        h2d_s=h2d / h2d_rate,
        d2h_s=d2h / d2h_rate,
        contended_h2d_s=np.where(h2d_s >= d2h_s, d2h_s + (h2d - d2h_s * h2d_opposed) / h2d_rate, h2d_s),
        contended_d2h_s=np.where(h2d_s >= d2h_s, d2h_s, h2d_s + (d2h - h2d_s * d2h_opposed) / d2h_rate),
    )


def check_link(hardware: HardwareProfile) -> None:
    """Refuses a profile that cannot bound copies in both directions.

    Raises:
        InputError: The message names the figure that is missing.
    """
    link_times(1, 1, hardware)


def link_assumptions(link: LinkProfile) -> Iterator[str]:
    """What a link's figures leave open, in words."""
    if link.emulated:
        yield f"The link's figures are emulated, not measured on a device: {link.name}."
    rates = {"H2D": link.h2d_with_d2h_bytes_per_s, "D2H": link.d2h_with_h2d_bytes_per_s}
    unknown = [direction for direction, rate in rates.items() if rate is None]
    if unknown:
        yield f"What the other direction takes from {' and '.join(unknown)} is not stated for {link.name}: nothing."


def needed_figure(hardware: HardwareProfile, name: str, figure: SourcedValue | None) -> float:
    """A figure of a profile.

    Raises:
        InputError: It is not stated.
    """
    if figure is None:
        raise InputError(
            f"hardware {hardware.name}: {name} is needed and not stated; give a profile that states it, or fill "
            "it in from a card's with offload-eval link --out FILE --hardware NAME"
        )
    return float(figure.value)


def _stated(figure: SourcedValue | None, otherwise: float) -> float:
    return otherwise if figure is None else float(figure.value)


def _link(hardware: HardwareProfile) -> LinkProfile:
    if hardware.link is None:
        raise InputError(f"hardware {hardware.name}: has no link; state it to bound a strategy that copies")
    return hardware.link
