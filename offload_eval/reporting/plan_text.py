"""A plan for the terminal: the answer first, then what it is made of, then what it assumes. Fits 80 columns."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from offload_eval.core.plan import Admission, LayerRow, LimitedBy, LongestSession, LongRequest, Plan, PlanCell
from offload_eval.reporting.plan_ledger_text import device_line, host_line, shortage_bytes
from offload_eval.reporting.plan_link_text import render_link_times
from offload_eval.reporting.plan_population_text import render_population
from offload_eval.units import format_bytes

_STOPS: Final[dict[LimitedBy, str]] = {
    "device": "the device ledger",
    "host": "the host ledger",
    "context": "the model's context",
    "max_request_tokens": "the cap on requests",
}


def render_plan(plan: Plan) -> Iterator[RenderableType]:
    """The parts of a plan from top to bottom."""
    yield Text(f"{plan.model} ({plan.model_type}, {plan.dtype}): {_answer(plan)}", style="bold")
    yield Text(plan.statement)
    yield _admissions(plan.cells)
    yield from _notes(plan)
    if plan.population:
        yield from render_population(plan)
    yield from _link(plan.cells)
    yield from render_link_times(plan)
    if plan.longest_sessions:
        yield Text("The longest session that fits alone, without generation:")
        yield _longest(plan.longest_sessions)
    if plan.device is not None:
        yield Text(device_line(plan.device))
    yield Text(host_line(plan.host))
    yield from _concurrency(plan)
    yield from _footprint(plan)
    yield Text("Assumptions", style="bold")
    for assumption in plan.assumptions:
        yield Text(f"- {assumption}")


def _answer(plan: Plan) -> str:
    if plan.device is not None and plan.device.kv_bytes == 0:
        return f"no session fits: a rank is {format_bytes(shortage_bytes(plan.device))} short before any KV cache"
    if plan.population and plan.population[0].sums and plan.population[0].sums[0].mixes is not None:
        first = plan.population[0]
        caps = first.sums[0]
        times = "once" if caps.mixes == 1 else f"{caps.mixes:,} times"
        return f"the population of {caps.sessions:,} sessions fits at most {times} with {first.strategy}"
    tokens = f"{plan.cached_tokens:,} cached tokens"
    if plan.admission is None:
        return f"{format_bytes(plan.kv_cache_bytes.ideal)} of KV cache for a session of {tokens}"
    if plan.admission.limited_by in ("context", "max_request_tokens"):
        return f"no session of {tokens} is admitted: longer than {_STOPS[plan.admission.limited_by]}"
    sessions = "any number of" if plan.admission.limit is None else f"{plan.admission.limit:,}"
    word = "session" if plan.admission.limit == 1 else "sessions"
    by_host = ", by the host ledger" if plan.admission.limited_by == "host" else ""
    return f"at most {sessions} {word} of {tokens} with {plan.strategy}{by_host}"


_COLUMNS: Final = (
    "device KV\na session",
    "host KV\na session",
    "sessions\nat most",
    "decided\nby",
    "against\ndynamic",
)


def _admissions(cells: Sequence[PlanCell]) -> Table:
    """One row a strategy, under a row that names its workload."""
    table = _table("strategy")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for workload, group in groupby(cells, key=lambda cell: cell.workload):
        listed = list(group)
        table.add_row(Text(workload, style="bold"))
        in_gpu = next((cell.admission for cell in listed if cell.kind == "dynamic"), None)
        for cell in listed:
            table.add_row(cell.strategy, *(["-"] * len(_COLUMNS) if cell.refusal else _numbers(cell, in_gpu)))
    return table


def _table(first: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(first, overflow="fold")
    return table


def _numbers(cell: PlanCell, in_gpu: Admission | None) -> list[str]:
    sizes = (cell.kv_device_peak_bytes_per_session, cell.kv_host_bytes_per_session or None)
    return [*map(format_bytes, sizes), *_admitted(cell.admission), _gain(cell.admission, in_gpu)]


def _admitted(admission: Admission | None) -> list[str]:
    if admission is None:
        return ["-", "-"]
    at_most = "no limit" if admission.limit is None else f"{admission.limit:,}"
    return [at_most, "cap" if admission.limited_by == "max_request_tokens" else admission.limited_by or "-"]


def _gain(admission: Admission | None, in_gpu: Admission | None) -> str:
    """Sessions over those of transformers' in-GPU cache."""
    if admission is None or in_gpu is None or not admission.limit or not in_gpu.limit:
        return "-"
    return f"{admission.limit / in_gpu.limit:.2f}x"


