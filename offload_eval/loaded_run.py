"""A run directory for notebooks and scripts: `offload_eval.load_run`. pandas is imported by the first frame."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from offload_eval.analysis.cells import cell_records, latest_records, latest_traces
from offload_eval.analysis.limits import find_limits
from offload_eval.analysis.verdict import conclude
from offload_eval.core.hardware import HardwareProfile
from offload_eval.core.limits import CapacityLimit
from offload_eval.core.records import RunRecord
from offload_eval.core.verdict import Verdict
from offload_eval.errors import InputError
from offload_eval.store.run_directory import RunDirectory

if TYPE_CHECKING:
    import pandas as pd

    from offload_eval.core.experiment import Experiment
    from offload_eval.core.machine import Machine

What = Literal["cells", "trials", "limits", "memory", "transfers", "traces"]


class Run:
    """What a run directory holds, as it was when it was loaded. Nothing here changes the directory.

    Attributes:
        path: The directory.
        experiment: What was asked, every default filled in.
        machine: Where it was run; each record has its own, which may differ after `--resume --allow-mismatch`.
        records: The last record of every cell, trace, probe and drill, in the order they first came.
    """

    def __init__(self, path: Path) -> None:
        """Reads a run directory; use `offload_eval.load_run`.

        Raises:
            InputError: Not a run directory, or a line of its records that cannot be read.
        """
        self._directory = RunDirectory.read(path)
        self.path = path
        self.experiment: Experiment = self._directory.experiment
        self.machine: Machine = self._directory.machine
        self.records: list[RunRecord] = self._directory.records()

    @property
    def hardware(self) -> HardwareProfile | None:
        """The hardware profile that the run is held against, where it has one.

        Raises:
            InputError: The experiment names one, and hardware.yaml is missing or no profile.
        """
        return self._directory.hardware

    @property
    def cells(self) -> tuple[RunRecord, ...]:
        """The experiment's cells that ran, of any status; no traces, probes or drills."""
        return latest_records(cell_records(self.records))

    @property
    def traces(self) -> tuple[RunRecord, ...]:
        """The cells' traces: what the real code allocates and copies, on tensors without data."""
        return latest_traces(cell_records(self.records))

    @cached_property
    def limits(self) -> tuple[CapacityLimit, ...]:
        """What the capacity search concluded, by lengths, the in-GPU cache first; empty where there was none."""
        return find_limits(self.experiment, self.records)

    @cached_property
    def verdict(self) -> Verdict:
        """What the report begins with: each strategy at each combination of lengths, choices and break-evens."""
        return conclude(self.experiment, self.records, self.limits)

    def frame(self, what: What = "cells") -> "pd.DataFrame":
        """One tidy table, the same as `offload-eval export --what`.

        Args:
            what: `cells`: a row for each cell that ran, with its spec, its machine and versions, its status, medians,
                peaks and fidelity. `trials`: a row for each raw trial. `limits`: a row for each strategy at each
                combination of lengths. `memory` and `transfers`: a row for each cell and phase. `traces`: a row for
                each traced phase.

        Returns:
            SI seconds, whole bytes and counts, the unit in each name; columns are nullable, and NA is what was not
            seen, never 0.

        Raises:
            InputError: There is no such table; for `transfers`, the hardware profile is missing.
        """
        from offload_eval.reporting.export_tables import TABLES, export_frame

        if what not in TABLES:
            raise InputError(f"what: {what!r} is not allowed; allowed: {', '.join(TABLES)}")
        hardware = self.hardware if what == "transfers" else None
        return export_frame(what, self.experiment, self.records, hardware)

    def trials(self) -> "pd.DataFrame":
        """Every raw trial of every cell, one row each: `frame("trials")`."""
        return self.frame("trials")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {self.experiment.name}, {len(self.cells)} cells, {len(self.traces)} traces)"


def load_run(path: str | Path) -> Run:
    """Reads a run directory: see `offload_eval.load_run`."""
    return Run(Path(path).expanduser())
