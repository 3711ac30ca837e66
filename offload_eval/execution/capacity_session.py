"""Searches the largest batch of every strategy at every combination of lengths, and has failures brought about."""

import time
from typing import Protocol

import msgspec

from offload_eval.analysis.probes import (
    exhausted,
    largest_passing,
    lengths_of,
    peak_bytes,
    timed_batch,
    traced_peak_bytes,
)
from offload_eval.bounds.limit_search import largest_that_fits, next_batch
from offload_eval.bounds.strategy_bound import strategy_bound
from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.experiment import BudgetSpec, Experiment, StrategySpec, StreamedSpec, Workload, is_auto
from offload_eval.core.factors import expand_workloads
from offload_eval.core.records import RunRecord
from offload_eval.core.run_spec import DRILLS, Role
from offload_eval.execution.cell_runner import SessionObserver
from offload_eval.execution.messages import Preflight
from offload_eval.execution.probes import Probes, Searched
from offload_eval.execution.session import TRACE_LOG
from offload_eval.execution.traces import CellTracer
from offload_eval.store.run_directory import RunDirectory

_EXCESS_SCALE = 1_000_000
"""Times over their limits are compared as whole millionths."""


class SearchObserver(SessionObserver, Protocol):
    """Told how the search goes on."""

    def limit_found(self) -> None:
        """The limit of a strategy at a combination of lengths is known, or cannot be."""


