"""`offload-eval compare`: a candidate run held against a baseline run, and against a gate."""

from collections.abc import Iterable
from pathlib import Path

from offload_eval.analysis.compare_pairs import RunSide
from offload_eval.analysis.compare_runs import compare_runs
from offload_eval.analysis.gate import check_gate
from offload_eval.cli.console import print_json, result_console
from offload_eval.core.comparison import RunComparison
from offload_eval.core.gate import GateResult
from offload_eval.errors import ExitCode, InputError, UnableError
from offload_eval.reporting.compare_files import comparison_csv, comparison_json, gate_junit
from offload_eval.reporting.compare_terminal import render_terminal_comparison
from offload_eval.reporting.compare_text import render_comparison
from offload_eval.store.gate_file import check_labels, load_gate
from offload_eval.store.reference_tokens import read_reference_tokens
from offload_eval.store.run_directory import RunDirectory
from offload_eval.store.whole_file import write_whole


def compare_command(
    *,
    baseline: Path,
    candidate: Path,
    out: Path | None,
    gate: Path | None,
    junit: Path | None,
    allow_mismatch: bool,
    json_output: bool,
) -> int:
    """Prints what is otherwise in the candidate, and writes it where that is asked for.

    Returns:
        0, or 1 where a gate is broken.

    Raises:
        InputError: A directory is no run, the runs are not alike, or the gate is wrong.
        UnableError: A file cannot be written.
    """
    if junit is not None and gate is None:
        raise InputError("--junit needs --gate: its test cases are the gate's lines")
    asked = load_gate(gate) if gate is not None else None
    sides = _sides(baseline, candidate)
    comparison = compare_runs(*sides, allow_mismatch=allow_mismatch)
    result = None
    if asked is not None and gate is not None:
        check_labels(gate, asked, _labels(sides))
        result = check_gate(comparison, asked)
    files = _write(comparison, result, out, junit)
    if json_output:
        print_json(comparison_json(comparison, result))
    else:
        console = result_console()
        console.print(render_terminal_comparison(comparison, result))
        for file in files:
            console.out(f"written: {file}", highlight=False)
    return ExitCode.FELL_SHORT if result is not None and result.broken else ExitCode.DONE


def _sides(baseline: Path, candidate: Path) -> tuple[RunSide, RunSide]:
    """Both runs by their folders' names, or by their paths where those are the same."""
    names = [path.resolve().name for path in (baseline, candidate)]
    if names[0] == names[1]:
        names = [str(baseline), str(candidate)]
    return _side(baseline, names[0]), _side(candidate, names[1])


def _side(path: Path, name: str) -> RunSide:
    directory = RunDirectory.read(path)
    records = tuple(directory.records())
    tokens = read_reference_tokens(path, records)
    return RunSide(name=name, experiment=directory.experiment, records=records, tokens=tokens)


def _labels(sides: Iterable[RunSide]) -> list[str]:
    """The labels of all strategies that either run has something of."""
    return list(dict.fromkeys(record.spec.strategy.label for side in sides for record in side.records))


def _write(comparison: RunComparison, result: GateResult | None, out: Path | None, junit: Path | None) -> list[Path]:
    texts: dict[Path, str] = {}
    if out is not None:
        # A page draws and takes pandas along, which a comparison on the terminal need not wait for.
        from offload_eval.reporting.figures.page_plates import comparison_plates
        from offload_eval.reporting.html_page import render_html

        text = render_comparison(comparison, result)
        texts |= {
            out / "compare.md": text,
            out / "compare.html": render_html(text, {}, comparison_plates(comparison)),
            out / "compare.json": comparison_json(comparison, result) + "\n",
            out / "compare.csv": comparison_csv(comparison),
        }
    if junit is not None and result is not None:
        texts[junit] = gate_junit(comparison, result)
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
        except OSError as error:
            raise UnableError(f"{path}: cannot be written: {error.strerror}") from error
    return list(texts)
