"""Figures of the pages that hold more than one run, as SVG."""

from collections.abc import Sequence

from offload_eval.core.comparison import RunComparison
from offload_eval.core.history import HistoryRow
from offload_eval.reporting.figures.compare_ratios import draw_compare_ratios
from offload_eval.reporting.figures.history_trends import draw_history_trends
from offload_eval.reporting.figures.plates import Plate, as_plate
from offload_eval.reporting.figures.style import house_style


def comparison_plates(comparison: RunComparison) -> list[Plate]:
    """What a comparison's page shows below its first sentence; none where no figure has a ratio."""
    with house_style():
        drawing = draw_compare_ratios(comparison)
        return [] if drawing is None else [as_plate(drawing)]


def history_plates(rows: Sequence[HistoryRow]) -> list[Plate]:
    """What a history's page begins with; none where nothing was run twice."""
    with house_style():
        return [as_plate(drawing) for drawing in draw_history_trends(rows)]
