"""A plan for the terminal: the answer first, then what it is made of, then what it assumes."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from offload_eval.core.plan import Admission, DeviceLedger, LayerRow, LongRequest, Plan, PlanCell, PopulationCell
from offload_eval.units import format_bytes


def render_plan(plan: Plan) -> Iterator[RenderableType]:
    """The parts of a plan from top to bottom; each fits 100 columns."""
    yield Text(f"{plan.model} ({plan.model_type}, {plan.dtype}): {_answer(plan)}", style="bold")
    yield Text(plan.statement)
    yield _strategies(plan)
    yield from _notes(plan)
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


def _strategies(plan: Plan) -> Table:
    """One row a strategy, under a row that names its workload."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy", overflow="fold", min_width=16)
    for name in (
        "device KV\na session",
        "host KV\na session",
        "H2D\na step",
        "D2H\na step",
        "sessions\non device",
        "sessions\non host",
        "sessions\nat most",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for workload, cells in groupby(plan.cells, key=lambda cell: cell.workload):
        listed = list(cells)
        table.add_row(Text(workload, style="bold"))
        for cell in listed:
            table.add_row(cell.strategy, *(["-"] * 7 if cell.refusal else _numbers(cell)))
    return table


def _numbers(cell: PlanCell) -> list[str]:
    sizes = (
        cell.kv_device_peak_bytes_per_session,
        cell.kv_host_bytes_per_session or None,
        cell.h2d_bytes_per_step or None,
        cell.d2h_bytes_per_step or None,
    )
    return [*map(format_bytes, sizes), *_session_numbers(cell.admission)]


def _session_numbers(admission: Admission | None) -> list[str]:
    if admission is None:
        return ["-"] * 3
    on_device = "no limit" if admission.device_sessions is None else f"{admission.device_sessions:,}"
    on_host = "-" if admission.host_sessions is None else f"{admission.host_sessions:,}"
    at_most = "no limit" if admission.limit is None else f"{admission.limit:,}"
    return [on_device, on_host, at_most]


def _notes(plan: Plan) -> Iterator[Text]:
    refused = {cell.strategy: cell.refusal for cell in plan.cells if cell.refusal}
    for strategy, refusal in refused.items():
        yield Text(f"{strategy}: {refusal}")
    for request in plan.long_requests:
        yield Text(_long_request_line(request), style="bold")
    too_large = [cell for cell in plan.cells if cell.batch_fits is False and cell.batch_size > 1]
    for cell in too_large:
        yield Text(f"{cell.workload} / {cell.strategy}: a batch of {cell.batch_size:,} does not fit")


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
