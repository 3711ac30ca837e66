"""The report of a run directory. The same records give the same text."""

import os
from collections.abc import Sequence
from pathlib import Path

from offload_eval.analysis.cells import cell_records, probe_records
from offload_eval.analysis.findings import find
from offload_eval.analysis.handoff import derive_hand_off
from offload_eval.analysis.limits import find_limits, missing_limits
from offload_eval.analysis.policy import policy_of
from offload_eval.analysis.probes import current_probes
from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.experiment import Experiment, ModelSpec
from offload_eval.core.hardware import HardwareProfile
from offload_eval.core.limits import CapacityLimit
from offload_eval.core.machine import Machine
from offload_eval.core.records import RunRecord
from offload_eval.reporting.calibration_table import calibration_frame, render_calibrations
from offload_eval.reporting.capacity_tables import limits_frame, render_limits, verdict_lines
from offload_eval.reporting.detail_tables import fidelity_frame, host_frame
from offload_eval.reporting.display import MISSING, one_line, show_count, show_share
from offload_eval.reporting.figures.plates import make_plates
from offload_eval.reporting.grid import Cell, experiment_cells, in_order, recorded
from offload_eval.reporting.handoff_text import render_hand_off
from offload_eval.reporting.html_page import render_html
from offload_eval.reporting.markdown import Verbatim, bullets, code, paragraph, render_table, section
from offload_eval.reporting.memory_tables import memory_frame, render_memory
from offload_eval.reporting.method import render_evidence, render_method, render_reproduction
from offload_eval.reporting.recovery_table import recovery_frame, render_recoveries
from offload_eval.reporting.section_titles import CAPACITY, MEMORY, SPREAD, STRATEGIES, TRANSFERS
from offload_eval.reporting.sentences import workload_sentences
from offload_eval.reporting.strategy_tables import (
    render_analytic_card,
    render_host_at,
    render_spread,
    render_strategy_tables,
)
from offload_eval.reporting.table_text import csv_text
from offload_eval.reporting.tables import analytic_frame, strategy_frame, trials_frame
from offload_eval.reporting.transfer_tables import render_transfers, transfer_frame
from offload_eval.reporting.warmup_table import render_warmups
from offload_eval.units import format_bytes, format_duration

NOTHING = "Nothing has been recorded yet."
RECOVERY_TITLE = "How it fails and how it comes back"
NO_TRANSFERS = "No cell that uses the link has been measured."
_MESSAGE_CHARACTERS = 600


def render_report(
    experiment: Experiment, records: Sequence[RunRecord], hardware: HardwareProfile | None = None
) -> str:
    """Renders the whole report as Markdown.

    Args:
        experiment: What was asked; it names the cells, also those without a record.
        records: What was kept; a later record takes the place of an earlier one of the same cell.
        hardware: What the machine was calibrated to; None: transfers are held against an emulated link's pace alone.

    Returns:
        Markdown in which no name and no error text can break a table or add markup.
    """
    limits = find_limits(experiment, records)
    of_cells = cell_records(records)
    everything = in_order(experiment, of_cells) or sorted(records, key=lambda record: record.evidence == "traced")
    has_cells = bool(of_cells) or not limits
    recoveries = render_recoveries(in_order(experiment, records))
    findings = section("Findings", _findings(in_order(experiment, records), hardware))
    blocks = [
        section(experiment.name, paragraph(experiment.question), render_evidence(everything), level=1),
        section(
            "Verdict",
            _budget(experiment, has_cells=has_cells),
            bullets(verdict_lines(limits)),
            *_verdicts(experiment, of_cells, has_cells),
        ),
        *_capacity_sections(experiment, records, limits),
        *([section(RECOVERY_TITLE, recoveries)] if recoveries else []),
        *(_cell_sections(experiment, of_cells, hardware, findings) if has_cells else [findings]),
        *_settings(experiment, records, limits),
        section("Machine, versions and model", _machines(everything) or NOTHING),
        section("How to reproduce", render_reproduction(everything, limits_alone=not has_cells)),
        *([section("Cells", _cells(experiment_cells(experiment, of_cells)))] if has_cells else []),
    ]
    return "\n\n".join(blocks) + "\n"


def _capacity_sections(
    experiment: Experiment, records: Sequence[RunRecord], limits: Sequence[CapacityLimit]
) -> list[str]:
    if not limits:
        return []
    missing = missing_limits(experiment, limits)
    left_out = len(probe_records(records)) - len(current_probes(experiment, records))
    notes = [
        *([f"The search is not done: {missing} limits are missing. Go on with --resume."] if missing else []),
        *([f"{left_out} records of other searches, models, versions or machines are left out."] if left_out else []),
    ]
    tables = render_limits(limits, experiment.capacity or CapacitySpec())
    policy = policy_of(experiment, limits, records)
    calibrations = "" if policy is None else render_calibrations(policy)
    return [
        section(CAPACITY, bullets(notes), tables),
        *([section("Host memory at the limits", host)] if (host := render_host_at(limits, records)) else []),
        *([section("Calibration", calibrations)] if calibrations else []),
    ]


