"""All figures of a report, as SVG, each under the section that it belongs to."""

from collections.abc import Sequence
from typing import NamedTuple

from offload_eval.analysis.study import Study
from offload_eval.core.records import RunRecord
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
    cells = _of_largest_workload(study.of_cells)
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
                plates.setdefault(section, []).append(_plate(drawing))
    return plates


def _plate(drawing: Drawing) -> Plate:
    return Plate(drawing.name, drawing.caption, inline_svg(drawing.figure, drawing.name, drawing.title))


def _of_largest_workload(records: Sequence[RunRecord]) -> list[RunRecord]:
    loads = {record.spec.workload.label: record.spec.workload for record in records}
    largest = max(
        loads,
        key=lambda label: loads[label].batch_size * (loads[label].prompt_tokens + loads[label].output_tokens),
        default=None,
    )
    return [record for record in records if record.spec.workload.label == largest]
