"""A plan's population for the terminal."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from offload_eval.core.plan import Plan, PopulationCell, PopulationSum
from offload_eval.reporting.plan_ledger_text import device_line
from offload_eval.units import format_bytes


def render_population(plan: Plan) -> Iterator[RenderableType]:
    """Its sums under each strategy, and what has to be known of them."""
    left_out = plan.population[0].left_out
    without = f", without {', '.join(left_out)}: too long, see above" if left_out else ""
    yield Text(f"The population{without}:", style="bold")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("strategy", overflow="fold")
    table.add_column("at")
    for name in ("sessions", "device KV", "pinned host", "fits", "mixes\nat most"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in plan.population:
        for each in cell.sums:
            table.add_row(cell.strategy, *_numbers(each))
    yield table
    if plan.population_device is not None and plan.population_device != plan.device:
        yield Text(device_line(plan.population_device))
    for cell in plan.population:
        yield from _remarks(cell)


def _numbers(each: PopulationSum) -> list[str]:
    return [
        each.at,
        f"{each.sessions:,}",
        format_bytes(each.device_bytes),
        format_bytes(each.pinned_bytes or None),
        {True: "yes", False: "no", None: "-"}[each.fits],
        "-" if each.mixes is None else f"{each.mixes:,}",
    ]


def _remarks(cell: PopulationCell) -> Iterator[Text]:
    if cell.refusal:
        yield Text(f"{cell.strategy}: {cell.refusal}")
        return
    caps = cell.sums[0]
    if caps.padding_device_bytes or caps.padding_host_bytes:
        sizes = ((caps.padding_device_bytes, "the device"), (caps.padding_host_bytes, "the host"))
        padding = " and ".join(f"{format_bytes(size)} on {where}" for size, where in sizes if size)
        yield Text(
            f"{cell.strategy}: {padding} are padding at the caps; batching: group makes a batch for each group."
        )
    if caps.shared_prefix_saved_bytes:
        yield Text(
            f"{cell.strategy}: shared prefixes save {format_bytes(caps.shared_prefix_saved_bytes)} at the caps."
        )