def _notes(plan: Plan) -> Iterator[Text]:
    refused = {cell.strategy: cell.refusal for cell in plan.cells if cell.refusal}
    for strategy, refusal in refused.items():
        yield Text(f"{strategy}: {refusal}")
    for request in plan.long_requests:
        yield Text(_long_request_line(request), style="bold")
    for cell in plan.cells:
        too_long = cell.admission is not None and cell.admission.limited_by in ("context", "max_request_tokens")
        if cell.batch_fits is False and cell.batch_size > 1 and not too_long:
            yield Text(f"{cell.workload} / {cell.strategy}: a batch of {cell.batch_size:,} does not fit")


def _long_request_line(request: LongRequest) -> str:
    line = f"{request.name}: {request.request_tokens:,} tokens pass {_STOPS[request.limited_by]} of "
    line += f"{request.limit_tokens:,}"
    if request.outcome == "refused":
        return f"{line}: refused; nothing is truncated"
    if request.outcome == "queued":
        return f"{line}: queued apart, outside the admission limit; nothing is truncated"
    if request.fitting_prompt_tokens is None:
        return f"{line}: refused, and no prompt is short enough for so much generation"
    return f"{line}: refused; a prompt of {request.fitting_prompt_tokens:,} tokens would fit"


def _link(cells: Sequence[PlanCell]) -> Iterator[RenderableType]:
    """What the first workload's strategies move, for its batch and where their limit is reached."""
    moving = [cell for cell in cells if cell.workload == cells[0].workload and cell.h2d_bytes_per_step]
    if not moving:
        return
    yield Text(f"What one decode step of {cells[0].workload} moves over the link, to the device and back:")
    table = _table("strategy")
    for name in ("to device,\nits batch", "back,\nits batch", "to device,\nat the limit", "back,\nat the limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in moving:
        limit = cell.admission.limit if cell.admission else None
        moved = (cell.h2d_bytes_per_step or 0, cell.d2h_bytes_per_step or 0)
        at_limit = [format_bytes(size * limit / cell.batch_size if limit else None) for size in moved]
        table.add_row(cell.strategy, *map(format_bytes, moved), *at_limit)
    yield table


def _longest(sessions: Sequence[LongestSession]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column("strategy", overflow="fold")
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("stopped by")
    for longest in sessions:
        table.add_row(longest.strategy, f"{longest.tokens:,} tokens", _stop(longest))
    return table


def _stop(longest: LongestSession) -> str:
    return "none longer was tried" if longest.limited_by is None else _STOPS[longest.limited_by]


def _concurrency(plan: Plan) -> Iterator[Text]:
    """The paged engine's limit as vLLM logs it, fraction and all."""
    for cell in plan.cells:
        size = cell.kv_device_peak_bytes_per_session
        if cell.kind == "paged" and cell.workload == plan.cells[0].workload and plan.device is not None and size:
            concurrency = max(0, plan.device.kv_bytes - (cell.kv_device_bytes_fixed or 0)) / size
            yield Text(f"{cell.strategy}: concurrency {concurrency:.2f}x at {cell.cached_tokens:,} tokens a request.")


def _footprint(plan: Plan) -> Iterator[RenderableType]:
    sizes = plan.kv_cache_bytes
    is_plain = plan.kv_cache_dtype in ("auto", "bfloat16", "float16", "float32")
    stored = plan.dtype if plan.kv_cache_dtype == "auto" else plan.kv_cache_dtype
    yield Text(
        f"KV cache of one session of {plan.cached_tokens:,} cached tokens, {stored}, unsharded. ideal: what a paged "
        "engine must hold; transformers: what its cache holds at rest."
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("layers", overflow="fold")
    cache = "DynamicCache" if is_plain else "QuantizedCache"
    for name in ("ideal", f"transformers {sizes.transformers_version}\n{cache}"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan.layers:
        table.add_row(_layer_words(row), format_bytes(row.ideal_bytes), format_bytes(row.transformers_bytes))
    table.add_section()
    table.add_row("all", format_bytes(sizes.ideal), format_bytes(sizes.transformers))
    if sizes.transformers_static not in (None, sizes.transformers):
        table.add_row("all, in a StaticCache of this length", "-", format_bytes(sizes.transformers_static))
    yield table


def _layer_words(row: LayerRow) -> str:
    words = f"{row.layers} {row.cache.replace('_', ' ')}"
    if row.window_tokens is not None:
        words += f" ({row.window_tokens:,} tokens)"
    if not row.kv_heads:
        return words
    heads = "head" if row.kv_heads == 1 else "heads"
    return f"{words}, {row.kv_heads} kv {heads}, {row.key_head_dim} + {row.value_head_dim} values"
