"""A comparison for other programs: JSON, CSV and JUnit XML."""

import csv
from io import StringIO
from typing import Any, Final
from xml.etree import ElementTree

import msgspec

from offload_eval.core.comparison import Change, RunComparison
from offload_eval.core.gate import GateLine, GateResult
from offload_eval.reporting.display import one_line

CSV_COLUMNS: Final = (
    "metric",
    "title",
    "unit",
    "workload",
    "strategy",
    "baseline",
    "candidate",
    "ratio",
    "verdict",
    "test",
    "p",
    "adjusted_p",
    "baseline_low",
    "baseline_high",
    "baseline_trials",
    "candidate_low",
    "candidate_high",
    "candidate_trials",
    "note",
    "baseline_run_id",
    "candidate_run_id",
)


def comparison_json(comparison: RunComparison, gate: GateResult | None = None) -> str:
    """The comparison as one JSON document; `changes` has every figure, in SI units, also those that are the same."""
    document = msgspec.to_builtins(comparison)
    if gate is not None:
        document["gate"] = {"broken": bool(gate.broken), "lines": msgspec.to_builtins(gate.lines)}
    return msgspec.json.encode(document).decode()


def comparison_csv(comparison: RunComparison) -> str:
    """One row a figure or state, in SI units; empty where there is none."""
    text = StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_row(change) for change in comparison.changes)
    return text.getvalue()


def _row(change: Change) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(change, name) for name in CSV_COLUMNS if name in change.__struct_fields__}
    for side in ("baseline", "candidate"):
        interval = getattr(change, f"{side}_interval")
        if interval is not None:
            row |= {f"{side}_low": interval.low, f"{side}_high": interval.high, f"{side}_trials": interval.samples}
    return row | {"note": one_line(change.note)}


def gate_junit(comparison: RunComparison, gate: GateResult) -> str:
    """A JUnit XML document: one test case for each line of the gate on each cell, undecided ones as skipped."""
    skipped = sum(line.outcome == "undecided" for line in gate.lines)
    counts = {"tests": len(gate.lines), "failures": len(gate.broken), "errors": 0, "skipped": skipped}
    attributes = {name: str(count) for name, count in counts.items()}
    root = ElementTree.Element("testsuites", attributes)
    mark = " (not alike)" if comparison.mismatches else ""
    name = one_line(f"{comparison.candidate} against {comparison.baseline}{mark}")
    suite = ElementTree.SubElement(root, "testsuite", {"name": name, **attributes})
    for line in gate.lines:
        _add_case(suite, line)
    ElementTree.indent(root)
    # As text it would declare the locale's encoding, which is not the file's.
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document.decode() + "\n"


def _add_case(suite: ElementTree.Element, line: GateLine) -> None:
    # One line without control characters: XML 1.0 has no way to write most of them.
    case = ElementTree.SubElement(
        suite,
        "testcase",
        {
            "classname": one_line(f"{line.workload}.{line.strategy}"),
            "name": one_line(f"{line.metric}: {line.limit}"),
            "time": "0",
        },
    )
    message = one_line(line.message)
    if line.outcome == "broken":
        failure = ElementTree.SubElement(case, "failure", {"message": message, "type": "broken"})
        failure.text = one_line(f"{line.workload} / {line.strategy}: {line.metric}: {line.limit}; {line.message}")
    elif line.outcome == "undecided":
        ElementTree.SubElement(case, "skipped", {"message": message})
