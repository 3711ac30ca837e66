"""How much of a decode step's copies each strategy hides behind computation, and how much is waited for."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from offload_eval.analysis.cells import latest_records
from offload_eval.analysis.transfers import explain_transfers
from offload_eval.core.hardware import HardwareProfile
from offload_eval.core.judgement import PhaseTransfer
from offload_eval.core.records import RunRecord
from offload_eval.reporting.display import show_ms, show_percent
from offload_eval.reporting.figures.drawing import Drawing, workload_and_rungs
from offload_eval.reporting.figures.style import COLOURS, INK, MOST_STRATEGIES, add_legend, new_figure, shown_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HIDDEN: Final = COLOURS[5]
_EXPOSED: Final = COLOURS[1]


class StepTransfer(NamedTuple):
    """Of one decode step of one strategy, in seconds."""

    strategy: str
    busy_s: float
    """Both directions together; both busy at once count twice."""
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        """What nobody waited for."""
        return max(0.0, self.busy_s - self.exposed_s)


def draw_transfers_hidden(records: Sequence[RunRecord], hardware: HardwareProfile | None) -> Drawing | None:
    """Draws one workload's cells that use the link; None where no link was timed."""
    transfers = [each for each in explain_transfers(records, hardware) if each.phase == "decode"]
    steps = [step for each in transfers if (step := step_transfer(each)) is not None][:MOST_STRATEGIES]
    if not steps:
        return None
    title = f"Copies of a decode step of {transfers[0].workload}, hidden and exposed, by strategy"
    caption = f"{workload_and_rungs(latest_records(records))}: {_caption(steps)}"
    return Drawing("transfers", title, caption, transfers_figure(steps))


def step_transfer(transfer: PhaseTransfer) -> StepTransfer | None:
    """None unless the link's time and the waits were both seen, and the link was used."""
    h2d_s, d2h_s, exposed_s = transfer.h2d.busy_s, transfer.d2h.busy_s, transfer.exposed_by_waits_s
    if h2d_s is None or d2h_s is None or exposed_s is None or not h2d_s + d2h_s:
        return None
    return StepTransfer(transfer.strategy, (h2d_s + d2h_s) / transfer.steps, exposed_s)


def transfers_figure(steps: Sequence[StepTransfer]) -> "Figure":
    """One bar for each strategy: exposed, then hidden."""
    figure, (panel,) = new_figure(1, 1, 1.3 + 0.32 * len(steps))
    places = range(len(steps))
    exposed_ms = [step.exposed_s * 1000 for step in steps]
    hidden_ms = [step.hidden_s * 1000 for step in steps]
    waited = panel.barh(places, exposed_ms, color=_EXPOSED, edgecolor=INK, linewidth=0.4)
    free = panel.barh(places, hidden_ms, left=exposed_ms, color=_HIDDEN, edgecolor=INK, linewidth=0.4, hatch="//")
    panel.set_yticks(places, [shown_name(step.strategy) for step in steps])
    panel.invert_yaxis()
    panel.grid(visible=False, axis="y")
    panel.set(xlabel="link busy in a decode step, both directions (ms)")
    add_legend(
        figure, [waited.patches[0], free.patches[0]], ["exposed: computation waited", "hidden behind computation"]
    )
    return figure


def _caption(steps: Sequence[StepTransfer]) -> str:
    worst = max(steps, key=lambda step: step.exposed_s)
    if worst.exposed_s == 0:
        return "no strategy's computation waited for a copy."
    said = (
        f"{worst.strategy} waits longest, {show_ms(worst.exposed_s, 3)} ms a decode step, with the link busy for "
        f"{show_ms(worst.busy_s, 3)} ms"
    )
    best = max(steps, key=lambda step: step.hidden_s / step.busy_s)
    return (
        f"{said}; {best.strategy} hides the largest share of its copies, {show_percent(best.hidden_s / best.busy_s)}."
    )