class CapacitySession:
    """One search over everything that a run directory does not hold yet."""

    def __init__(
        self, experiment: Experiment, preflight: Preflight, directory: RunDirectory, observer: SearchObserver
    ) -> None:
        assert experiment.capacity is not None, "a capacity search has its section"
        self._experiment = experiment
        self._capacity: CapacitySpec = experiment.capacity
        self._preflight = preflight
        self._directory = directory
        self._observer = observer
        self._in_gpu_limits: dict[str, int] = {}

    def run(self) -> None:
        """Searches strategy by strategy, the in-GPU cache first: the others are timed at its limits too."""
        with CellTracer(self._experiment.model, self._directory.logs_dir / TRACE_LOG) as tracer:
            probes = Probes(self._experiment, self._preflight, self._directory, self._observer, tracer)
            try:
                for strategy in searched_strategies(self._experiment):
                    self._search_strategy(probes, strategy)
                    probes.end_strategy()
            finally:
                probes.end_strategy()

    def _search_strategy(self, probes: Probes, strategy: StrategySpec) -> None:
        combinations = [self._searched(workload, strategy) for workload in searched_workloads(self._experiment)]
        limits = [self._find_limit(probes, each) for each in combinations]
        for searched, limit in zip(combinations, limits, strict=True):
            if searched.is_baseline and limit is not None:
                self._in_gpu_limits[lengths_of(searched.workload).label] = limit
            if limit:
                self._add_points(probes, searched, limit)
                self._time(probes, searched, limit)
        runnable = [searched for searched, limit in zip(combinations, limits, strict=True) if limit]
        if self._capacity.drills and runnable:
            shortest = min(runnable, key=lambda each: each.workload.cached_tokens)
            for drill in DRILLS:
                probes.run(shortest, 1, drill)

    def _find_limit(self, probes: Probes, searched: Searched) -> int | None:
        weights_bytes = self._preflight.model.weights_bytes
        search = _Search(probes, searched, self._capacity, self._experiment.budget, weights_bytes)
        limit = search.run(self._start(searched), with_trace=self._experiment.trace)
        self._observer.limit_found()
        return limit

    def _searched(self, workload: Workload, strategy: StrategySpec) -> Searched:
        asked = self._experiment.baseline_strategy
        refusal = self._preflight.refusals[workload.label, strategy.label]
        return Searched(workload, with_none_resident(strategy), with_none_resident(asked), refusal)

    def _start(self, searched: Searched) -> int:
        """The limit by arithmetic; 1 where it has none."""
        model = self._preflight.model
        if model.shape is None:
            return 1
        bound = strategy_bound(
            model.shape,
            model.weights_bytes,
            self._experiment.model.dtype,
            searched.workload,
            searched.strategy,
            self._experiment.budget,
        )
        return 1 if bound is None or not bound.sessions else bound.sessions

    def _add_points(self, probes: Probes, searched: Searched, limit: int) -> None:
        """Peaks of smaller batches: a plane through limits alone would have nothing to stand on."""
        for sessions in sorted({1, (limit + 1) // 2} - {limit}):
            probes.run(searched, sessions, "point")

    def _time(self, probes: Probes, searched: Searched, limit: int) -> None:
        if not self._capacity.timing_trials:
            return
        at_limit = probes.run(searched, limit, "time")
        in_gpu_limit = self._in_gpu_limits.get(lengths_of(searched.workload).label)
        if in_gpu_limit and in_gpu_limit < limit:
            probes.run(searched, in_gpu_limit, "time")
        if self._capacity.has_objectives:
            self._find_under_slo(probes, searched, at_limit)

    def _find_under_slo(self, probes: Probes, searched: Searched, at_limit: RunRecord) -> None:
        """Times grow with the batch as peaks do; what is over a limit is over it by a known part."""
        limit = at_limit.spec.workload.batch_size

        def excess(sessions: int) -> int:
            timed = timed_batch(probes.run(searched, sessions, "time"))
            if timed is None:
                return 2 * _EXCESS_SCALE
            return int(_EXCESS_SCALE * self._capacity.objectives_ratio(timed.ttft_s, timed.tpot_s))

        largest_that_fits(excess, _EXCESS_SCALE, limit, most=limit, max_tries=self._capacity.max_probes)


class _Search:
    """The search of one limit."""

    def __init__(
        self, probes: Probes, searched: Searched, capacity: CapacitySpec, budget: BudgetSpec, weights_bytes: int
    ) -> None:
        self._weights_bytes = weights_bytes
        self._probes = probes
        self._searched = searched
        self._capacity = capacity
        self._cap_bytes = budget.cap_bytes(weights_bytes)
        self._seen: dict[int, int | None] = {}

    def run(self, analytic: int, *, with_trace: bool) -> int | None:
        """Tries batches until the limit is known, or the tries or the time are used up.

        Args:
            analytic: Sessions by arithmetic, where the traces begin.
            with_trace: Whether to begin the tries at the traced limit.

        Returns:
            The largest batch that ran to its end each time it was tried; None where the strategy cannot run.
        """
        start = min(max(1, analytic), self._capacity.most_sessions)
        slope_bytes = None
        if with_trace and self._searched.refusal is None:
            start, slope_bytes = self._traced(start)
        deadline = time.monotonic() + self._capacity.search_timeout_s
        while True:
            batch = self._next(start, slope_bytes, deadline)
            limit = largest_passing(self._seen)
            if batch is not None:
                if not self._try(batch, "fit"):
                    return None
            elif limit == 0 or self._capacity.repeats == 1 or (self._try(limit, "verify") and self._seen[limit]):
                break
        if with_trace:
            for sessions in (limit, limit + 1):
                self._probes.trace(self._searched, max(1, sessions))
        return limit

    def _next(self, start: int, slope_bytes: float | None, deadline: float) -> int | None:
        if len(self._seen) >= self._capacity.max_probes or time.monotonic() > deadline:
            return None
        most = self._capacity.most_sessions
        return next_batch(self._seen, self._cap_bytes, start=start, most=most, slope_bytes=slope_bytes)

    def _try(self, sessions: int, role: Role) -> bool:
        """Runs a batch and notes how it ended; whether that says anything about its size."""
        record = self._probes.run(self._searched, sessions, role)
        self._seen |= {batch: None for batch in (sessions,) if record.status != "ok"}
        if record.status == "ok":
            self._seen.setdefault(sessions, peak_bytes(record))
        return record.status == "ok" or exhausted(record) is not None

    def _traced(self, start: int) -> tuple[int, float | None]:
        """The largest batch whose traced peak fits, and what one session more takes there."""
        peaks: dict[int, int] = {}

        def traced_peak(sessions: int) -> int:
            trace = self._probes.trace(self._searched, sessions)
            if trace is None:
                raise _NotTracedError
            peaks[sessions] = traced_peak_bytes(trace)
            return peaks[sessions]

        try:
            start = self._in_proportion(start, traced_peak(start))
            limit = largest_that_fits(traced_peak, self._cap_bytes, start, most=self._capacity.most_sessions)
        except _NotTracedError:
            return start, None
        two = sorted(peaks, key=lambda sessions: abs(sessions - limit))[:2]
        slope_bytes = None if len(two) < 2 else (peaks[two[0]] - peaks[two[1]]) / (two[0] - two[1])
        return max(1, limit), slope_bytes

    def _in_proportion(self, sessions: int, peak_bytes: int) -> int:
        """Where a batch whose peak does not fit would, if all that it adds to the weights grew with it."""
        room_bytes = self._cap_bytes - self._weights_bytes
        if peak_bytes <= self._cap_bytes or room_bytes <= 0:
            return sessions
        return max(1, sessions * room_bytes // (peak_bytes - self._weights_bytes))


class _NotTracedError(Exception):
    """A batch on the way to the limit cannot be traced."""


def searched_workloads(experiment: Experiment) -> list[Workload]:
    """Every combination of lengths once, however many batches it was asked for at."""
    return list({lengths_of(workload): workload for workload in reversed(expand_workloads(experiment))}.values())[::-1]


def searched_strategies(experiment: Experiment) -> list[StrategySpec]:
    """The strategies, the baseline first."""
    baseline = experiment.baseline_strategy
    return [with_none_resident(each) for each in sorted(experiment.strategies, key=lambda each: each != baseline)]


def with_none_resident(strategy: StrategySpec) -> StrategySpec:
    """A strategy that leaves its resident share to a budget, as it admits most sessions: with nothing resident."""
    if not (is_auto(strategy) and isinstance(strategy, StreamedSpec)):
        return strategy
    return msgspec.structs.replace(strategy, name=strategy.label, resident_share=0.0)
