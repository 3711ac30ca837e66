"""What a run concludes: each strategy beside the in-GPU cache, which to choose, and from where on offload pays."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from offload_eval.analysis.break_even import batch_break_even, context_break_even, most_tokens_per_s
from offload_eval.analysis.capacity import admitted_by_peak, admitted_by_trace, analytic_bound
from offload_eval.analysis.cells import (
    latest_records,
    latest_traces,
    mean_kl_nats,
    noise_floor_nats,
    ran_on_own_tokens,
)
from offload_eval.analysis.compare_times import LEAST_EFFECT
from offload_eval.analysis.comparison import Counterparts
from offload_eval.analysis.probes import current_probes, lengths_of
from offload_eval.analysis.rules_outcomes import failure_reason, out_of_memory_words
from offload_eval.analysis.timed import Timed, timed_batches
from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.experiment import (
    Attention,
    DynamicSpec,
    Experiment,
    QuantizedSpec,
    StaticSpec,
    StrategySpec,
)
from offload_eval.core.factors import expand_workloads
from offload_eval.core.limits import CapacityLimit, Lengths, TimedBatch
from offload_eval.core.records import Evidence, RunRecord
from offload_eval.core.verdict import (
    Choice,
    ContextBreakEven,
    Family,
    Fidelity,
    Goal,
    Situation,
    Standing,
    Verdict,
)


def conclude(experiment: Experiment, records: Sequence[RunRecord], limits: Sequence[CapacityLimit]) -> Verdict:
    """Draws the verdict of a run.

    Where lengths were searched, sessions and times are the search's; elsewhere those of the experiment's cells.

    Args:
        experiment: What was asked.
        records: Of cells, traces and probes.
        limits: What `find_limits` makes of them.

    Returns:
        A situation for each combination of lengths, those of limits first, in the experiment's order.
    """
    cells = [record for record in records if record.spec.role == "cell"]
    evidence = _Evidence(experiment, cells, limits, timed_batches(_timed_probes(experiment, records)))
    situations = tuple(evidence.situation(lengths) for lengths in evidence.lengths)
    capacity = experiment.capacity or CapacitySpec()
    return Verdict(
        ttft_limit_s=capacity.ttft_limit_s,
        tpot_limit_s=capacity.tpot_limit_s,
        situations=situations,
        break_evens=tuple(_over_contexts(situations)),
    )


def family_of(strategy: StrategySpec) -> Family:
    """Where a strategy keeps the KV cache."""
    if isinstance(strategy, DynamicSpec | StaticSpec):
        return "in-GPU"
    return "quantization" if isinstance(strategy, QuantizedSpec) else "offload"


def _timed_probes(experiment: Experiment, records: Sequence[RunRecord]) -> list[RunRecord]:
    return [record for record in current_probes(experiment, records) if record.spec.role == "time"]


_Way = tuple[int | None, Attention | None]
"""How a situation is prefilled, and its attention."""


class _Evidence:
    """All that verdicts rest on, by lengths and by strategy."""

    def __init__(
        self, experiment: Experiment, cells: Sequence[RunRecord], limits: Sequence[CapacityLimit], timed: Timed
    ) -> None:
        self._capacity = experiment.capacity or CapacitySpec()
        self._in_gpu = experiment.in_gpu_strategy
        self._strategies = {strategy.label: strategy for strategy in experiment.strategies}
        self._limits: dict[Lengths, dict[str, CapacityLimit]] = {}
        for limit in limits:
            self._limits.setdefault(limit.lengths, {})[limit.label] = limit
        runs = latest_records(cells)
        self._runs, self._traces = _by_place(runs), _by_place(latest_traces(cells))
        self._timed = timed_batches([run for run in runs if not ran_on_own_tokens(run)]) | timed
        self._fidelities = _fidelities(runs)
        self._workloads: dict[Lengths, list[str]] = {}
        for workload in expand_workloads(experiment):
            self._workloads.setdefault(lengths_of(workload), []).append(workload.label)
        found = (*self._limits, *self._runs, *self._traces)
        self.lengths = list(dict.fromkeys([*(each for each in self._workloads if each in set(found)), *found]))

    def situation(self, lengths: Lengths) -> Situation:
        """All that was found at one combination of lengths."""
        sources = (self._limits, self._runs, self._traces)
        found = {label for source in sources for label in source.get(lengths, {})}
        labels = [*(label for label in self._strategies if label in found), *sorted(found - set(self._strategies))]
        standings = tuple(self._standing(lengths, label) for label in labels)
        in_gpu = next((each for each in standings if self._is_in_gpu(each)), None)
        timed = {label: self._within_objectives(lengths, label) for label in labels}
        break_evens = (
            batch_break_even(each.strategy, timed[each.strategy], timed[in_gpu.strategy])
            for each in standings
            if in_gpu is not None and each.family == "offload"
        )
        return Situation(
            lengths=lengths,
            workloads=tuple(self._workloads.get(lengths, ())),
            in_gpu=None if in_gpu is None else in_gpu.strategy,
            standings=standings,
            choices=tuple(_choices(standings, in_gpu, has_objectives=self._capacity.has_objectives)),
            break_evens=tuple(each for each in break_evens if each is not None),
        )

    def _is_in_gpu(self, standing: Standing) -> bool:
        return self._in_gpu is not None and standing.strategy == self._in_gpu.label

    def _within_objectives(self, lengths: Lengths, label: str) -> list[TimedBatch]:
        timed = self._timed.get(lengths, {}).get(label, [])
        return [each for each in timed if self._capacity.objectives_ratio(each.ttft_s, each.tpot_s) <= 1]

    def _standing(self, lengths: Lengths, label: str) -> Standing:
        limit = self._limits.get(lengths, {}).get(label)
        runs, traces = (each.get(lengths, {}).get(label, []) for each in (self._runs, self._traces))
        strategy = limit.strategy if limit is not None else (*runs, *traces)[0].spec.strategy
        timed = self._within_objectives(lengths, label)
        counted = _of_cells(runs, traces) if limit is None else _of_limit(limit)
        return Standing(
            strategy=label,
            family=family_of(strategy),
            is_lossless=strategy.lossless,
            **counted,
            largest=max(timed, key=lambda each: each.sessions, default=None),
            fastest=most_tokens_per_s(timed) if timed else None,
            num_timed=len(self._timed.get(lengths, {}).get(label, [])),
            fidelity=self._fidelities.get((lengths, label)) or self._fidelities.get((None, label)),
        )


def _by_place(records: Sequence[RunRecord]) -> dict[Lengths, dict[str, list[RunRecord]]]:
    places: dict[Lengths, dict[str, list[RunRecord]]] = {}
    for record in records:
        of_lengths = places.setdefault(lengths_of(record.spec.workload), {})
        of_lengths.setdefault(record.spec.strategy.label, []).append(record)
    return places


def _of_limit(limit: CapacityLimit) -> dict[str, Any]:
    return {
        "evidence": limit.evidence,
        "refusal": limit.refusal or "",
        "analytic": limit.analytic,
        "traced": limit.traced,
        "sessions": limit.measured,
        "is_searched": True,
        "is_exact": limit.is_exact,
        "ledger": "host" if limit.limiting_ledger == "host" else None,
        "session_run_ids": limit.limit_run_ids,
    }


def _of_cells(runs: Sequence[RunRecord], traces: Sequence[RunRecord]) -> dict[str, Any]:
    """Of the largest batch that ended well: the less is left to be extrapolated."""
    ended = [run for run in runs if run.status == "ok"]
    largest = max(ended, key=_batch, default=None)
    traced = max((each for each in traces if each.status == "ok"), key=_batch, default=None)
    bound = analytic_bound((*runs, *traces)[0])
    admitted = None if largest is None else admitted_by_peak(largest)
    by_trace = None if traced is None else admitted_by_trace(traced)
    return {
        "evidence": "traced" if largest is None and traced is not None and not runs else _evidence(runs),
        "refusal": "" if largest is not None else _reason((*runs, *traces)[0]) if runs or traced is None else "",
        "analytic": None if bound is None else bound.sessions,
        "traced": None if by_trace is None else by_trace.sessions,
        "sessions": None if admitted is None else admitted.sessions,
        "ledger": None if admitted is None else admitted.ledger,
        "session_run_ids": _session_run_ids(largest if admitted is not None else None if runs else traced),
    }


def _session_run_ids(record: RunRecord | None) -> tuple[str, ...]:
    return () if record is None else (record.run_id,)


def _evidence(runs: Sequence[RunRecord]) -> Evidence | None:
    return next((run.evidence for run in runs), None)


def _reason(run: RunRecord) -> str:
    return out_of_memory_words(run) if run.status == "oom" else failure_reason(run)


def _batch(record: RunRecord) -> int:
    return record.spec.workload.batch_size


def _fidelities(runs: Sequence[RunRecord]) -> dict[tuple[Lengths | None, str], Fidelity]:
    """The worst that was seen of each strategy, at each combination of lengths and, under None, at any."""
    baselines = Counterparts(run for run in runs if run.spec.is_baseline and run.status == "ok")
    worst: dict[tuple[Lengths | None, str], Fidelity] = {}
    for run in runs:
        found = _fidelity(run, baselines) if run.status == "ok" else None
        for place in (lengths_of(run.spec.workload), None):
            key = (place, run.spec.strategy.label)
            if found is not None and (key not in worst or worst[key].mean_kl_nats < found.mean_kl_nats):
                worst[key] = found
    return worst


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


class _Score(NamedTuple):
    """How well a strategy does by one goal."""

    standing: Standing
    value: float
    run_ids: tuple[str, ...]
    batch_size: int | None = None


def _choices(standings: Sequence[Standing], in_gpu: Standing | None, *, has_objectives: bool) -> list[Choice]:
    ran = any(each.sessions is not None for each in standings)
    sessions = [_by_sessions(each, ran=ran, has_objectives=has_objectives) for each in standings]
    throughputs = [_by_throughput(each) for each in standings]
    found = (_choice("sessions", sessions, in_gpu), _choice("tokens_per_s", throughputs, in_gpu))
    return [choice for choice in found if choice is not None]


def _by_sessions(standing: Standing, *, ran: bool, has_objectives: bool) -> _Score | None:
    """Under objectives the largest batch that kept them; where nothing ran, sessions by trace."""
    if has_objectives and standing.num_timed:
        batch = standing.largest
        return None if batch is None else _Score(standing, batch.sessions, (batch.run_id,))
    count = standing.sessions if ran else standing.traced
    return _Score(standing, count, standing.session_run_ids) if count else None


def _by_throughput(standing: Standing) -> _Score | None:
    batch = standing.fastest
    return None if batch is None else _Score(standing, batch.tokens_per_s, (batch.run_id,), batch.sessions)


def _choice(goal: Goal, scores: Sequence[_Score | None], in_gpu: Standing | None) -> Choice | None:
    """The best of those that lose nothing, and one that loses something where it does better still."""
    known = [score for score in scores if score is not None]
    own = next((score for score in known if score.standing is in_gpu), None)
    best = _best(goal, [score for score in known if score.standing.is_lossless], own)
    if best is None:
        return None
    lossy = _best(goal, [score for score in known if not score.standing.is_lossless], None)
    if lossy is not None and not _is_better(goal, lossy, best):
        lossy = None
    return Choice(
        goal=goal,
        strategy=best.standing.strategy,
        value=best.value,
        batch_size=best.batch_size,
        over_in_gpu=None if own is None else best.value / own.value,
        run_ids=best.run_ids,
        in_gpu_run_ids=() if own is None else own.run_ids,
        lossy=None if lossy is None else lossy.standing.strategy,
        lossy_value=None if lossy is None else lossy.value,
        lossy_run_ids=() if lossy is None else lossy.run_ids,
    )


def _best(goal: Goal, scores: Sequence[_Score], in_gpu: _Score | None) -> _Score | None:
    """The highest; the in-GPU cache where no other is better by what counts."""
    best = max(scores, key=lambda score: score.value, default=None)
    if best is None or in_gpu is None:
        return best
    return best if _is_better(goal, best, in_gpu) else in_gpu


def _is_better(goal: Goal, one: _Score, other: _Score) -> bool:
    return one.value > other.value * (1 + (LEAST_EFFECT if goal == "tokens_per_s" else 0))


def _over_contexts(situations: Sequence[Situation]) -> list[ContextBreakEven]:
    """One for each way of prefilling and attention, and each strategy that offloads."""
    batches: dict[tuple[_Way, str], dict[int, tuple[TimedBatch, TimedBatch | None]]] = {}
    unsearched: set[str] = set()
    for situation in situations:
        lengths = situation.lengths
        in_gpu = next((each for each in situation.standings if each.strategy == situation.in_gpu), None)
        if in_gpu is None:
            continue
        way: _Way = (lengths.prefill_chunk_tokens, lengths.attn_implementation)
        tokens = lengths.prompt_tokens + lengths.output_tokens
        for each in situation.standings:
            if each.family == "offload" and each.fastest is not None:
                batches.setdefault((way, each.strategy), {})[tokens] = (each.fastest, in_gpu.fastest)
                unsearched |= {each.strategy for own in (each, in_gpu) if not own.is_searched}
    found = (
        context_break_even(strategy, by_tokens, *way, is_searched=strategy not in unsearched)
        for (way, strategy), by_tokens in batches.items()
    )
    return [each for each in found if each is not None]
