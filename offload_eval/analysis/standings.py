"""Where each strategy stands at one combination of lengths, all of them on the same basis."""

from collections.abc import Mapping, Sequence

import msgspec

from offload_eval.analysis.break_even import most_tokens_per_s
from offload_eval.analysis.capacity import admitted_by_peak, admitted_by_trace, analytic_bound
from offload_eval.analysis.cells import mean_kl_nats, noise_floor_nats, ran_on_own_tokens
from offload_eval.analysis.comparison import Counterparts
from offload_eval.analysis.probes import exhausted, lengths_of, timed_batch
from offload_eval.analysis.rules_fidelity import KL_ROUNDING_NATS
from offload_eval.analysis.rules_outcomes import failure_reason, out_of_memory_words
from offload_eval.bounds.host_ledger import is_held_to_host
from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.experiment import DynamicSpec, QuantizedSpec, StaticSpec, StrategySpec
from offload_eval.core.limits import CapacityLimit, Lengths, TimedBatch
from offload_eval.core.records import RunRecord
from offload_eval.core.verdict import Family, Fidelity, Standing

Fidelities = Mapping[tuple[Lengths | None, str], Fidelity]
"""The worst that was seen of each strategy, at each combination of lengths and, under None, at any."""


def family_of(strategy: StrategySpec) -> Family:
    """Where a strategy keeps the KV cache."""
    if isinstance(strategy, DynamicSpec | StaticSpec):
        return "in-GPU"
    return "quantization" if isinstance(strategy, QuantizedSpec) else "offload"


def limit_standing(limit: CapacityLimit, probes: Sequence[RunRecord], capacity: CapacitySpec) -> Standing:
    """Of a limit on its own rung; batches beyond it were timed against no budget, and count for nothing.

    Args:
        limit: Of one strategy, as it ran or by trace.
        probes: Those of the same strategy and lengths that ran; none of a limit by trace.
        capacity: States the objectives.
    """
    most = limit.sessions or 0
    is_past_host = limit.limiting_ledger == "host" and not is_held_to_host(limit.strategy)
    kept = limit.under_slo
    standing = Standing(
        strategy=limit.label,
        family=family_of(limit.strategy),
        is_lossless=limit.strategy.lossless,
        evidence=limit.evidence,
        reason=limit.refusal or "",
        analytic=limit.analytic,
        traced=limit.traced,
        sessions=limit.sessions,
        is_least=limit.sessions is not None and not limit.is_exact,
        by_host_arithmetic=is_past_host and limit.at_limit is None and bool(limit.difference),
        ledger="host" if limit.limiting_ledger == "host" else None,
        session_run_ids=limit.limit_run_ids or limit.run_ids,
        under_slo=None if kept is None or kept.swapped or kept.sessions > most else kept,
    )
    return _with_times(
        standing, [each for each in probes if each.spec.role == "time" and _batch(each) <= most], capacity
    )


def missing_standing(strategy: StrategySpec, reason: str) -> Standing:
    """Of a strategy that has nothing on the basis of the others."""
    return Standing(strategy=strategy.label, family=family_of(strategy), is_lossless=strategy.lossless, reason=reason)


def cell_standing(runs: Sequence[RunRecord], traces: Sequence[RunRecord], capacity: CapacitySpec) -> Standing:
    """Of one strategy's cells: sessions from the largest batch that ended well, and less than one that did not fit.

    Args:
        runs: Of the same lengths, of any batch; at least one.
        traces: Theirs.
        capacity: States the objectives.
    """
    first, ended = runs[0], [run for run in runs if run.status == "ok"]
    full = [run for run in runs if run.status == "oom" and exhausted(run) == "device"]
    failed = min(full, key=_batch, default=None)
    largest = max((run for run in ended if failed is None or _batch(run) < _batch(failed)), key=_batch, default=None)
    admitted = None if largest is None else admitted_by_peak(largest)
    bound = analytic_bound(first)
    sessions = None if admitted is None else admitted.sessions
    sources = [] if sessions is None or largest is None else [largest]
    if failed is not None and (sessions is None or sessions >= _batch(failed)) and (sources or _batch(failed) == 1):
        sessions, sources = _batch(failed) - 1, [*sources, failed]
    standing = Standing(
        strategy=first.spec.strategy.label,
        family=family_of(first.spec.strategy),
        is_lossless=first.spec.strategy.lossless,
        evidence=first.evidence,
        reason="" if sessions is not None else _reason(ended, runs),
        analytic=None if bound is None else bound.sessions,
        traced=_traced_sessions(traces),
        sessions=sessions,
        ledger=None if admitted is None else admitted.ledger,
        oom_at=None if failed is None else _batch(failed),
        session_run_ids=tuple(each.run_id for each in sources),
    )
    return _with_times(standing, [run for run in ended if not ran_on_own_tokens(run)], capacity)


