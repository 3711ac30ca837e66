"""Each strategy beside the baseline of its workload."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from offload_eval.analysis.capacity import sessions_by_peak
from offload_eval.analysis.cells import (
    bytes_moved_per_token,
    latest_records,
    mean_kl_nats,
    merged_sample,
    noise_floor_nats,
    ran_on_own_tokens,
)
from offload_eval.analysis.statistics import median_of, summarize_throughput, summarize_tpot, summarize_ttft
from offload_eval.core.experiment import StrategySpec
from offload_eval.core.judgement import Comparison
from offload_eval.core.records import RunRecord

if TYPE_CHECKING:
    from offload_eval.core.run_spec import RunSpec


def compare_with_baseline(records: Sequence[RunRecord]) -> tuple[Comparison, ...]:
    """Compares every ok cell with the ok baseline of its workload.

    Cells are paired only where nothing but the strategy differs: the rest of the spec, the machine and the
    evidence are the same. A cell without such a baseline, or that ran on its own tokens, has no comparison.

    Returns:
        One comparison for each such pair, in the records' order; none for the baselines themselves.
    """
    finished = [record for record in latest_records(records) if record.status == "ok"]
    others = [record for record in finished if not record.spec.is_baseline and not ran_on_own_tokens(record)]
    candidates = Counterparts(finished)
    pairs = ((record, candidates.find(record, record.spec.baseline)) for record in others)
    return tuple(_compare(record, baseline) for record, baseline in pairs if baseline is not None)


class Counterparts:
    """Records that others are held against, by their spec: ten thousand cells look up their own at once."""

    def __init__(self, candidates: Iterable[RunRecord]) -> None:
        self._by_spec: dict[RunSpec, list[RunRecord]] = {}
        for candidate in candidates:
            self._by_spec.setdefault(candidate.spec, []).append(candidate)
        self.strategies = tuple(dict.fromkeys(spec.strategy for spec in self._by_spec))
        """Those of the candidates, each once."""

    def find(self, record: RunRecord, strategy: StrategySpec) -> RunRecord | None:
        """The first that differs from a record in the strategy alone: rest of the spec, machine and rung are equal."""
        wanted = msgspec.structs.replace(record.spec, strategy=strategy)
        for candidate in self._by_spec.get(wanted, ()):
            if candidate.evidence == record.evidence and not candidate.machine.differences(record.machine):
                return candidate
        return None


def _compare(record: RunRecord, baseline: RunRecord) -> Comparison:
    mine, theirs = merged_sample(record), merged_sample(baseline)
    return Comparison(
        workload=record.spec.workload.label,
        strategy=record.spec.strategy.label,
        run_id=record.run_id,
        baseline_run_id=baseline.run_id,
        tpot_ratio=_ratio(median_of(summarize_tpot(record)), median_of(summarize_tpot(baseline))),
        ttft_ratio=_ratio(median_of(summarize_ttft(record)), median_of(summarize_ttft(baseline))),
        throughput_ratio=_ratio(median_of(summarize_throughput(record)), median_of(summarize_throughput(baseline))),
        prefill_peak_saved_bytes=_less(theirs.prefill.peak_allocated_bytes, mine.prefill.peak_allocated_bytes),
        decode_peak_saved_bytes=_less(theirs.decode.peak_allocated_bytes, mine.decode.peak_allocated_bytes),
        kv_device_saved_bytes=_less(theirs.kv_cache_device_bytes, mine.kv_cache_device_bytes),
        sessions_gained=_less(sessions_by_peak(record), sessions_by_peak(baseline)),
        extra_bytes_moved_per_token=_extra_bytes_moved(record, baseline),
        mean_kl_nats=mean_kl_nats(record),
        noise_floor_nats=noise_floor_nats(baseline),
    )


def _extra_bytes_moved(record: RunRecord, baseline: RunRecord) -> float | None:
    """A baseline that does not use the link moves nothing."""
    mine, theirs = bytes_moved_per_token(record), bytes_moved_per_token(baseline)
    return None if mine is None else mine - (theirs or 0)


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _less(value: int | None, subtracted: int | None) -> int | None:
    return None if value is None or subtracted is None else value - subtracted
