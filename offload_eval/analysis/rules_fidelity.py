"""Rules about whether a strategy computes what the baseline computes, and whether the run can show it."""

import re
from collections.abc import Sequence
from typing import Final

from offload_eval.analysis.cells import mean_kl_nats, ran_on_own_tokens
from offload_eval.analysis.comparison import compare_with_baseline
from offload_eval.bounds.session_card import UPSTREAM_DEFAULTS
from offload_eval.core.experiment import QuantizedSpec
from offload_eval.core.judgement import Comparison, Finding
from offload_eval.core.records import RunRecord

OFFLOAD_RACE_FIXED_IN: Final = (5, 20)
"""Source: transformers 5.20, cache_utils.Cache.update: the prefetch stream waits for the default stream."""


KL_ROUNDING_NATS: Final = 1e-12
"""Below it a KL in float64, of logits that differ in the last bits of a float32, says nothing, nor does a floor."""


def check_lossless(records: Sequence[RunRecord]) -> list[Finding]:
    """A strategy that only moves bytes must give the baseline's logits, up to the noise floor."""
    by_run = {comparison.run_id: comparison for comparison in compare_with_baseline(records)}
    found = [_judge_lossless(record, by_run.get(record.run_id)) for record in records if _must_agree(record)]
    return [finding for finding in found if finding is not None]


def _must_agree(record: RunRecord) -> bool:
    spec = record.spec
    return spec.strategy.lossless and spec.baseline.lossless and not spec.is_baseline and record.fidelity is not None


def _judge_lossless(record: RunRecord, comparison: Comparison | None) -> Finding | None:
    mean_nats = mean_kl_nats(record)
    floor_nats = None if comparison is None else comparison.noise_floor_nats
    if mean_nats is not None and floor_nats is not None and not mean_nats <= max(floor_nats, KL_ROUNDING_NATS):
        return _lossless_differs(record, mean_nats, floor_nats)
    if record.fidelity is None or record.fidelity.bit_equal:
        return None
    return _lossless_not_bit_equal(record, mean_nats, floor_nats)


def _lossless_differs(record: RunRecord, mean_nats: float, floor_nats: float) -> Finding:
    return Finding(
        code="lossless_differs",
        severity="error",
        message=f"mean KL to the baseline is {mean_nats:.3g} nats, above the workload's noise floor of "
        f"{floor_nats:.3g} nats, though this strategy only moves bytes. Suspected cause: a race or a wrong "
        "copy.",
        remedy="Do not use this cell: its output is not the model's. Run it again at batch 1 and report it.",
        run_ids=(record.run_id,),
    )


def _lossless_not_bit_equal(record: RunRecord, mean_nats: float | None, floor_nats: float | None) -> Finding:
    mean = "unknown" if mean_nats is None else f"{mean_nats:.3g} nats"
    floor = "no noise floor is known" if floor_nats is None else f"the noise floor is {floor_nats:.3g} nats"
    return Finding(
        code="lossless_not_bit_equal",
        severity="note",
        message=f"logits are not bit-equal to the baseline's; mean KL is {mean} and {floor}. Suspected "
        "cause: another memory layout leads to another kernel or order of summation.",
        run_ids=(record.run_id,),
    )


def check_forced_tokens(record: RunRecord) -> Finding | None:
    """A strategy was given no tokens: its work is not the others'."""
    if not ran_on_own_tokens(record):
        return None
    return Finding(
        code="own_tokens",
        severity="error",
        message=f"the cell ran on its own tokens, not on those of {record.spec.baseline.label}: its times and peaks "
        "are of other work, and it is compared with nothing. Suspected cause: the baseline recorded no tokens.",
        remedy="Get the baseline of this workload to finish, then run the cell again.",
        run_ids=(record.run_id,),
    )


def check_reference(record: RunRecord) -> Finding | None:
    """Fidelity was planned and is missing, though the cell was given the baseline's tokens."""
    if record.status != "ok" or record.fidelity is not None or not record.spec.measurement.fidelity:
        return None
    if ran_on_own_tokens(record):
        return None
    if record.spec.is_baseline and record.spec.workload.prompt_tokens == 1:
        return Finding(
            code="no_noise_floor",
            severity="note",
            message="a prompt of a single token cannot be prefilled in chunks: there is no noise floor.",
            run_ids=(record.run_id,),
        )
    return Finding(
        code="no_reference",
        severity="warning",
        message="fidelity was planned but there is none. Suspected cause: the baseline gave no reference logits.",
        remedy="Get the baseline of this workload to finish, then run the cell again.",
        run_ids=(record.run_id,),
    )


def check_flush(record: RunRecord) -> Finding | None:
    """The output is too short for the quantizer's window to fill."""
    strategy, steps = record.spec.strategy, record.spec.workload.output_tokens - 1
    if record.status != "ok" or not isinstance(strategy, QuantizedSpec) or strategy.backend == "fp8":
        return None
    residual_length = strategy.residual_length or UPSTREAM_DEFAULTS["residual_length"]
    if steps >= residual_length:
        return None
    return Finding(
        code="no_flush",
        severity="warning",
        message=f"{steps} decode steps never fill the residual window of {residual_length} tokens: fidelity "
        "and peaks are understated. The prompt's own attention is exact, its KV is quantized once and "
        "never again, and no generated token is quantized.",
        remedy=f"Set output_tokens to {residual_length + 1} or more; {2 * residual_length + 1} crosses two flushes.",
        run_ids=(record.run_id,),
    )


def check_offload_race(record: RunRecord) -> Finding | None:
    """Upstream's offloading, in this version of transformers, may read a layer before it has arrived."""
    installed = record.machine.versions.get("transformers")
    version = None if installed is None else _release(installed)
    if record.status != "ok" or record.spec.strategy.kind != "offloaded" or version is None:
        return None
    if version >= OFFLOAD_RACE_FIXED_IN:
        return None
    return Finding(
        code="offload_race",
        severity="warning",
        message=f"transformers {installed} prefetches without waiting for the copies before it (mended in "
        "5.20): outputs and times of this cell may be wrong.",
        remedy="Upgrade transformers to 5.20 or newer.",
        run_ids=(record.run_id,),
    )


def _release(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return None if match is None else (int(match[1]), int(match[2]))
