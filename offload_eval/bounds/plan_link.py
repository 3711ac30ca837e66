"""The least time that a plan's last decode steps keep the link busy: a lower bound on their TPOT."""

from collections.abc import Iterator

import numpy as np

from offload_eval.bounds.grid import Mask, PlanStrategy, StrategyGrid
from offload_eval.bounds.kv_views import Counts
from offload_eval.bounds.ledgers import UNLIMITED
from offload_eval.bounds.link_time import COPYING, link_assumptions, link_times
from offload_eval.bounds.plan_request import PlanRequest
from offload_eval.core.experiment import StreamedSpec, is_auto
from offload_eval.core.hardware import HardwareProfile
from offload_eval.core.plan import PagingSpec, PlanHardware

Column = list[float | None]


def link_columns(
    request: PlanRequest, strategy: PlanStrategy, grid: StrategyGrid, batch_sizes: Counts, admitted: Mask
) -> dict[str, Column]:
    """The link's times of every cell of a grid, by field of `PlanCell`.

    Args:
        request: Its profile is read.
        strategy: The grid's.
        grid: What moves.
        batch_sizes: Sessions of one replica.
        admitted: Where the request is not too long.

    Returns:
        Nothing without a profile, and where the strategy does not copy, or the arithmetic has only the most that it
        may copy. None in cells without a decode step, and at a limit that is not known or no session.
    """
    if request.hardware is None or not grid.card.host_buffers or not has_least_bytes(strategy):
        return {}
    moves = np.broadcast_to(grid.card.h2d_bytes + grid.card.d2h_bytes > 0, admitted.shape)
    columns = _columns(request.hardware, grid, "", batch_sizes, moves)
    if grid.limit is None:
        return columns
    is_counted = moves & admitted & (grid.limit > 0) & (grid.limit != UNLIMITED)
    sessions = np.where(is_counted, grid.limit // request.spec.partition.data_parallel, 0)
    return columns | _columns(request.hardware, grid, "_at_limit", sessions, is_counted)


def has_least_bytes(strategy: PlanStrategy) -> bool:
    """Whether a step moves no less than its card says: not where the batch decides which layers are resident."""
    return not isinstance(strategy, StreamedSpec) or not (is_auto(strategy) or strategy.resident_bytes is not None)


def _columns(
    hardware: HardwareProfile, grid: StrategyGrid, where: str, sessions: Counts, is_known: Mask
) -> dict[str, Column]:
    """Of the rank whose link is slowest: each has one of its own."""
    batches = sessions.astype(np.float64)
    ranks = [link_times(batches * card.h2d_bytes, batches * card.d2h_bytes, hardware) for card in grid.card.stages]
    slowest = {
        "h2d": np.maximum.reduce([rank.h2d_s for rank in ranks]),
        "d2h": np.maximum.reduce([rank.d2h_s for rank in ranks]),
        "bound_tpot": np.maximum.reduce([rank.both_s for rank in ranks]),
    }
    known = is_known.tolist()
    return {
        f"link_{name}{where}_s": [time_s if each else None for time_s, each in zip(times.tolist(), known, strict=True)]
        for name, times in slowest.items()
    }


def plan_hardware(hardware: HardwareProfile | None) -> PlanHardware | None:
    """What a plan says of its profile."""
    if hardware is None:
        return None
    link = hardware.link
    if link is None:
        return PlanHardware(name=hardware.name, calibrated=hardware.calibrated)
    figures = (
        link.h2d_bytes_per_s,
        link.d2h_bytes_per_s,
        link.h2d_with_d2h_bytes_per_s,
        link.d2h_with_h2d_bytes_per_s,
    )
    return PlanHardware(
        name=hardware.name,
        calibrated=hardware.calibrated,
        link=link.name,
        emulated=link.emulated,
        date=min((figure.date for figure in figures if figure is not None), default=None),
    )


def hardware_assumptions(request: PlanRequest) -> Iterator[str]:
    """What a profile's figures in a plan assume, in words."""
    hardware = request.hardware
    if hardware is None:
        return
    if request.budget is not None and request.budget_is_hardwares:
        yield (
            f"No device budget is stated: it is the memory of {hardware.name} as sold; a driver lets through some "
            "percent less."
        )
    copying = [each for each in request.strategies if not isinstance(each, PagingSpec) and each.kind in COPYING]
    if copying and hardware.link is not None:
        yield (
            f"link_bound_tpot_s: bytes of the last decode step over {hardware.link.name}, both directions at once, in "
            "a steady state: each step fetches as much ahead as was fetched for it. A lower bound on its TPOT, not a "
            "prediction: no latency of a copy, no computing, and a link of its own for each rank."
        )
        yield from link_assumptions(hardware.link)
    for strategy in copying:
        if not has_least_bytes(strategy):
            yield f"{strategy.label}: the batch decides which layers are resident, so that its link has no least time."
