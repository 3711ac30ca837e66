"""Progress of a run on a terminal, with elapsed and remaining time; silent in a pipe."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from offload_eval.core.records import RunRecord
from offload_eval.core.run_spec import RunSpec
from offload_eval.execution.messages import PassStarted
from offload_eval.units import format_duration


class RunProgress:
    """Two bars: all cells, and the passes of the cell that runs."""

    def __init__(self, progress: Progress, num_cells: int) -> None:
        self._progress = progress
        self._cells = progress.add_task("all cells", total=num_cells)
        self._passes = progress.add_task("", total=None, visible=False)
        self._label = ""
        self._counts_cells = True

    def expect(self, num_limits: int) -> None:
        """Starts the upper bar anew, over limits to be found."""
        self._progress.reset(self._cells, description="all limits", total=num_limits)
        self._counts_cells = False

    def limit_found(self) -> None:
        """Moves the upper bar by a limit."""
        self._progress.advance(self._cells)

    def trace_started(self, spec: RunSpec, index: int, total: int) -> None:
        """Shows the traces on the lower bar."""
        self._progress.update(
            self._passes, description=f"{escape(spec.label)}: trace", completed=index, total=total, visible=True
        )

    def cell_started(self, spec: RunSpec) -> None:
        """Restarts the lower bar."""
        role = "" if spec.role == "cell" else f" ({spec.role})"
        self._label = escape(f"{spec.label}{role}")
        self._progress.reset(self._passes, description=f"{self._label}: loading", total=None, visible=True)

    def pass_started(self, event: PassStarted) -> None:
        """Moves the lower bar."""
        self._progress.update(
            self._passes, description=f"{self._label}: {event.name}", completed=event.index, total=event.total
        )

    def cell_finished(self, record: RunRecord) -> None:
        """Moves the upper bar, and leaves a line for the cell on a terminal."""
        if self._counts_cells:
            self._progress.advance(self._cells)
        if self._progress.disable:
            return
        reason = "" if record.failure is None else f" ({escape(record.failure.message.splitlines()[0][:160])})"
        self._progress.console.print(
            f"{self._label}: {record.status} in {format_duration(record.duration_s)}{reason}", highlight=False
        )


@contextmanager
def open_progress(console: Console, num_cells: int) -> Iterator[RunProgress]:
    """Shows progress while the block runs."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("elapsed"),
        TimeElapsedColumn(),
        TextColumn("remaining"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with progress:
        yield RunProgress(progress, num_cells)
