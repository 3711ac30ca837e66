"""What a figure module hands over."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from offload_eval.core.records import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Drawing(NamedTuple):
    """A figure and what it shows."""

    name: str
    """Of letters; its anchor in the page."""
    title: str
    """What is drawn, for those who do not see it."""
    caption: str
    """The finding, in a sentence or two of plain text."""
    figure: "Figure"


def workload_and_rungs(runs: Sequence[RunRecord]) -> str:
    """What a caption begins with: the workload of a figure's runs, and how their numbers came about."""
    rungs = ", ".join(dict.fromkeys(record.evidence for record in runs))
    return f"{runs[0].spec.workload.label} ({rungs})"
