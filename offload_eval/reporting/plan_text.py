"""A plan for the terminal: the answer first, then what it is made of, then what it assumes."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from offload_eval.core.plan import (
    Admission,
    DeviceLedger,
    LayerRow,
    LimitedBy,
    LongestSession,
    LongRequest,
    Plan,
    PlanCell,
    PopulationCell,
)
from offload_eval.units import format_bytes


def render_plan(plan: Plan) -> Iterator[RenderableType]:
    """The parts of a plan from top to bottom; each fits 100 columns."""
    yield Text(f"{plan.model} ({plan.model_type}, {plan.dtype}): {_answer(plan)}", style="bold")
    yield Text(plan.statement)
    yield _strategies(plan)
    yield from _notes(plan)
    if plan.longest_sessions:
        yield Text("The longest session that fits alone, without generation:")
        yield _longest(plan.longest_sessions)
    if plan.device is not None:
        yield Text(_device_line(plan.device))
    yield Text(_host_line(plan))
    stored = plan.dtype if plan.kv_cache_dtype == "auto" else plan.kv_cache_dtype
    yield Text(f"KV cache of one session of {plan.cached_tokens:,} cached tokens, {stored}:")
    yield _layers(plan)
    if plan.population:
        yield Text("The population:")
        yield _population(plan.population)
    yield Text("Assumptions", style="bold")
    for assumption in plan.assumptions:
        yield Text(f"- {assumption}")


def _answer(plan: Plan) -> str:
    first, tokens = plan.cells[0], f"{plan.cached_tokens:,} cached tokens"
    if plan.device is not None and plan.device.kv_bytes == 0:
        return "no session fits: weights, runtime and reserve take the whole budget"
    if plan.admission is None:
        ideal = format_bytes(plan.kv_cache_bytes.ideal)
        return f"{ideal} of KV cache for a session of {tokens}"
    sessions = "any number of" if plan.admission.limit is None else f"{plan.admission.limit:,}"
    return f"at most {sessions} sessions of {tokens} with {first.strategy}{_reason(plan.admission)}"


def _reason(admission: Admission) -> str:
    words = {
        "host": ", by the host ledger",
        "context": ": they are longer than the model's context",
        "max_request_tokens": ": they are longer than the cap on requests",
    }
    return words.get(admission.limited_by or "", "")


_COLUMNS: Final = (
    "device KV\na session",
    "host KV\na session",
    "H2D\na step",
    "D2H\na step",
    "sessions\nat most",
    "decided\nby",
    "against\ndynamic",
)


def _strategies(plan: Plan) -> Table:
    """One row a strategy, under a row that names its workload."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("strategy", overflow="fold", min_width=16)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for workload, cells in groupby(plan.cells, key=lambda cell: cell.workload):
        listed = list(cells)
        table.add_row(Text(workload, style="bold"))
        in_gpu = next((cell.admission for cell in listed if cell.kind == "dynamic"), None)
        for cell in listed:
            numbers = ["-"] * len(_COLUMNS) if cell.refusal else [*_numbers(cell), _gain(cell, in_gpu)]
            table.add_row(cell.strategy, *numbers)
    return table


def _numbers(cell: PlanCell) -> list[str]:
    sizes = (
        cell.kv_device_peak_bytes_per_session,
        cell.kv_host_bytes_per_session or None,
        cell.h2d_bytes_per_step or None,
        cell.d2h_bytes_per_step or None,
    )
    return [*map(format_bytes, sizes), *_session_numbers(cell.admission)]


def _gain(cell: PlanCell, in_gpu: Admission | None) -> str:
    """Sessions over those of transformers' in-GPU cache."""
    if cell.admission is None or in_gpu is None or not cell.admission.limit or not in_gpu.limit:
        return "-"
    return f"{cell.admission.limit / in_gpu.limit:.2f}x"


def _session_numbers(admission: Admission | None) -> list[str]:
    if admission is None:
        return ["-", "-"]
    at_most = "no limit" if admission.limit is None else f"{admission.limit:,}"
    return [at_most, _DECIDERS.get(admission.limited_by or "", "-")]


_DECIDERS: Final = {"device": "device", "host": "host", "context": "context", "max_request_tokens": "cap"}


def _notes(plan: Plan) -> Iterator[Text]:
    refused = {cell.strategy: cell.refusal for cell in plan.cells if cell.refusal}
    for strategy, refusal in refused.items():
        yield Text(f"{strategy}: {refusal}")
    for cell in plan.cells:
        if cell.workload == plan.cells[0].workload and cell.h2d_bytes_per_step:
            yield from _link_line(cell)
    for request in plan.long_requests:
        yield Text(_long_request_line(request), style="bold")
    too_large = [cell for cell in plan.cells if cell.batch_fits is False and cell.batch_size > 1]
    for cell in too_large:
        yield Text(f"{cell.workload} / {cell.strategy}: a batch of {cell.batch_size:,} does not fit")


