"""All figures of a report, as SVG, each under the section that it belongs to."""

from typing import NamedTuple

from offload_eval.analysis.grid import largest_workload
from offload_eval.analysis.study import Study
from offload_eval.reporting.figures.drawing import Drawing
from offload_eval.reporting.figures.fidelity_by_size import draw_fidelity_by_size
from offload_eval.reporting.figures.memory_ledger import draw_memory_ledger
from offload_eval.reporting.figures.price_of_sessions import draw_price_of_sessions
from offload_eval.reporting.figures.sessions_by_length import draw_sessions_by_length
from offload_eval.reporting.figures.style import house_style
from offload_eval.reporting.figures.svg import inline_svg
from offload_eval.reporting.figures.token_latencies import draw_token_latencies
from offload_eval.reporting.figures.transfers_hidden import draw_transfers_hidden
from offload_eval.reporting.section_titles import CAPACITY, MEMORY, SPREAD, STRATEGIES, TRANSFERS


class Plate(NamedTuple):
    """A figure as it stands in a page."""

    name: str
    caption: str
    svg: str


def make_plates(study: Study) -> dict[str, list[Plate]]:
    """Draws what there is data for; of an experiment's cells those of the workload with most tokens.

    Returns:
        Title of a section to its figures.
    """
    largest = largest_workload(study.of_cells)
    cells = [record for record in study.of_cells if record.spec.workload.label == largest]
    with house_style():
        drawings = (
            (CAPACITY, draw_sessions_by_length(study.limits)),
            (CAPACITY, draw_price_of_sessions(study.experiment, study.records)),
            (STRATEGIES, draw_fidelity_by_size(cells)),
            (MEMORY, draw_memory_ledger(cells)),
            (TRANSFERS, draw_transfers_hidden(cells, study.hardware)),
            (SPREAD, draw_token_latencies(cells)),
        )
        plates: dict[str, list[Plate]] = {}
        for section, drawing in drawings:
            if drawing is not None:
                plates.setdefault(section, []).append(as_plate(drawing))
    return plates


def as_plate(drawing: Drawing) -> Plate:
    """A drawing as it stands in a page; to be called in the style that it was made in."""
    return Plate(drawing.name, drawing.caption, inline_svg(drawing.figure, drawing.name, drawing.title))
