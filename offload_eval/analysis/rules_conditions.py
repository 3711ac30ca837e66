"""Rules about how a cell was measured: each takes one record and returns a finding or None."""

from typing import Final

from offload_eval.analysis.cells import merged_sample
from offload_eval.analysis.statistics import relative_spread, tpot_samples_s
from offload_eval.analysis.swap import swap_use
from offload_eval.core.judgement import Finding
from offload_eval.core.records import RunRecord
from offload_eval.units import format_bytes

CONTENDED_RATIO: Final = 1.5
"""Wall over CPU time; above it, the probe's threads waited for a core a third of their time."""
SPREAD_LIMIT_RATIO: Final = 0.10
LEAST_TRIALS: Final = 3
MAJOR_FAULT_S: Final = 1e-4
"""What one is taken to cost: a random read of a solid-state disk. On a hard disk it is up to a hundred times that."""
MAJOR_FAULTS_LIMIT_RATIO: Final = 0.01
TIMED_EVIDENCE: Final = ("emulated", "measured")


def check_contention(record: RunRecord) -> Finding | None:
    """Other processes wanted the cores."""
    contention = record.conditions.contention_ratio
    if contention is None or contention <= CONTENDED_RATIO:
        return None
    return Finding(
        code="contended_machine",
        severity="warning",
        message=f"a parallel operation at the start took {contention:.2f} times its CPU time (limit "
        f"{CONTENDED_RATIO:.2f}). Suspected cause: other processes want the same cores; times are "
        "too long.",
        remedy="Stop other work, or set cpu.compute_threads to the cores that are free, and run the cells again.",
        run_ids=(record.run_id,),
    )


def check_tpot_spread(record: RunRecord) -> Finding | None:
    """The trials disagree about TPOT."""
    samples_s = tpot_samples_s(record)
    spread = relative_spread(samples_s)
    if spread is None or spread <= SPREAD_LIMIT_RATIO:
        return None
    return Finding(
        code="tpot_spread",
        severity="warning",
        message=f"TPOT ranges from {min(samples_s) * 1000:.3f} ms to {max(samples_s) * 1000:.3f} ms over "
        f"{len(samples_s)} trials, {spread:.1%} of the median (limit {SPREAD_LIMIT_RATIO:.0%}). Suspected "
        "cause: a missing warm-up, other load, or a clock that changes.",
        remedy="Raise measurement.warmups and measurement.trials on an idle machine.",
        run_ids=(record.run_id,),
    )


def check_leak(record: RunRecord) -> Finding | None:
    """Device memory did not return to what it was before the cell."""
    leaked_bytes = record.conditions.leaked_bytes
    if leaked_bytes is None or leaked_bytes <= 0 or record.conditions.recovery is not None:  # see rules_recovery
        return None
    return Finding(
        code="leaked_bytes",
        severity="warning",
        message=f"{format_bytes(leaked_bytes)} ({leaked_bytes:,} bytes) stayed live on the device after the "
        "cell. Suspected cause: a library keeps the cache or a workspace alive; later cells of the worker "
        "start higher.",
        remedy="Run the cell in a worker of its own, and do not trust peaks of the cells after it.",
        run_ids=(record.run_id,),
    )


def check_swap(record: RunRecord) -> Finding | None:
    """The machine swapped while time was taken."""
    use = swap_use(record)
    if use.in_bytes + use.out_bytes == 0:
        return None
    return Finding(
        code="swap_traffic",
        severity="warning",
        message=f"{format_bytes(use.in_bytes)} came from swap and {format_bytes(use.out_bytes)} went to it during "
        "the timing passes. Suspected cause: host memory is full; times are the disk's, and are marked.",
        remedy="Free host memory, turn swap off, or ask for a smaller batch or prompt.",
        run_ids=(record.run_id,),
    )


def check_cgroup_swap(record: RunRecord) -> Finding | None:
    """Memory of the worker's control group lies in swap."""
    swap_bytes = swap_use(record).cgroup_bytes
    if swap_bytes == 0:
        return None
    return Finding(
        code="cgroup_swap",
        severity="warning",
        message=f"up to {format_bytes(swap_bytes)} of the control group's memory lay in swap in the memory passes. "
        "It may have gone there before the cell, and be another process's of the group; what of it the worker "
        "touches comes back from the disk, so the cell's times are marked. Suspected cause: the group's limit is too "
        "small, or the machine's memory is full.",
        remedy="Raise the group's memory limit, set its swap limit to 0, or ask for a smaller batch or prompt.",
        run_ids=(record.run_id,),
    )


def check_major_faults(record: RunRecord) -> Finding | None:
    """The worker waited for pages from a disk while time was taken."""
    faults = sum(trial.num_major_faults or 0 for trial in record.trials)
    if faults == 0:
        return None
    timed_s = sum(trial.e2e_latency_s or 0.0 for trial in record.trials)
    share = faults * MAJOR_FAULT_S / timed_s if timed_s else 0.0
    grave = share > MAJOR_FAULTS_LIMIT_RATIO
    return Finding(
        code="major_faults",
        severity="warning" if grave else "note",
        message=f"the worker waited for a page from a disk {faults:,} times in {timed_s:.3g} s of timing passes: at "
        f"{MAJOR_FAULT_S * 1000:g} ms each {share:.2%} of that time (limit {MAJOR_FAULTS_LIMIT_RATIO:.0%}). Suspected "
        "cause: host memory is full, so that pages of weights and libraries, which are mapped from files, are dropped "
        "and read again, or come from swap.",
        remedy="Free host memory or raise the control group's limit." if grave else "",
        run_ids=(record.run_id,),
    )


def check_alloc_retries(record: RunRecord) -> Finding | None:
    """The allocator had to free its cached blocks to serve a request."""
    retries = sum(trial.num_alloc_retries or 0 for trial in record.trials)
    if retries == 0:
        return None
    return Finding(
        code="alloc_retries",
        severity="warning",
        message=f"the allocator freed its cached blocks and tried again {retries} times. Suspected cause: "
        "memory is nearly full or fragmented; times include the flushes.",
        remedy="Leave more memory free, or try PYTORCH_ALLOC_CONF=expandable_segments:True.",
        run_ids=(record.run_id,),
    )


def check_trials(record: RunRecord) -> Finding | None:
    """Too few timed trials to see a spread."""
    timed = len(tpot_samples_s(record))
    if record.status != "ok" or record.evidence not in TIMED_EVIDENCE or timed >= LEAST_TRIALS:
        return None
    return Finding(
        code="few_trials",
        severity="warning",
        message=f"TPOT rests on {timed} timed trials (at least {LEAST_TRIALS} are wanted): its spread is unknown.",
        remedy=f"Set measurement.trials to {LEAST_TRIALS} or more.",
        run_ids=(record.run_id,),
    )


def check_memory_pass(record: RunRecord) -> Finding | None:
    """No trial looked at memory."""
    sample = merged_sample(record)
    seen = (sample.prefill.peak_allocated_bytes, sample.decode.peak_allocated_bytes)
    if record.status != "ok" or None not in seen:
        return None
    return Finding(
        code="no_memory_pass",
        severity="warning",
        message="the peak of at least one phase was not measured: the sessions by peak are unknown. "
        f"The plan has {record.spec.measurement.memory_trials} memory trials.",
        remedy="Set measurement.memory_trials to 1 or more.",
        run_ids=(record.run_id,),
    )
