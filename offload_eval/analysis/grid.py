"""The cells of an experiment in its own order, each with what was recorded of it."""

from collections.abc import Sequence
from typing import NamedTuple

from offload_eval.analysis.cells import latest_records
from offload_eval.core.experiment import Experiment
from offload_eval.core.factors import expand_workloads
from offload_eval.core.records import RunRecord


class Cell(NamedTuple):
    """One workload under one strategy."""

    workload: str
    strategy: str
    record: RunRecord | None
    """None: not run yet."""


def experiment_cells(experiment: Experiment, records: Sequence[RunRecord]) -> tuple[Cell, ...]:
    """Lists every cell that was asked for, and after them those that only records know.

    Where records of one cell differ in more than a retry, each has its own row.
    """
    found: dict[tuple[str, str], list[RunRecord]] = {}
    for record in latest_records(records):
        found.setdefault((record.spec.workload.label, record.spec.strategy.label), []).append(record)
    asked = _asked(experiment)
    return tuple(
        Cell(workload, strategy, record)
        for workload, strategy in dict.fromkeys([*asked, *found])
        for record in found.get((workload, strategy), [None])
    )


def in_order(experiment: Experiment, records: Sequence[RunRecord]) -> list[RunRecord]:
    """All records, of runs and of traces, in the experiment's order; those of other cells come last."""
    asked = _asked(experiment)
    places = {cell: place for place, cell in enumerate(asked)}
    cells = [(record.spec.workload.label, record.spec.strategy.label) for record in records]
    order = sorted(range(len(records)), key=lambda index: places.get(cells[index], len(places)))
    return [records[index] for index in order]


def _asked(experiment: Experiment) -> list[tuple[str, str]]:
    workloads = expand_workloads(experiment)
    return [(load.label, strategy.label) for load in workloads for strategy in experiment.strategies]


def recorded(cells: Sequence[Cell]) -> list[RunRecord]:
    """The records of cells, in their order."""
    return [cell.record for cell in cells if cell.record is not None]


def largest_workload(records: Sequence[RunRecord]) -> str | None:
    """Label of the workload with most tokens, prompts and outputs of the whole batch; the first of equal ones."""
    loads = {record.spec.workload.label: record.spec.workload for record in records}
    return max(
        loads,
        key=lambda label: loads[label].batch_size * (loads[label].prompt_tokens + loads[label].output_tokens),
        default=None,
    )
