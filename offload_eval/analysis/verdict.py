"""What a run concludes: each strategy beside the in-GPU cache, which to choose, and from where on offload pays."""

from collections.abc import Sequence

import msgspec

from offload_eval.analysis.break_even import BestBatches, batch_break_even, context_break_even
from offload_eval.analysis.cells import cell_records, latest_records, latest_traces, ran_on_own_tokens
from offload_eval.analysis.choices import choose
from offload_eval.analysis.probes import current_cells, current_probes, lengths_of
from offload_eval.analysis.standings import (
    cell_standing,
    find_fidelities,
    keeps_output,
    limit_standing,
    missing_standing,
    timed_within,
    traced_cell_standing,
)
from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.experiment import Attention, Experiment, StrategySpec
from offload_eval.core.factors import expand_workloads
from offload_eval.core.limits import CapacityLimit, Lengths, TimedBatch
from offload_eval.core.records import RunRecord
from offload_eval.core.verdict import Basis, BatchBreakEven, ContextBreakEven, Situation, Standing, Verdict


def conclude(experiment: Experiment, records: Sequence[RunRecord], limits: Sequence[CapacityLimit]) -> Verdict:
    """Draws the verdict of a run.

    At one combination of lengths all figures are on one basis: of limits that ran, where there are any; else of the
    experiment's cells; else of traces. Cells that were made with another model, budget, version or on another machine
    than the last one are left out.

    Args:
        experiment: What was asked.
        records: Of cells, traces and probes.
        limits: What `find_limits` makes of them.

    Returns:
        A situation for each combination of lengths that anything is known of, in the experiment's order.
    """
    evidence = _Evidence(experiment, records, limits)
    situations = [found for lengths in evidence.workloads if (found := evidence.situation(lengths)) is not None]
    return Verdict(
        ttft_limit_s=evidence.capacity.ttft_limit_s,
        tpot_limit_s=evidence.capacity.tpot_limit_s,
        situations=tuple(situations),
        break_evens=tuple(_over_contexts(situations)),
        num_left_out=len(latest_records(cell_records(records))) - len(latest_records(evidence.cells)),
    )


