"""Which cells of two runs are the same question, and what else the runs do not share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from offload_eval.analysis.cells import cell_records, latest_records
from offload_eval.core.base import Strict
from offload_eval.core.comparison import Condition
from offload_eval.core.experiment import Experiment, StreamedSpec, is_auto
from offload_eval.core.records import RunRecord

HOST_MEMORY_RATIO: Final = 0.02
"""Host memory this close together is the same machine's: a kernel keeps some of it, and not always as much."""
_HOST_MEMORY: Final = "host memory (bytes)"
_PROMPTS: Final = "prompts of "
_HARDWARE: Final = ("cpu", "cpu_cores")
_ACCELERATOR_HARDWARE: Final = ("name", "memory_bytes", "pcie_generation", "pcie_width")
_STRUCTURE: Final = ("model_type", "layer_groups", "vocab_size", "hidden_size")
CellKey = tuple[str, str, str]


class RunSide(Strict, frozen=True, kw_only=True):
    """One run directory, as a comparison reads it."""

    name: str
    """The directory's name."""
    experiment: Experiment
    records: tuple[RunRecord, ...]
    tokens: Mapping[str, tuple[tuple[int, ...], ...]] = {}
    """The baseline strategy's greedy tokens of each session, by run_id, where the run still has them."""


def cells_of(side: RunSide) -> dict[CellKey, RunRecord]:
    """The last record of every cell that ran, by what makes it comparable."""
    auto = {strategy.label for strategy in side.experiment.strategies if is_auto(strategy)}
    return {cell_key(record, auto): record for record in latest_records(cell_records(side.records))}


def cell_key(record: RunRecord, auto: Iterable[str] = ()) -> CellKey:
    """Names what a cell asks: labels, lengths, batch, chunk, attention and all options of the strategy.

    Prompts, seeds, the model and the budget are not in it: what differs there is listed, not left without a pair. Nor
    is a resident share that was found for `auto`, which may come out differently.

    Args:
        record: Of a run.
        auto: Labels of strategies whose resident share is found.
    """
    load, strategy = record.spec.workload, record.spec.strategy
    if isinstance(strategy, StreamedSpec) and strategy.label in auto:
        strategy = msgspec.structs.replace(strategy, resident_share="auto", name=strategy.label)
    work = (load.batch_size, load.prompt_tokens, load.output_tokens, load.prefill_chunk_tokens)
    asked = msgspec.json.encode((work, record.spec.attn_implementation, strategy)).decode()
    return load.label, record.spec.strategy.label, asked


def mismatches(baseline: RunSide, candidate: RunSide) -> tuple[Condition, ...]:
    """Hardware, rung and structure of the model that differ: with these a comparison has no one cause.

    Machines are taken from the records, so that a run that two machines made differs from either.
    """
    before, after = _gathered(baseline.records, _hard_facts), _gathered(candidate.records, _hard_facts)
    return tuple(
        Condition(name=name, baseline=_shown(before[name]), candidate=_shown(after[name]))
        for name in before
        if name in after and not _is_one(name, (*before[name], *after[name]))
    )


def conditions(baseline: RunSide, candidate: RunSide) -> tuple[Condition, ...]:
    """All else that differs: versions, driver, the model's weights, prompts, budget and measurement plan."""
    before, after = _gathered(baseline.records, _soft_facts), _gathered(candidate.records, _soft_facts)
    return tuple(
        Condition(name=name, baseline=_shown(before.get(name)), candidate=_shown(after.get(name)))
        for name in dict.fromkeys([*before, *after])
        if set(before.get(name, ())) != set(after.get(name, ())) and not _is_of_one_side(name, before, after)
    )


def _is_of_one_side(name: str, before: Mapping[str, object], after: Mapping[str, object]) -> bool:
    """Prompts of a workload that only one side has: its cells are missing or new, and that says it."""
    return name.startswith(_PROMPTS) and (name in before) != (name in after)


def _is_one(name: str, values: Sequence[object]) -> bool:
    """Whether all records of both sides agree; of two sides that are each of two machines nobody knows which met."""
    if name == _HOST_MEMORY:
        sizes = [size for size in values if isinstance(size, int)]
        return max(sizes) - min(sizes) <= HOST_MEMORY_RATIO * max(sizes)
    return len(set(values)) == 1


def _shown(values: Sequence[object] | None) -> str:
    return " and ".join(str(value) for value in values) if values else "none"


def _gathered(
    records: Sequence[RunRecord], facts: Callable[[RunRecord], Mapping[str, object]]
) -> dict[str, tuple[object, ...]]:
    """Every value of every fact over a run's records."""
    seen: dict[str, dict[object, None]] = {}
    for record in records:
        for name, value in facts(record).items():
            seen.setdefault(name, {})[value] = None
    return {name: tuple(values) for name, values in seen.items()}


def _hard_facts(record: RunRecord) -> dict[str, object]:
    machine, spec, shape = record.machine, record.spec, record.model.shape
    facts: dict[str, object] = {"device": spec.device, _HOST_MEMORY: machine.host_memory_bytes}
    facts |= {f"machine.{name}": getattr(machine, name) for name in _HARDWARE}
    if spec.device == "cuda":
        card = machine.accelerator
        facts |= {f"accelerator.{name}": getattr(card, name, None) for name in _ACCELERATOR_HARDWARE}
    else:
        facts |= {f"emulated device: cpu.{name}": getattr(spec.cpu, name) for name in spec.cpu.__struct_fields__}
    if record.evidence != "traced":
        facts["evidence"] = record.evidence
    facts["model.dtype"] = spec.model.dtype
    if shape is not None:
        facts |= {f"model structure: {name}": str(msgspec.to_builtins(getattr(shape, name))) for name in _STRUCTURE}
    return facts


def _soft_facts(record: RunRecord) -> dict[str, object]:
    machine, spec = record.machine, record.spec
    names = [name for name in machine.__struct_fields__ if name not in (*_HARDWARE, "versions", "accelerator")]
    facts: dict[str, object] = {f"machine.{name}": getattr(machine, name) for name in names}
    facts |= {f"versions.{name}": version for name, version in machine.versions.items()}
    if machine.accelerator is not None:
        facts |= {f"accelerator.{name}": getattr(machine.accelerator, name) for name in ("uuid", "driver")}
    facts |= {"experiment": spec.experiment, "model fingerprint": spec.model_fingerprint}
    facts |= {f"model.{name}": getattr(spec.model, name) for name in spec.model.__struct_fields__ if name != "dtype"}
    facts |= {f"budget.{name}": getattr(spec.budget, name) for name in spec.budget.__struct_fields__}
    facts["model weights (bytes)"] = record.model.weights_bytes
    if spec.role == "cell":
        plan = spec.measurement
        facts |= {f"measurement.{name}": getattr(plan, name) for name in plan.__struct_fields__}
        facts |= {
            "baseline strategy": spec.baseline.label,
            f"{_PROMPTS}{spec.workload.label}": spec.prompt_fingerprint,
        }
    return facts