def traced_cell_standing(traces: Sequence[RunRecord]) -> Standing:
    """Of one strategy's traces, where no cell of the lengths ran."""
    largest, first, sessions = _largest(traces), traces[0], _traced_sessions(traces)
    bound = analytic_bound(first)
    return Standing(
        strategy=first.spec.strategy.label,
        family=family_of(first.spec.strategy),
        is_lossless=first.spec.strategy.lossless,
        evidence="traced",
        reason="" if largest is not None else failure_reason(first),
        analytic=None if bound is None else bound.sessions,
        traced=sessions,
        sessions=sessions,
        session_run_ids=() if largest is None else (largest.run_id,),
    )


def keeps_output(strategy: StrategySpec, fidelity: Fidelity | None) -> bool:
    """Whether a strategy loses nothing: by its kind, and where its output was compared up to the noise floor."""
    if not strategy.lossless or fidelity is None or fidelity.noise_floor_nats is None:
        return strategy.lossless
    return fidelity.mean_kl_nats <= max(fidelity.noise_floor_nats, KL_ROUNDING_NATS)


def find_fidelities(runs: Sequence[RunRecord]) -> Fidelities:
    """The worst fidelity of each strategy, by mean KL; of equal ones that which is not bit-equal."""
    baselines = Counterparts(run for run in runs if run.spec.is_baseline and run.status == "ok")
    worst: dict[tuple[Lengths | None, str], Fidelity] = {}
    for run in runs:
        found = _fidelity(run, baselines) if run.status == "ok" else None
        for place in (lengths_of(run.spec.workload), None):
            key = (place, run.spec.strategy.label)
            if found is not None and (key not in worst or _badness(found) > _badness(worst[key])):
                worst[key] = found
    return worst


def _with_times(standing: Standing, records: Sequence[RunRecord], capacity: CapacitySpec) -> Standing:
    timed = [figures for record in records if (figures := timed_batch(record)) is not None]
    kept = timed_within(records, capacity)
    num_swapped = sum(each.swapped for each in timed)
    return msgspec.structs.replace(
        standing,
        fastest=most_tokens_per_s(kept) if kept else None,
        num_timed=len(timed) - num_swapped,
        num_swapped=num_swapped,
    )


def timed_within(
    records: Sequence[RunRecord], capacity: CapacitySpec, most_sessions: int | None = None
) -> list[TimedBatch]:
    """Batches with valid times within the objectives, up to a limit."""
    timed = [figures for record in records if (figures := timed_batch(record)) is not None]
    return [
        each
        for each in timed
        if not each.swapped
        and capacity.objectives_ratio(each.ttft_s, each.tpot_s) <= 1
        and (most_sessions is None or each.sessions <= most_sessions)
    ]


def _traced_sessions(traces: Sequence[RunRecord]) -> int | None:
    """Extrapolated from the largest batch that was traced."""
    largest = _largest(traces)
    admitted = None if largest is None else admitted_by_trace(largest)
    return None if admitted is None else admitted.sessions


def _largest(records: Sequence[RunRecord]) -> RunRecord | None:
    """The largest batch that ended well."""
    return max((record for record in records if record.status == "ok"), key=_batch, default=None)


def _reason(ended: Sequence[RunRecord], runs: Sequence[RunRecord]) -> str:
    """Why a strategy's sessions are not known."""
    if ended:
        return "its memory was not measured"
    run = runs[0]
    return out_of_memory_words(run) if run.status == "oom" else failure_reason(run)


def _batch(record: RunRecord) -> int:
    return record.spec.workload.batch_size


def _badness(fidelity: Fidelity) -> tuple[float, bool]:
    return fidelity.mean_kl_nats, not fidelity.bit_equal


def _fidelity(run: RunRecord, baselines: Counterparts) -> Fidelity | None:
    mean_nats, fidelity = mean_kl_nats(run), run.fidelity
    if mean_nats is None or fidelity is None:
        return None
    baseline = baselines.find(run, run.spec.baseline)
    return Fidelity(
        workload=run.spec.workload.label,
        mean_kl_nats=mean_nats,
        noise_floor_nats=None if baseline is None else noise_floor_nats(baseline),
        top1_agreement_ratio=fidelity.top1_agreement_ratio,
        bit_equal=fidelity.bit_equal,
        run_id=run.run_id,
    )
