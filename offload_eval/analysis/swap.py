"""Swap around a cell: where there was any, its times are the disk's, and are marked wherever they are shown."""

from typing import NamedTuple

from offload_eval.core.records import RunRecord


class SwapUse(NamedTuple):
    """What of a cell's memory may have been on disk."""

    in_bytes: int
    """Read back from swap by the whole machine during the timing passes."""
    out_bytes: int
    cgroup_bytes: int
    """Most of the control group in swap during the memory passes, whenever it went there and whoever's it is."""


def swap_use(record: RunRecord) -> SwapUse:
    """What was seen; what was not looked at counts as none."""
    trials = record.trials
    return SwapUse(
        in_bytes=sum(trial.swap_in_bytes or 0 for trial in trials),
        out_bytes=sum(trial.swap_out_bytes or 0 for trial in trials),
        cgroup_bytes=max((trial.cgroup_swap_bytes or 0 for trial in trials), default=0),
    )


def is_swapped(record: RunRecord) -> bool | None:
    """Whether the cell's times carry the mark; None where no trial could see swap."""
    if any(swap_use(record)):
        return True
    seen = ((trial.swap_in_bytes, trial.swap_out_bytes, trial.cgroup_swap_bytes) for trial in record.trials)
    return False if any(size is not None for sizes in seen for size in sizes) else None
