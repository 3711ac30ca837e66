"""Rules about what a failure leaves behind: they look at drills and probes as well as at cells."""

from collections.abc import Callable, Sequence
from typing import Final

from offload_eval.analysis.recovery import explain_recoveries, failure_words
from offload_eval.core.judgement import FailureRecovery, Finding
from offload_eval.core.records import RunRecord, Status
from offload_eval.core.run_spec import Drill
from offload_eval.units import format_bytes

_ENDS: Final[dict[Drill, tuple[Status, ...]]] = {
    "oom_prefill": ("oom",),
    "oom_decode": ("oom",),
    "host_refused": ("oom",),
    "killed": ("failed",),
    "hung": ("timeout",),
}
"""How a drill ends that did what it was for; a strategy may not support one."""
_OWN_WORKER: Final = "Do not trust the cells that this worker ran after it; run them in a worker of their own."


def check_recovery(records: Sequence[RunRecord]) -> list[Finding]:
    """What a failure left behind, and whether the worker still computed the same after it."""
    return [finding for each in explain_recoveries(records) for rule in _RULES if (finding := rule(each)) is not None]


def _other_tokens(recovery: FailureRecovery) -> Finding | None:
    if recovery.tokens_equal is not False:
        return None
    return Finding(
        code="recovery_tokens",
        severity="error",
        message=f"after {failure_words(recovery)} the same short generation gave other tokens than before it, in "
        f"{_worker(recovery)}. Suspected cause: the failure left state behind that later generations read.",
        remedy=_OWN_WORKER,
        run_ids=(recovery.run_id,),
    )


def _other_logits(recovery: FailureRecovery) -> Finding | None:
    if recovery.logits_equal is not False or recovery.tokens_equal is False:
        return None
    return Finding(
        code="recovery_logits",
        severity="note",
        message=f"after {failure_words(recovery)} the same short generation gave the same tokens and other logits, in "
        f"{_worker(recovery)}. Suspected cause: kernels that sum in another order from call to call.",
        run_ids=(recovery.run_id,),
    )


def _left_behind(recovery: FailureRecovery) -> Finding | None:
    """The device's tolerance is in the names already: within it there are none."""
    if recovery.leaked_bytes is None or not recovery.leaked:
        return None
    return Finding(
        code="recovery_leak",
        severity="warning",
        message=f"{format_bytes(recovery.leaked_bytes)} ({recovery.leaked_bytes:,} bytes) stayed on the device after "
        f"{failure_words(recovery)}: {'; '.join(recovery.leaked)}.",
        remedy="Let go of them where they are held; until then later cells of the worker start higher.",
        run_ids=(recovery.run_id,),
    )


def _not_checked(recovery: FailureRecovery) -> Finding | None:
    if not recovery.unchecked:
        return None
    return Finding(
        code="recovery_unchecked",
        severity="warning",
        message=f"after {failure_words(recovery)} the short generation could not be made: "
        f"{' '.join(recovery.unchecked.split())}",
        remedy=_OWN_WORKER,
        run_ids=(recovery.run_id,),
    )


def _other_end(recovery: FailureRecovery) -> Finding | None:
    if recovery.drill is None or recovery.status == "unsupported":
        return None
    if recovery.status in _ENDS[recovery.drill] and recovery.stage != "load":  # it never came to the drill
        return None
    return Finding(
        code="drill_missed",
        severity="warning",
        message=f"{failure_words(recovery)} ended as {recovery.status}, and not as "
        f"{' or '.join(_ENDS[recovery.drill])} where it was meant to: in stage {recovery.stage}, {recovery.raised}: "
        f"{' '.join((recovery.message or '').split())}",
        remedy="Read the worker's log; what this failure costs is not known.",
        run_ids=(recovery.run_id,),
    )


def _worker(recovery: FailureRecovery) -> str:
    return "a new worker" if recovery.in_new_worker else "the same worker"


_RULES: Final[tuple[Callable[[FailureRecovery], Finding | None], ...]] = (
    _other_tokens,
    _other_logits,
    _left_behind,
    _not_checked,
    _other_end,
)
