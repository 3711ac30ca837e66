"""A run's experiment and records with all that follows from them, each thing computed once and only when asked for."""

from collections.abc import Sequence
from functools import cached_property

from offload_eval.analysis.bounded_price import bound_prices, traced_alone
from offload_eval.analysis.cells import cell_records, latest_traces
from offload_eval.analysis.findings import find
from offload_eval.analysis.grid import Cell, experiment_cells, in_order, recorded
from offload_eval.analysis.limits import find_limits, missing_limits
from offload_eval.analysis.policy import policy_of
from offload_eval.analysis.verdict import conclude
from offload_eval.core.experiment import Experiment
from offload_eval.core.hardware import HardwareProfile
from offload_eval.core.judgement import Finding
from offload_eval.core.limits import CapacityLimit
from offload_eval.core.policy import AdmissionPolicy
from offload_eval.core.price import BoundedPrice
from offload_eval.core.records import RunRecord
from offload_eval.core.verdict import Verdict


class Study:
    """What a report, a terminal and a notebook show of a run.

    Attributes:
        experiment: What was asked; it names the cells, also those without a record.
        records: What was kept, in the order it came; a later record takes the place of an earlier one of the same
            cell.
        hardware: What the machine was calibrated to; None: transfers are held against an emulated link's pace alone.
    """

    def __init__(
        self, experiment: Experiment, records: Sequence[RunRecord], hardware: HardwareProfile | None = None
    ) -> None:
        self.experiment = experiment
        self.records = records
        self.hardware = hardware

    @cached_property
    def ordered(self) -> list[RunRecord]:
        """The records in the experiment's order."""
        return in_order(self.experiment, self.records)

    @cached_property
    def of_cells(self) -> list[RunRecord]:
        """Records of the experiment's cells and their traces, in its order: no probes, no drills."""
        return cell_records(self.ordered)

    @cached_property
    def grid(self) -> tuple[Cell, ...]:
        """Every cell, with its run where it has one."""
        return experiment_cells(self.experiment, self.of_cells)

    @cached_property
    def runs(self) -> list[RunRecord]:
        """The last run of every cell that has one."""
        return recorded(self.grid)

    @cached_property
    def traces_alone(self) -> tuple[RunRecord, ...]:
        """The cells' traces where no cell was run; empty where one was."""
        return () if self.runs else latest_traces(self.of_cells)

    @cached_property
    def has_runs(self) -> bool:
        """Whether anything was run: a study may be of traces alone."""
        return any(record.evidence != "traced" for record in self.records)

    @cached_property
    def limits(self) -> tuple[CapacityLimit, ...]:
        """What the capacity search concluded; empty where there was none."""
        return find_limits(self.experiment, self.records)

    @cached_property
    def num_missing_limits(self) -> int:
        """How many limits the search has not come to yet."""
        return missing_limits(self.experiment, self.limits)

    @cached_property
    def prices(self) -> tuple[BoundedPrice, ...]:
        """Bounds of what was traced and not run; empty without a hardware profile that states enough."""
        return bound_prices(traced_alone(self.records, self.limits), self.hardware)

    @cached_property
    def policy(self) -> AdmissionPolicy | None:
        """The policy of the search so far; None where nothing could be searched."""
        return policy_of(self.experiment, self.limits, self.records)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What speaks against these numbers, errors first."""
        return find(self.ordered, self.hardware)

    @cached_property
    def verdict(self) -> Verdict:
        """What it all comes to."""
        return conclude(self.experiment, self.records, self.limits)