def _link_line(cell: PlanCell) -> Iterator[Text]:
    """What the gain costs: the link's bytes where the limit is reached."""
    if cell.admission is None or not cell.admission.limit:
        return
    sessions = cell.admission.limit
    to_device, back = (
        format_bytes((moved or 0) * sessions // cell.batch_size)
        for moved in (cell.h2d_bytes_per_step, cell.d2h_bytes_per_step)
    )
    yield Text(
        f"{cell.strategy} at {sessions:,} sessions: {to_device} to the device and {back} back for each decode step."
    )


def _longest(sessions: Sequence[LongestSession]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column("strategy")
    table.add_column("tokens", justify="right")
    table.add_column("stopped by")
    for longest in sessions:
        table.add_row(longest.strategy, f"{longest.tokens:,} tokens", _STOPS[longest.limited_by])
    return table


_STOPS: Final[dict[LimitedBy, str]] = {
    "device": "the device ledger",
    "host": "the host ledger",
    "context": "the model's context",
    "max_request_tokens": "the cap on requests",
}


def _long_request_line(request: LongRequest) -> str:
    over = "the model's context" if request.limited_by == "context" else "the cap on requests"
    line = f"{request.name}: {request.request_tokens:,} tokens pass {over} of {request.limit_tokens:,}"
    if request.outcome == "refused":
        return f"{line}: refused; nothing is truncated"
    if request.outcome == "queued":
        return f"{line}: queued apart, outside the admission limit; nothing is truncated"
    if request.fitting_prompt_tokens is None:
        return f"{line}: refused, and no prompt is short enough for so much generation"
    return f"{line}: refused; a prompt of {request.fitting_prompt_tokens:,} tokens would fit"


def _device_line(ledger: DeviceLedger) -> str:
    parts = [
        ("weights", ledger.weights_bytes),
        ("activations", ledger.activations_bytes),
        ("runtime", ledger.runtime_bytes),
        ("reserve", ledger.reserve_bytes),
    ]
    taken = "".join(f" - {format_bytes(size)} {name}" for name, size in parts if size)
    return f"Device ledger: {format_bytes(ledger.budget_bytes)}{taken} = {format_bytes(ledger.kv_bytes)} for KV cache."


def _host_line(plan: Plan) -> str:
    if plan.host.kv_bytes is None:
        return "Host ledger: no capacity is stated (--host-gib), so that it limits nothing."
    stated = [
        f"{format_bytes(size)} {name}"
        for name, size in (("RAM", plan.host.memory_bytes), ("limit of the control group", plan.host.limit_bytes))
        if size is not None
    ]
    least = f"the smaller of {' and '.join(stated)}" if len(stated) > 1 else stated[0]
    reserve = f", less {format_bytes(plan.host.reserve_bytes)} reserve" if plan.host.reserve_bytes else ""
    return f"Host ledger: {least}{reserve}: {format_bytes(plan.host.kv_bytes)} for pinned KV; swap is no capacity."


def _layers(plan: Plan) -> Table:
    version = plan.kv_cache_bytes.transformers_version
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("layers", overflow="fold")
    table.add_column("ideal", justify="right", no_wrap=True)
    table.add_column(f"transformers {version}", justify="right", no_wrap=True)
    for row in plan.layers:
        table.add_row(_layer_words(row), format_bytes(row.ideal_bytes), format_bytes(row.transformers_bytes))
    sizes = plan.kv_cache_bytes
    table.add_section()
    table.add_row("all", format_bytes(sizes.ideal), format_bytes(sizes.transformers))
    if sizes.transformers_static != sizes.transformers and sizes.transformers_static is not None:
        table.add_row("all, in a StaticCache", "-", format_bytes(sizes.transformers_static))
    return table


def _layer_words(row: LayerRow) -> str:
    words = f"{row.layers} {row.cache.replace('_', ' ')}"
    if row.window_tokens is not None:
        words += f" ({row.window_tokens:,} tokens)"
    if not row.kv_heads:
        return words
    heads = "head" if row.kv_heads == 1 else "heads"
    return f"{words}, {row.kv_heads} kv {heads}, {row.key_head_dim} + {row.value_head_dim} values"


def _population(cells: Sequence[PopulationCell]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy", overflow="fold", min_width=16)
    table.add_column("at")
    for name in ("sessions", "device KV", "pinned host", "padding", "prefix saved", "fits", "mixes\nat most"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        if cell.refusal:
            table.add_row(cell.strategy, cell.refusal)
        for each in cell.sums:
            table.add_row(
                cell.strategy,
                each.at,
                f"{each.sessions:,}",
                format_bytes(each.device_bytes),
                format_bytes(each.pinned_bytes or None),
                format_bytes(each.padding_bytes or None),
                format_bytes(each.shared_prefix_saved_bytes or None),
                {True: "yes", False: "no", None: "-"}[each.fits],
                "-" if each.mixes is None else f"{each.mixes:,}",
            )
    return table
