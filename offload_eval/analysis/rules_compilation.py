"""Rules about cells that torch.compile compiled: each takes one record and returns a finding or None."""

from offload_eval.core.experiment import compile_mode
from offload_eval.core.judgement import Finding
from offload_eval.core.records import RunRecord


def check_compiled_while_timed(record: RunRecord) -> Finding | None:
    """A trial has a compilation in it, after a full-length warm-up."""
    counts = [trial.num_compilations or 0 for trial in record.trials]
    if sum(counts) == 0:
        return None
    trials = ", ".join(str(number) for number, count in enumerate(counts, start=1) if count)
    return Finding(
        code="compiled_while_timed",
        severity="error",
        message=f"torch compiled {sum(counts)} graphs during the timing pass of trial {trials}: its times have "
        "compilation in them. Suspected cause: shapes that change from pass to pass, or a limit on recompilations.",
        remedy="Do not use these times. Raise measurement.warmups, and look for recompilations in the worker's log "
        "with TORCH_LOGS=recompiles.",
        run_ids=(record.run_id,),
    )


def check_compiled_memory(record: RunRecord) -> Finding | None:
    """On the emulated device the memory pass of a compiled cell is not compiled."""
    looked = any(trial.prefill.peak_allocated_bytes is not None for trial in record.trials)
    if record.evidence != "emulated" or compile_mode(record.spec.strategy) is None or not looked:
        return None
    return Finding(
        code="memory_not_compiled",
        severity="note",
        message="peaks are those of the code before it is compiled: the emulated device counts memory operator by "
        "operator, and torch then runs the model as it is. Times are of the compiled code.",
        run_ids=(record.run_id,),
    )
