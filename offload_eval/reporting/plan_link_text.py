"""The link's least times of a plan, and the profile that they are of."""

from collections.abc import Iterator
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from offload_eval.core.plan import Plan, PlanHardware

_COLUMNS: Final = {
    "H2D (ms),\nits batch": "link_h2d_s",
    "D2H (ms),\nits batch": "link_d2h_s",
    "TPOT from (ms),\nits batch": "link_bound_tpot_s",
    "TPOT from (ms),\nat the limit": "link_bound_tpot_at_limit_s",
}


def hardware_words(hardware: PlanHardware) -> str:
    """A profile's name, how its figures are known, and since when."""
    words = [hardware.name, "calibrated" if hardware.calibrated else "from documents"]
    if hardware.emulated:
        words.append("emulated")
    if hardware.date is not None:
        words.append(hardware.date)
    return ", ".join(words)


def render_link_times(plan: Plan) -> Iterator[RenderableType]:
    """The first workload's strategies that copy; nothing without a profile."""
    if plan.hardware is None:
        return
    timed = [
        cell for cell in plan.cells if cell.workload == plan.cells[0].workload and cell.link_bound_tpot_s is not None
    ]
    if not timed:
        return
    yield Text(
        f"The least time of that on {plan.hardware.link} of {hardware_words(plan.hardware)}: lower bounds on "
        "the last step's TPOT, not predictions."
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("strategy", overflow="fold")
    for title in _COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for cell in timed:
        table.add_row(cell.strategy, *(_show_ms(getattr(cell, name)) for name in _COLUMNS.values()))
    yield table


def _show_ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.3f}"