class _Evidence:
    """All that verdicts rest on."""

    def __init__(self, experiment: Experiment, records: Sequence[RunRecord], limits: Sequence[CapacityLimit]) -> None:
        self._strategies = {strategy.label: strategy for strategy in experiment.strategies}
        in_gpu = experiment.in_gpu_strategy
        self._in_gpu = None if in_gpu is None else in_gpu.label
        self._limits: dict[Lengths, dict[str, CapacityLimit]] = {}
        for limit in limits:
            self._limits.setdefault(limit.lengths, {})[limit.label] = limit
        self.cells = current_cells(experiment, records)
        self._probes = _by_place([each for each in current_probes(experiment, records) if each.evidence != "traced"])
        runs = latest_records(self.cells)
        self._runs, self._traces = _by_place(runs), _by_place(latest_traces(self.cells))
        self._fidelities = find_fidelities(runs)
        self.capacity = experiment.capacity or CapacitySpec()
        self.workloads: dict[Lengths, list[str]] = {}
        for workload in expand_workloads(experiment):
            self.workloads.setdefault(lengths_of(workload), []).append(workload.label)

    def situation(self, lengths: Lengths) -> Situation | None:
        """What was found at one combination of lengths; None: nothing was."""
        basis = self._basis(lengths)
        if basis is None:
            return None
        standings = tuple(self._standing(lengths, strategy, basis) for strategy in self._strategies.values())
        in_gpu = next((each for each in standings if each.strategy == self._in_gpu), None)
        return Situation(
            lengths=lengths,
            workloads=tuple(self.workloads[lengths]),
            basis=basis,
            in_gpu=None if in_gpu is None else in_gpu.strategy,
            standings=standings,
            choices=choose(standings, in_gpu, basis, has_objectives=self.capacity.has_objectives),
            break_evens=tuple(self._break_evens(lengths, standings, in_gpu, basis)),
        )

    def _basis(self, lengths: Lengths) -> Basis | None:
        limits = self._limits.get(lengths, {}).values()
        if any(limit.evidence != "traced" for limit in limits):
            return "search"
        if self._runs.get(lengths):
            return "cells"
        return "traces" if limits or self._traces.get(lengths) else None

    def _standing(self, lengths: Lengths, strategy: StrategySpec, basis: Basis) -> Standing:
        standing = self._counted(lengths, strategy, basis)
        label = strategy.label
        fidelity = self._fidelities.get((lengths, label)) or self._fidelities.get((None, label))
        return msgspec.structs.replace(standing, fidelity=fidelity, is_lossless=keeps_output(strategy, fidelity))

    def _counted(self, lengths: Lengths, strategy: StrategySpec, basis: Basis) -> Standing:
        label = strategy.label
        limit = self._limits.get(lengths, {}).get(label)
        runs, traces = (each.get(lengths, {}).get(label, []) for each in (self._runs, self._traces))
        if basis == "search":
            if limit is None or limit.evidence == "traced":
                return missing_standing(strategy, "not searched yet")
            return limit_standing(limit, self._probes.get(lengths, {}).get(label, []), self.capacity)
        if basis == "cells":
            return cell_standing(runs, traces, self.capacity) if runs else missing_standing(strategy, "not run yet")
        if limit is not None:
            return limit_standing(limit, (), self.capacity)
        return traced_cell_standing(traces) if traces else missing_standing(strategy, "not traced yet")

    def _break_evens(
        self, lengths: Lengths, standings: Sequence[Standing], in_gpu: Standing | None, basis: Basis
    ) -> list[BatchBreakEven]:
        if in_gpu is None or basis == "traces":
            return []
        timed = {each.strategy: self._timed(lengths, each, basis) for each in standings}
        found = (
            batch_break_even(each.strategy, timed[each.strategy], timed[in_gpu.strategy])
            for each in standings
            if each.family == "offload"
        )
        return [each for each in found if each is not None]

    def _timed(self, lengths: Lengths, standing: Standing, basis: Basis) -> list[TimedBatch]:
        places = self._probes if basis == "search" else self._runs
        records = places.get(lengths, {}).get(standing.strategy, [])
        own = [
            each
            for each in records
            if (each.spec.role == "time" if basis == "search" else each.status == "ok" and not ran_on_own_tokens(each))
        ]
        return timed_within(own, self.capacity, standing.sessions if basis == "search" else None)


def _by_place(records: Sequence[RunRecord]) -> dict[Lengths, dict[str, list[RunRecord]]]:
    places: dict[Lengths, dict[str, list[RunRecord]]] = {}
    for record in records:
        of_lengths = places.setdefault(lengths_of(record.spec.workload), {})
        of_lengths.setdefault(record.spec.strategy.label, []).append(record)
    return places


_Way = tuple[int, int | None, Attention | None]
"""What lengths have in common that differ in the prompt alone."""


def _over_contexts(situations: Sequence[Situation]) -> list[ContextBreakEven]:
    """One for each way of prefilling, attention and output length, and each strategy that offloads.

    Lengths at which it is not known of both what they give are left out.
    """
    best: dict[tuple[_Way, str, bool], dict[Lengths, BestBatches]] = {}
    none_run_ids: dict[tuple[_Way, str], list[str]] = {}
    for situation in situations:
        in_gpu, lengths = situation.in_gpu_standing, situation.lengths
        if in_gpu is None or situation.basis == "traces" or not _is_known(in_gpu):
            continue
        way: _Way = (lengths.output_tokens, lengths.prefill_chunk_tokens, lengths.attn_implementation)
        for each in situation.standings:
            if each.family == "offload" and _is_known(each):
                of_strategy = best.setdefault((way, each.strategy, situation.basis == "search"), {})
                of_strategy[lengths] = (each.fastest, in_gpu.fastest)
                lacking = [own for own in (each, in_gpu) if own.fastest is None]
                none_run_ids.setdefault((way, each.strategy), []).extend(
                    run_id for own in lacking for run_id in own.session_run_ids
                )
    found = (
        context_break_even(
            strategy, by_lengths, is_searched=is_searched, none_run_ids=tuple(none_run_ids[way, strategy])
        )
        for (way, strategy, is_searched), by_lengths in best.items()
    )
    return [each for each in found if each is not None]


def _is_known(standing: Standing) -> bool:
    return standing.fastest is not None or standing.has_no_batch
