"""A run directory of many records, for measuring what a report takes: a real run's, again and again under new names.

The records are real but for their names and a jitter of their times; nothing that comes out of them means anything.
"""

import random
from pathlib import Path

import msgspec

from offload_eval.core.experiment import Workload
from offload_eval.core.records import RunRecord, TrialSample, record_id
from offload_eval.store.run_directory import RunDirectory

LARGEST_JITTER = 0.05


def write_synthetic_run(template: Path, out: Path, num_records: int) -> int:
    """Writes a run directory with the records of `template` repeated, each time under workloads of other names.

    Args:
        template: A run of cells alone.
        out: A directory that is not there yet.
        num_records: At least as many: whole repetitions are written.

    Returns:
        How many were written.
    """
    run = RunDirectory.read(template)
    records, chance = run.records(), random.Random(0)
    repeats = range(-(-num_records // len(records)))
    workloads = tuple(_renamed(workload, number) for number in repeats for workload in run.experiment.workloads)
    experiment = msgspec.structs.replace(run.experiment, workloads=workloads)
    with RunDirectory.create(out, experiment, run.machine) as directory:
        for number in repeats:
            for record in records:
                pace = 1 + chance.uniform(-LARGEST_JITTER, LARGEST_JITTER)
                directory.append(_again(record, number, pace))
    return len(repeats) * len(records)


def _renamed(workload: Workload, number: int) -> Workload:
    return msgspec.structs.replace(workload, name=f"{workload.label}-{number:05}")


def _again(record: RunRecord, number: int, pace: float) -> RunRecord:
    spec = msgspec.structs.replace(record.spec, workload=_renamed(record.spec.workload, number))
    trials = tuple(_slower(trial, pace) for trial in record.trials)
    return msgspec.structs.replace(record, spec=spec, run_id=record_id(spec, record.evidence), trials=trials)


def _slower(trial: TrialSample, pace: float) -> TrialSample:
    if trial.ttft_s is None or trial.e2e_latency_s is None:
        return trial
    return msgspec.structs.replace(
        trial,
        ttft_s=trial.ttft_s * pace,
        e2e_latency_s=trial.e2e_latency_s * pace,
        inter_token_latencies_s=tuple(latency_s * pace for latency_s in trial.inter_token_latencies_s),
    )
