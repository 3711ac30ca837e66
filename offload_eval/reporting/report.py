"""The report of a run directory. The same records give the same text."""

from collections.abc import Sequence
from pathlib import Path

from offload_eval.analysis.cells import probe_records
from offload_eval.analysis.grid import Cell, recorded
from offload_eval.analysis.handoff import derive_hand_off
from offload_eval.analysis.probes import current_probes
from offload_eval.analysis.study import Study
from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.experiment import ModelSpec
from offload_eval.core.machine import Machine
from offload_eval.core.records import RunRecord
from offload_eval.reporting.calibration_table import render_calibrations
from offload_eval.reporting.capacity_tables import render_limits
from offload_eval.reporting.display import MISSING, one_line, show_count, show_share
from offload_eval.reporting.figures.plates import make_plates
from offload_eval.reporting.handoff_text import render_hand_off
from offload_eval.reporting.html_page import render_html
from offload_eval.reporting.markdown import Verbatim, bullets, code, paragraph, render_table, section
from offload_eval.reporting.memory_tables import render_memory
from offload_eval.reporting.method import has_cells, render_evidence, render_method, render_reproduction
from offload_eval.reporting.price_table import price_title, render_prices
from offload_eval.reporting.recovery_table import render_recoveries
from offload_eval.reporting.report_frames import TABLES, report_frames
from offload_eval.reporting.report_json import report_json
from offload_eval.reporting.section_titles import CAPACITY, MEMORY, SPREAD, STRATEGIES, TRANSFERS
from offload_eval.reporting.sentences import render_cell_texts
from offload_eval.reporting.strategy_tables import (
    render_analytic_card,
    render_host_at,
    render_spread,
    render_strategy_tables,
)
from offload_eval.reporting.table_text import csv_text
from offload_eval.reporting.traces_table import TRACES, render_kept_traces
from offload_eval.reporting.transfer_tables import render_transfers
from offload_eval.reporting.verdict_section import render_verdict
from offload_eval.reporting.warmup_table import render_warmups
from offload_eval.store.whole_file import write_whole
from offload_eval.units import format_bytes, format_duration

NOTHING = "Nothing has been recorded yet."
RECOVERY_TITLE = "How it fails and how it comes back"
NO_TRANSFERS = "No cell that uses the link has been measured."
BY_STRATEGY = "What each strategy buys and costs"
MOST_CELLS = 200
"""Cells with details in the text: beyond, a page is nothing that anybody reads."""
MOST_FINDINGS = 100
_MESSAGE_CHARACTERS = 600


def render_report(study: Study) -> str:
    """Renders the whole report as Markdown.

    Details are given of as many workloads as a reader can leaf through; tables and report.json have all of them.

    Returns:
        Markdown in which no name and no error text can break a table or add markup.
    """
    shown = shown_workloads(study)
    of_cells = [record for record in study.of_cells if record.spec.workload.label in shown]
    everything = study.of_cells or sorted(study.records, key=lambda record: record.evidence == "traced")
    of_cells_too = has_cells(study)
    says_more = of_cells_too and not study.traces_alone
    recoveries = render_recoveries(study.ordered)
    findings = section("Findings", _findings(study))
    cells = [cell for cell in study.grid if cell.workload in shown]
    blocks = [
        section(study.experiment.name, paragraph(study.experiment.question), render_evidence(everything), level=1),
        section(
            "Verdict",
            _budget(study),
            render_verdict(study),
            *([section(BY_STRATEGY, render_cell_texts(study.experiment, of_cells), level=3)] if says_more else []),
        ),
        *_capacity_sections(study),
        *([section(price_title(study.prices), render_prices(study.prices))] if study.prices else []),
        *([section(RECOVERY_TITLE, recoveries)] if recoveries else []),
        *(_cell_sections(study, of_cells, cells, findings) if of_cells_too else [findings]),
        *_settings(study),
        section("Method", render_method(study)),
        section("Machine, versions and model", _machines(everything) or NOTHING),
        section("How to reproduce", render_reproduction(everything, limits_alone=not of_cells_too)),
        *([section("Cells", _cells(cells))] if says_more else []),
        *([section(TRACES, render_kept_traces(study.traces_alone))] if study.traces_alone else []),
    ]
    return "\n\n".join(blocks) + "\n"


