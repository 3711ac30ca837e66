"""An admission policy's answers for the terminal."""

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from offload_eval.core.admission import BatchArithmetic, PolicyAnswer, Prediction, StrategyAnswer
from offload_eval.core.policy import AdmissionPolicy, Difference
from offload_eval.reporting.display import one_line
from offload_eval.units import format_bytes


def render_check(
    policy: AdmissionPolicy, checked: Sequence[Difference], commands: Sequence[str]
) -> Iterator[RenderableType]:
    """Every difference, the limits that it concerns, and what measures them again."""
    concerned = {each.label: each for difference in checked for each in difference.concerns}
    for each in checked:
        whom = ", ".join(strategy.label for strategy in each.concerns) or "no limit of this policy"
        yield Text(one_line(f"{each.field}: {_shown(each.policy)} -> {_shown(each.now)}; concerns {whom}"))
    if not concerned:
        yield Text(one_line(f"{policy.name} holds here: no limit depends on anything that is otherwise."))
        return
    yield Text("To measure again:", style="bold")
    for strategy in concerned.values():
        lengths = ", ".join(strategy.length_classes) or "refused before; may run now"
        yield Text(f"  {strategy.label}: {lengths}")
        if strategy.run_ids:
            yield Text(f"    records: {' '.join(strategy.run_ids)}", style="dim")
    yield Text(one_line(f"With the experiment that the policy is of ({policy.name}), in a new directory:"))
    for command in commands:
        yield Text(f"  {command}")


def render_answer(answer: PolicyAnswer) -> Iterator[RenderableType]:
    """What becomes of every group under each strategy, and the arithmetic behind it."""
    for strategy in answer.strategies:
        evidence = "" if strategy.evidence is None else f" ({strategy.evidence})"
        yield Text(one_line(f"{strategy.strategy}{evidence}"), style="bold")
        yield _groups(strategy)
        if strategy.batch is not None:
            yield from _arithmetic("admitted", strategy.batch)
        if strategy.one_more is not None:
            yield from _arithmetic("not admitted", strategy.one_more)
        for note in strategy.notes:
            yield Text(one_line(f"note: {note}"))
        yield Text("")
    yield Text("Assumptions:", style="bold")
    for assumption in answer.assumptions:
        yield Text(one_line(f"- {assumption}"))


def _groups(strategy: StrategyAnswer) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("group", overflow="fold")
    for name in ("sessions", "admitted", "queued", "refused"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for group in strategy.groups:
        numbers = (group.sessions, group.admitted, group.queued, group.refused)
        table.add_row(Text(one_line(group.name)), *(f"{number:,}" for number in numbers), Text(one_line(group.reason)))
    return table


def _arithmetic(title: str, weighed: BatchArithmetic) -> Iterator[RenderableType]:
    batch = weighed.batch
    chunk = "" if batch.prefill_chunk_tokens is None else f", {batch.prefill_chunk_tokens:,} at once"
    yield Text(
        one_line(f"{title}: {batch.rows:,} rows of {batch.prompt_tokens:,} + {batch.output_tokens:,} tokens{chunk}")
    )
    if weighed.prediction is not None:
        yield from _peaks(weighed, weighed.prediction)
    elif weighed.mask_bytes:
        yield Text(f"  mask of rows with shorter prompts: {format_bytes(weighed.mask_bytes)}, at most")
    if weighed.covering_class is not None:
        yield Text(f"  measured limit at {weighed.covering_class}: {weighed.covering_sessions:,} rows")
    if weighed.host_bytes is not None:
        yield Text(f"  host: {format_bytes(weighed.host_bytes)} of {format_bytes(weighed.host_cap_bytes)}")
    if weighed.reason:
        yield Text(f"  {weighed.stop}: {weighed.reason}")


def _peaks(weighed: BatchArithmetic, prediction: Prediction) -> Iterator[Text]:
    counted = prediction.batch
    if counted != weighed.batch:
        yield Text(f"  counted as {counted.prompt_tokens:,} + {counted.output_tokens:,} tokens, the least measured")
    for peak in prediction.peaks:
        terms = [term for term in peak.terms if term.bytes]
        total = " + ".join(f"{term.name} {format_bytes(term.bytes)}" for term in terms)
        yield Text(f"  {peak.phase}: {format_bytes(peak.bytes)} = {total}")
        for term in terms:
            if term.arithmetic:
                yield Text(f"    {term.name}: {term.arithmetic} = {format_bytes(term.bytes)}", style="dim")
    needed_bytes = weighed.needed_bytes or 0
    mask_bytes = weighed.mask_bytes
    mask = f" + mask {format_bytes(mask_bytes)} (prompts of several lengths, at most)" if mask_bytes else ""
    sign = "<=" if needed_bytes <= weighed.cap_bytes else ">"
    yield Text(
        f"  {format_bytes(prediction.worst.bytes)}{mask} + reserve {format_bytes(weighed.reserve_bytes)} = "
        f"{format_bytes(needed_bytes)} {sign} cap {format_bytes(weighed.cap_bytes)}"
    )


def _shown(value: str | None) -> str:
    return "none" if value is None else value