def _settings(experiment: Experiment, records: Sequence[RunRecord], limits: Sequence[CapacityLimit]) -> list[str]:
    """Of a search that is done: half of one would choose among half of the strategies."""
    policy = policy_of(experiment, limits, records)
    if policy is None or missing_limits(experiment, limits):
        return []
    admits = any(limit.sessions for strategy in policy.strategies for limit in strategy.limits)
    return [render_hand_off(derive_hand_off(policy, None))] if admits else []


def _cell_sections(
    experiment: Experiment, records: Sequence[RunRecord], hardware: HardwareProfile | None, findings: str
) -> list[str]:
    """What the cells say, with what speaks against it before the details."""
    ordered, everything = recorded(experiment_cells(experiment, records)), in_order(experiment, records)
    warmups = render_warmups(ordered)
    return [
        section(STRATEGIES, render_strategy_tables(everything) or NOTHING),
        section("Analytic card", render_analytic_card(ordered) if ordered else NOTHING),
        section(MEMORY, render_memory(everything) or NOTHING),
        section(TRANSFERS, render_transfers(everything, hardware) or NO_TRANSFERS),
        findings,
        section(SPREAD, render_spread(ordered) or "No cell was timed."),
        *([section("First use of compiled cells", warmups)] if warmups else []),
        section("Method", render_method(experiment, everything)),
    ]


def write_report(
    directory: Path, experiment: Experiment, records: Sequence[RunRecord], hardware: HardwareProfile | None = None
) -> list[Path]:
    """Writes report.md, report.html and tables/*.csv, each whole or not at all, in place of earlier ones.

    Returns:
        The files, the two that people read first.

    Raises:
        OSError: A file cannot be written.
    """
    of_cells = cell_records(records)
    ordered, everything = recorded(experiment_cells(experiment, of_cells)), in_order(experiment, of_cells)
    limits = find_limits(experiment, records)
    tables = directory / "tables"
    report = render_report(experiment, records, hardware)
    texts = {
        directory / "report.md": report,
        directory / "report.html": render_html(report, make_plates(experiment, records, limits, hardware)),
        tables / "strategies.csv": csv_text(strategy_frame(everything)),
        tables / "fidelity.csv": csv_text(fidelity_frame(ordered)),
        tables / "host.csv": csv_text(host_frame(ordered)),
        tables / "analytic.csv": csv_text(analytic_frame(ordered)),
        tables / "memory.csv": csv_text(memory_frame(everything)),
        tables / "transfers.csv": csv_text(transfer_frame(everything, hardware)),
        tables / "trials.csv": csv_text(trials_frame(ordered)),
    }
    policy = policy_of(experiment, limits, records)
    if policy is not None:
        texts[tables / "limits.csv"] = csv_text(limits_frame(limits))
        texts[tables / "calibration.csv"] = csv_text(calibration_frame(policy))
    if not (recoveries := recovery_frame(in_order(experiment, records))).empty:
        texts[tables / "recovery.csv"] = csv_text(recoveries)
    tables.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        _write_whole(path, text)
    return list(texts)


def _write_whole(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _model_name(model: ModelSpec) -> str:
    """The hub id; of a local model its folder's or file's name: the path is the machine's, not the report's."""
    path = Path(model.location)
    return path.name if path.is_absolute() else model.location


def _budget(experiment: Experiment, *, has_cells: bool) -> str:
    budget, model = experiment.budget, experiment.model
    weights = "counted from the model" if budget.weights_bytes is None else format_bytes(budget.weights_bytes)
    parts = [
        f"Model {code(_model_name(model))} in {model.dtype}, {model.weights} weights. ",
        f"Budget: {format_bytes(budget.device_bytes)} of device memory; weights {weights}, ",
        f"runtime {format_bytes(budget.runtime_bytes)}, reserve {format_bytes(budget.reserve_bytes)}; ",
        "" if budget.host_bytes is None else f"{format_bytes(budget.host_bytes)} of host memory for the cache; ",
        "enforced during the run." if budget.enforce or not has_cells else "not enforced during the run.",
    ]
    return "".join(parts)


def _verdicts(experiment: Experiment, records: Sequence[RunRecord], has_cells: bool) -> list[str]:
    said = workload_sentences(experiment, records) if has_cells else {}
    return [section(f"Workload: {workload}", bullets(lines), level=3) for workload, lines in said.items()]


def _findings(records: Sequence[RunRecord], hardware: HardwareProfile | None) -> str:
    rows = [
        [
            finding.severity,
            Verbatim(code(finding.code)),
            one_line(finding.message, _MESSAGE_CHARACTERS),
            finding.remedy,
        ]
        for finding in find(records, hardware)
    ]
    if not rows:
        return "No rule found anything to say against these numbers." if records else NOTHING
    return render_table(["severity", "code", "what was seen", "remedy"], rows, "llll")


def _model_rows(record: RunRecord) -> list[list[str]]:
    model, spec = record.model, record.spec
    rows = [
        ["model fingerprint", model.fingerprint],
        ["parameters", show_count(model.parameters)],
        ["weights", format_bytes(model.weights_bytes)],
        ["attention", spec.model.attn_implementation],
    ]
    if spec.device == "cpu":
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