def shown_workloads(study: Study) -> set[str]:
    """Labels of the workloads that have their details in the text: the first ones, up to `MOST_CELLS` cells."""
    labels = list(dict.fromkeys(cell.workload for cell in study.grid))
    return set(labels[: max(1, MOST_CELLS // max(1, len(study.experiment.strategies)))])


def _left_out(study: Study) -> list[str]:
    num_shown, num_all = len(shown_workloads(study)), len({cell.workload for cell in study.grid})
    if num_shown == num_all:
        return []
    return [
        f"Details are of the first {num_shown:,} of {num_all:,} workloads; tables/ and report.json have all of them."
    ]


def _capacity_sections(study: Study) -> list[str]:
    if not study.limits:
        return []
    missing = study.num_missing_limits
    left_out = len(probe_records(study.records)) - len(current_probes(study.experiment, study.records))
    notes = [
        *([f"The search is not done: {missing} limits are missing. Go on with --resume."] if missing else []),
        *([f"{left_out} records of other searches, models, versions or machines are left out."] if left_out else []),
    ]
    tables = render_limits(study.limits, study.experiment.capacity or CapacitySpec())
    calibrations = "" if study.policy is None else render_calibrations(study.policy)
    host = render_host_at(study.limits, study.records)
    return [
        section(CAPACITY, bullets(notes), tables),
        *([section("Host memory at the limits", host)] if host else []),
        *([section("Calibration", calibrations)] if calibrations else []),
    ]


def _settings(study: Study) -> list[str]:
    """Of a search that is done: half of one would choose among half of the strategies."""
    if study.policy is None or study.num_missing_limits:
        return []
    admits = any(limit.sessions for strategy in study.policy.strategies for limit in strategy.limits)
    return [render_hand_off(derive_hand_off(study.policy, None))] if admits else []


def _cell_sections(study: Study, of_cells: Sequence[RunRecord], cells: Sequence[Cell], findings: str) -> list[str]:
    """What the cells say, with what speaks against it before the details."""
    if study.traces_alone:
        card, memory = render_analytic_card(study.traces_alone, of_traces=True), render_memory(of_cells) or NOTHING
        return [section("Analytic card", bullets(_left_out(study)), card), section(MEMORY, memory), findings]
    runs = recorded(cells)
    warmups = render_warmups(runs)
    return [
        section(STRATEGIES, bullets(_left_out(study)), render_strategy_tables(of_cells) or NOTHING),
        section("Analytic card", render_analytic_card(runs) if runs else NOTHING),
        section(MEMORY, render_memory(of_cells) or NOTHING),
        section(TRANSFERS, render_transfers(of_cells, study.hardware) or NO_TRANSFERS),
        findings,
        section(SPREAD, render_spread(runs) or "No cell was timed."),
        *([section("First use of compiled cells", warmups)] if warmups else []),
    ]


def write_report(directory: Path, study: Study) -> list[Path]:
    """Writes report.md, report.html, report.json and tables/*.csv, each whole or not at all, in place of earlier ones.

    Tables without a row are not written, and removed where an earlier report left them.

    Returns:
        The files, those that people read first.

    Raises:
        OSError: A file cannot be written.
    """
    tables, frames, report = directory / "tables", report_frames(study), render_report(study)
    texts = {
        directory / "report.md": report,
        directory / "report.html": render_html(report, make_plates(study)),
        directory / "report.json": report_json(study, frames),
        **{tables / f"{name}.csv": csv_text(frame) for name, frame in frames.items()},
    }
    tables.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        write_whole(path, text)
    for name in set(TABLES) - set(frames):
        (tables / f"{name}.csv").unlink(missing_ok=True)
    return list(texts)


def _model_name(model: ModelSpec) -> str:
    """The hub id; of a local model its folder's or file's name: the path is the machine's, not the report's."""
    path = Path(model.location)
    return path.name if path.is_absolute() else model.location


def _budget(study: Study) -> str:
    experiment = study.experiment
    budget, model = experiment.budget, experiment.model
    weights = "counted from the model" if budget.weights_bytes is None else format_bytes(budget.weights_bytes)
    parts = [
        f"Model {code(_model_name(model))} in {model.dtype}, {model.weights} weights. ",
        f"Budget: {format_bytes(budget.device_bytes)} of device memory; weights {weights}, ",
        f"runtime {format_bytes(budget.runtime_bytes)}, reserve {format_bytes(budget.reserve_bytes)}; ",
        "" if budget.host_bytes is None else f"{format_bytes(budget.host_bytes)} of host memory for the cache; ",
        _enforced(study),
    ]
    return "".join(parts)


def _enforced(study: Study) -> str:
    if not study.has_runs and study.records:
        return "nothing was run."
    if study.experiment.budget.enforce or not has_cells(study):
        return "enforced during the run."
    return "enforced in the search, and not on cells." if study.limits else "not enforced during the run."


def _findings(study: Study) -> str:
    """The worst first, up to `MOST_FINDINGS`."""
    shown = study.findings[:MOST_FINDINGS]
    rows = [
        [
            finding.severity,
            Verbatim(code(finding.code)),
            one_line(finding.message, _MESSAGE_CHARACTERS),
            finding.remedy,
        ]
        for finding in shown
    ]
    if not rows:
        return "No rule found anything to say against these numbers." if study.records else NOTHING
    table = render_table(["severity", "code", "what was seen", "remedy"], rows, "llll")
    left_out = len(study.findings) - len(shown)
    return f"{table}\n\n{left_out:,} more findings are in report.json." if left_out else table


def _model_rows(record: RunRecord) -> list[list[str]]:
    model, spec = record.model, record.spec
    rows = [
        ["model fingerprint", model.fingerprint],
        ["parameters", show_count(model.parameters)],
        ["weights", format_bytes(model.weights_bytes)],
        ["attention", spec.model.attn_implementation],
    ]
    if record.evidence == "traced":
        rows.append(["device that the traces follow", spec.device])
    elif spec.device == "cpu":
        pace = spec.cpu.link_bytes_per_s
        rows.append(["emulated link", "as fast as memory copies" if pace is None else f"{format_bytes(pace)}/s"])
        rows.append(["compute threads", show_count(record.conditions.compute_threads)])
    return rows


def _machines(records: Sequence[RunRecord]) -> str:
    """The first record's machine in full, and how each other one differs."""
    if not records:
        return ""
    first = records[0].machine
    others = {"; ".join(record.machine.differences(first)): None for record in records}
    notes = [f"Another machine in this directory differs: {difference}." for difference in others if difference]
    table = render_table(["what", "value"], _machine_rows(first) + _model_rows(records[0]), "ll")
    return "\n\n".join(block for block in (table, bullets(notes)) if block)


def _machine_rows(machine: Machine) -> list[list[str]]:
    accelerator = machine.accelerator
    limit_bytes = machine.cgroup_memory_limit_bytes
    rows = [
        ["platform", machine.platform],
        ["CPU", f"{machine.cpu}, {machine.cpu_cores} cores"],
        ["host memory", format_bytes(machine.host_memory_bytes)],
        ["cgroup memory limit", format_bytes(limit_bytes)],
        ["swap", format_bytes(machine.swap_bytes)],
        ["accelerator", MISSING if accelerator is None else accelerator.name],
    ]
    if accelerator is not None:
        pcie = f"generation {accelerator.pcie_generation or MISSING}, width {accelerator.pcie_width or MISSING}"
        rows += [
            ["accelerator memory", format_bytes(accelerator.memory_bytes)],
            ["driver", accelerator.driver],
            ["PCIe", pcie],
        ]
    rows += [["CUDA", machine.cuda or MISSING], ["allocator", machine.allocator_config or MISSING]]
    rows += [["Python", machine.python], *([name, version] for name, version in sorted(machine.versions.items()))]
    return rows


def _cells(cells: Sequence[Cell]) -> str:
    rows = [_cell_row(cell) for cell in cells]
    titles = ["workload", "strategy", "status", "run_id", "trials", "started (UTC)", "duration"]
    return render_table(titles, rows, "llllrlr")


def _cell_row(cell: Cell) -> list[str]:
    record = cell.record
    if record is None:
        return [cell.workload, cell.strategy, "not run", *[MISSING] * 4]
    return [
        cell.workload,
        cell.strategy,
        record.status,
        code(record.run_id),
        show_share(len(record.trials), record.spec.measurement.trials),
        record.started_at_utc,
        format_duration(record.duration_s),
    ]
