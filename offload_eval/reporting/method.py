"""How each column of a report is obtained, and how the report is made again. Only what the plan asks for is told."""

from collections.abc import Iterable, Sequence
from typing import Final

from offload_eval.analysis.cells import latest_records, latest_traces, probe_records, ran_on_own_tokens
from offload_eval.analysis.statistics import CONFIDENCE
from offload_eval.analysis.study import Study
from offload_eval.core.experiment import Experiment, compile_mode
from offload_eval.core.factors import expand_workloads
from offload_eval.core.records import RunRecord
from offload_eval.reporting.markdown import Verbatim, bullets, code, escape, fence, render_table, section
from offload_eval.reporting.method_columns import METHODS
from offload_eval.reporting.method_type import RUN
from offload_eval.reporting.sentences import EVIDENCE_WORDS

GLOSSARY: Final = "Glossary: every column, its rung and its formula"


def render_method(study: Study) -> str:
    """How every number came about: the passes of cells, then each column with its rung and formula."""
    passes = bullets(_passes(study.experiment, study.of_cells)) if has_cells(study) and not study.traces_alone else ""
    return "\n\n".join(block for block in (passes, section(GLOSSARY, _columns(study), level=3)) if block)


def has_cells(study: Study) -> bool:
    """Whether a report speaks of cells: not where a search was made alone."""
    return bool(study.of_cells) or not study.limits


def render_evidence(records: Sequence[RunRecord]) -> str:
    """One line for each rung that the records stand on; those of runs come first."""
    rungs = dict.fromkeys(record.evidence for record in (*latest_records(records), *latest_traces(records)))
    return "\n\n".join(f"Evidence: {EVIDENCE_WORDS[rung]}." for rung in rungs)


def _columns(study: Study) -> str:
    runs = [record for record in (*study.runs, *probe_records(study.records)) if record.evidence != "traced"]
    rungs = ", ".join(dict.fromkeys(record.evidence for record in runs)) or "none yet"
    shown = {"both", *(["cells"] if has_cells(study) else []), *(["limits"] if study.limits else [])}
    holds = {"always": True, "not run": not runs, "priced": bool(study.prices)}
    is_traced = any(record.evidence == "traced" for record in study.records)
    rows = [
        [
            rungs if each.columns == RUN else each.columns,
            each.rung.replace(RUN, rungs),
            Verbatim(f"{code(each.formula)}. {escape(each.reading)}"),
        ]
        for each in METHODS
        if each.where in shown
        and holds[each.when]
        and (RUN not in each.rung or runs or not is_traced)
        and (study.experiment.measurement.fidelity or not each.of_fidelity)
        and (is_traced or not each.of_trace)
    ]
    return render_table(["column", "rung", "how"], rows, "lll")


def _passes(experiment: Experiment, records: Sequence[RunRecord]) -> list[str]:
    plan = experiment.measurement
    fidelity = ", and one that compares logits" if plan.fidelity else ""
    besides = ", besides the fidelity pass, which warms up too" if plan.fidelity else ""
    return [
        "Passes are separate, each one full-length generate(). The plan for each cell: "
        f"{plan.trials} for time with nothing else attached, {plan.memory_trials} for memory, "
        f"{plan.transfer_trials} for transfers where the strategy uses the link{fidelity}. A column of trials says "
        "how many of the plan there are. Over several trials peaks are the maximum, bytes and times the median.",
        f"Warm-up: {plan.warmups} full-length runs before anything is timed{besides}.{_first_use(experiment)}",
        *_factors(experiment),
        _forced_tokens(experiment, records),
        *([_noise_floor(records)] if plan.fidelity else []),
        "Interval: two order statistics that hold the true median with the stated coverage, at least "
        f"{CONFIDENCE:.0%}; below six trials there is none, and the range is minimum to maximum. ITL "
        "percentiles are nearest-rank, over all trials together.",
        "A dash is a number that does not exist: not measured, not defined, or not known. It is never zero.",
    ]


def _first_use(experiment: Experiment) -> str:
    if all(compile_mode(strategy) is None for strategy in experiment.strategies):
        return ""
    return (
        " A compiled strategy takes at least one, before every other pass: it compiles for itself in that one, with "
        "nothing left of earlier cells. The times of all warm-ups are kept in conditions.warmups_s, and in no trial."
    )


def _factors(experiment: Experiment) -> list[str]:
    """What holds of chunks and attention, where there are any."""
    workloads = expand_workloads(experiment)
    said = []
    if any(workload.prefill_chunk_tokens is not None for workload in workloads):
        said.append(
            "A workload with chunks is prefilled in them in every pass, the baseline's recording included; its noise "
            "floor is the baseline against itself in other chunks, of half the size or less."
        )
    if any(workload.attn_implementation is not None for workload in workloads):
        said.append("A workload with an attention of its own has its own baseline, computed with that attention.")
    return said


def _forced_tokens(experiment: Experiment, records: Sequence[RunRecord]) -> str:
    own = [record.spec.label for record in records if ran_on_own_tokens(record)]
    given = f"Forced tokens: the greedy tokens of {experiment.baseline} are recorded once and given to "
    compared = " and logits compare position by position" if experiment.measurement.fidelity else ""
    to_whom = (
        f"the other strategies, except for {', '.join(own)}, which ran on tokens of their own: other work, "
        "compared with nothing"
        if own
        else f"every strategy, so that all do the same work{compared}"
    )
    return f"{given}{to_whom}. EOS is off and the count is checked."


def _noise_floor(records: Sequence[RunRecord]) -> str:
    """Chunk sizes are those that the baselines were prefilled in; where none is known, none is given."""
    floors = [record for record in records if record.spec.is_baseline and record.fidelity is not None]
    sizes = {record.spec.workload.label: record.conditions.noise_floor_chunk_tokens for record in floors}
    known = {workload: size for workload, size in sizes.items() if size is not None}
    return f"Noise floor: the baseline against itself, prefilled in chunks{_sizes(known.items())}."


def _sizes(known: Iterable[tuple[str, int]]) -> str:
    workloads: dict[int, list[str]] = {}
    for workload, size in known:
        workloads.setdefault(size, []).append(workload)
    if len(workloads) == 1:
        return f" of {next(iter(workloads)):,} tokens"
    parts = [f"{size:,} tokens ({', '.join(labels)})" for size, labels in workloads.items()]
    return f" of {', '.join(parts)}" if parts else ""


def render_reproduction(records: Sequence[RunRecord], *, limits_alone: bool = False) -> str:
    """The commands that run the experiment again and that report its records again."""
    commits = dict.fromkeys(record.machine.git_commit for record in records if record.machine.git_commit)
    at = bullets([Verbatim(f"Code at commit {code(commit)}.") for commit in commits])
    command, what = ("capacity", "limits") if limits_alone else ("run", "cells")
    if records and all(record.evidence == "traced" for record in records):
        command += " --trace-only"
    commands = (
        f"# In this directory: the same {what} again, into a new one\n"
        f"offload-eval {command} experiment.yaml --out again\n"
        "# This report again, from the stored records\n"
        "offload-eval report ."
    )
    return "\n\n".join(block for block in (at, fence(commands)) if block)
