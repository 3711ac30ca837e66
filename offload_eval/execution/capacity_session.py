"""Searches the largest batch of every strategy at every combination of lengths, and has failures brought about."""

from typing import Protocol

from offload_eval.analysis.probes import (
    lengths_of,
    timed_batch,
)
from offload_eval.bounds.limit_search import largest_that_fits
from offload_eval.bounds.strategy_bound import strategy_bound
from offload_eval.core.experiment import Experiment, StrategySpec, Workload, as_searched
from offload_eval.core.factors import expand_workloads
from offload_eval.core.judgement import Bound
from offload_eval.core.records import RunRecord
from offload_eval.core.run_spec import DRILLS
from offload_eval.execution.cell_runner import SessionObserver
from offload_eval.execution.limit_search import LimitSearch
from offload_eval.execution.messages import Preflight
from offload_eval.execution.probes import Probes, Searched
from offload_eval.execution.session import TRACE_LOG
from offload_eval.execution.traces import CellTracer
from offload_eval.store.run_directory import RunDirectory

_MOST_EXCESS = 1e9
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
        self._capacity = experiment.capacity
        self._preflight = preflight
        self._directory = directory
        self._observer = observer
        self._in_gpu_limits: dict[str, int] = {}

    def run(self) -> None:
        """Searches strategy by strategy, the in-GPU cache first: the others are timed at its limits too."""
        with self._tracer() as tracer:
            probes = self._probes(tracer)
            try:
                for strategy in searched_strategies(self._experiment):
                    self._search_strategy(probes, strategy)
                    probes.end_strategy()
            finally:
                probes.end_strategy()

    def trace(self) -> None:
        """Searches by traces alone, and runs nothing; `run` begins with the same traces, and does not repeat them."""
        with self._tracer() as tracer:
            probes = self._probes(tracer)
            for strategy in searched_strategies(self._experiment):
                for workload in searched_workloads(self._experiment):
                    searched = self._searched(workload, strategy)
                    self._limit_search(probes, searched).trace(self._bound(searched))
                    self._observer.limit_found()

    def _tracer(self) -> CellTracer:
        return CellTracer(self._experiment.model, self._directory.logs_dir / TRACE_LOG)

    def _probes(self, tracer: CellTracer) -> Probes:
        return Probes(self._experiment, self._preflight, self._directory, self._observer, tracer)

    def _search_strategy(self, probes: Probes, strategy: StrategySpec) -> None:
        combinations = [self._searched(workload, strategy) for workload in searched_workloads(self._experiment)]
        limits = [self._find_limit(probes, each) for each in combinations]
        for searched, limit in zip(combinations, limits, strict=True):
            if self._is_in_gpu(strategy) and limit is not None:
                self._in_gpu_limits[lengths_of(searched.workload).label] = limit
            if limit:
                self._add_points(probes, searched, limit)
                self._time(probes, searched, limit)
        runnable = [searched for searched, limit in zip(combinations, limits, strict=True) if limit]
        if self._capacity.drills and runnable:
            shortest = min(runnable, key=lambda each: each.workload.cached_tokens)
            for drill in DRILLS:
                probes.run(shortest, 1, drill)

    def _is_in_gpu(self, strategy: StrategySpec) -> bool:
        return strategy == self._experiment.in_gpu_strategy

    def _find_limit(self, probes: Probes, searched: Searched) -> int | None:
        limit = self._limit_search(probes, searched).run(self._bound(searched), with_trace=self._experiment.trace)
        self._observer.limit_found()
        return limit

    def _limit_search(self, probes: Probes, searched: Searched) -> LimitSearch:
        weights_bytes = self._preflight.model.weights_bytes
        return LimitSearch(probes, searched, self._capacity, self._experiment.budget, weights_bytes)

    def _searched(self, workload: Workload, strategy: StrategySpec) -> Searched:
        asked = self._experiment.baseline_strategy
        refusal = self._preflight.refusals[workload.label, strategy.label]
        return Searched(workload, as_searched(strategy), as_searched(asked), refusal)

    def _bound(self, searched: Searched) -> Bound | None:
        """The arithmetic of both ledgers; None where it refuses the model or the cache."""
        model = self._preflight.model
        if model.shape is None:
            return None
        return strategy_bound(
            model.shape,
            model.weights_bytes,
            self._experiment.model.dtype,
            searched.workload,
            searched.strategy,
            self._experiment.budget,
            self._preflight.device,
        )

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
            ratio = self._capacity.objectives_ratio(timed.ttft_s, timed.tpot_s)
            return int(_EXCESS_SCALE * min(ratio, _MOST_EXCESS))

        largest_that_fits(excess, _EXCESS_SCALE, limit, most=limit, max_tries=self._capacity.max_probes)


def searched_workloads(experiment: Experiment) -> list[Workload]:
    """Every combination of lengths once, however many batches it was asked for at."""
    return list({lengths_of(workload): workload for workload in reversed(expand_workloads(experiment))}.values())[::-1]


def searched_strategies(experiment: Experiment) -> list[StrategySpec]:
    """The strategies, the in-GPU cache first."""
    in_gpu = experiment.in_gpu_strategy
    return [as_searched(each) for each in sorted(experiment.strategies, key=lambda each: each != in_gpu)]
