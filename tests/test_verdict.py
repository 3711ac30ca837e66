"""The verdict: who is best at what, from where on offload pays, and which records say so.

Cells of the factories have 2 sessions of 157 tokens each. dynamic: TTFT 0.5 s and 156 steps of 10 ms, so that
2 * 157 / 2.06 = 152.4 tokens/s; 45 sessions by peak. streamed: 15 ms, 2 * 157 / 2.84 = 110.6 tokens/s; 45 sessions.
quantized: 12 ms, 2 * 157 / 2.372 = 132.4 tokens/s; (1,038,000 - 1,000,000) / 2 = 19,000 bytes a session, and
900,000 // 19,000 = 47 sessions.
"""

import re

import pytest
from factories import (
    DYNAMIC,
    QUANTIZED,
    STREAMED,
    make_budget,
    make_experiment,
    make_failure,
    make_fidelity,
    make_machine,
    make_quantized,
    make_record,
    make_spec,
    make_streamed,
    make_timing,
    make_traced,
    make_trials,
    make_workload,
)
from msgspec.structs import replace

from offload_eval.analysis.break_even import batch_break_even, context_break_even
from offload_eval.analysis.standings import family_of
from offload_eval.analysis.study import Study
from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.experiment import (
    MeasurementPlan,
    OffloadedSpec,
    OffloadedStaticSpec,
    StaticSpec,
    StreamedSpec,
)
from offload_eval.core.limits import Lengths, TimedBatch
from offload_eval.core.records import Conditions, PhaseSample, TrialSample
from offload_eval.core.run_spec import content_hash
from offload_eval.reporting.report import render_report
from offload_eval.reporting.sourced import Source, markdown, plain, telling_characters
from offload_eval.reporting.verdict_text import answer, overview, situation_lines

PLAN = MeasurementPlan(trials=0, memory_trials=1, transfer_trials=0, fidelity=False)


def batch(sessions, tokens_per_s, tpot_s=0.01):
    figures = {"trials": 3, "ttft_s": 0.5, "tpot_s": tpot_s, "tokens_per_s": tokens_per_s}
    return TimedBatch(sessions=sessions, run_id=f"{sessions}@{tokens_per_s}", **figures)


def probe(strategy, sessions, *, role="fit", tpot_s=None, status="ok", prompt_tokens=100):
    """A probe of a search; with a TPOT it is a timed one, of TTFT 0.5 s and 156 steps."""
    plan = PLAN if tpot_s is None else replace(PLAN, trials=3)
    load = make_workload(name=None, batch_size=sessions, prompt_tokens=prompt_tokens)
    spec = make_spec(strategy, workload=load, role="time" if tpot_s is not None else role, measurement=plan)
    phase = PhaseSample(peak_allocated_bytes=1_500_000)
    trials = (TrialSample(prefill=phase, decode=phase),) if tpot_s is None else (make_timing(tpot_s),) * 3
    if status == "oom":
        failed = make_failure("oom", strategy)
        return replace(failed, spec=spec, run_id=make_record(spec=spec).run_id, conditions=Conditions(cap_bytes=1))
    return make_record(spec=spec, trials=trials, fidelity=None, conditions=Conditions(cap_bytes=1_900_000))


def searched(**capacity):
    """Dynamic holds 4 sessions and streamed 9; at their limits they give 152.4 * 2 = 304.9 and 497.5 tokens/s."""
    spec = CapacitySpec(repeats=1, drills=False, **capacity)
    records = [
        probe(DYNAMIC, 4),
        probe(DYNAMIC, 5, status="oom"),
        probe(DYNAMIC, 4, tpot_s=0.010),
        probe(STREAMED, 9),
        probe(STREAMED, 10, status="oom"),
        probe(STREAMED, 9, tpot_s=0.015),
        probe(STREAMED, 4, tpot_s=0.014),
    ]
    return Study(make_experiment(strategies=(DYNAMIC, STREAMED), capacity=spec), records)


def choice_of(study, goal):
    (situation,) = study.verdict.situations
    return next((choice for choice in situation.choices if choice.goal == goal), None)


def words_of(study):
    (situation,) = study.verdict.situations
    return " ".join(plain(line) for line in situation_lines(situation, study.verdict))


class TestFamily:
    @pytest.mark.parametrize(
        ("strategy", "family"),
        [
            (DYNAMIC, "in-GPU"),
            (StaticSpec(), "in-GPU"),
            (OffloadedSpec(), "offload"),
            (OffloadedStaticSpec(), "offload"),
            (STREAMED, "offload"),
            (StreamedSpec(host_dtype="int4"), "offload"),
            (QUANTIZED, "quantization"),
        ],
    )
    def test_a_family_says_where_the_cache_is(self, strategy, family):
        assert family_of(strategy) == family


class TestCells:
    def test_each_strategy_stands_with_its_figures_and_their_records(self):
        records = [make_record(), make_streamed(), make_quantized()]
        (situation,) = Study(make_experiment(), records).verdict.situations
        assert situation.in_gpu == "dynamic"
        assert [each.sessions for each in situation.standings] == [45, 45, 47]
        assert [each.session_run_ids for each in situation.standings] == [(record.run_id,) for record in records]
        speeds = [each.fastest.tokens_per_s for each in situation.standings]
        assert speeds == pytest.approx([2 * 157 / 2.06, 2 * 157 / 2.84, 2 * 157 / 2.372])
        assert situation.basis == "cells"
        assert situation.standings[2].fidelity.mean_kl_nats == pytest.approx(0.02)
        assert situation.standings[2].fidelity.noise_floor_nats == pytest.approx(0.001)

    def test_the_in_gpu_cache_is_chosen_where_no_lossless_strategy_is_better_and_the_lossy_one_is_named(self):
        study = Study(make_experiment(), [make_record(), make_streamed(), make_quantized()])
        sessions, speed = choice_of(study, "sessions"), choice_of(study, "tokens_per_s")
        assert (sessions.strategy, sessions.value, sessions.over_in_gpu) == ("dynamic", 45, 1)
        assert (sessions.lossy, sessions.lossy_value) == ("quantized-hqq-int4", 47)
        assert (speed.strategy, speed.lossy) == ("dynamic", None)

    @pytest.mark.parametrize(("tpot_s", "chosen"), [(0.0096, "dynamic"), (0.0092, "streamed")])
    def test_less_than_5_percent_more_tokens_is_no_reason(self, tpot_s, chosen):
        # 2.06 / (0.5 + 156 * 0.0096) = 1.031, and / (0.5 + 156 * 0.0092) = 1.064.
        study = Study(make_experiment(), [make_record(), make_streamed(trials=make_trials(tpot_s))])
        assert choice_of(study, "tokens_per_s").strategy == chosen

    def test_what_a_fuller_batch_would_have_to_take_is_said(self):
        roomy = make_trials(0.015, prefill=PhaseSample(peak_allocated_bytes=1_020_000))
        smaller = tuple(replace(each, decode=PhaseSample(peak_allocated_bytes=1_018_000)) for each in roomy)
        study = Study(make_experiment(), [make_record(), make_streamed(trials=smaller)])
        # 10,000 bytes a session: 90 sessions, twice 45.
        assert (
            "Break-even: at the batches that ran, each at its best, of the in-GPU cache's tokens/s streamed gives "
            "0.73x. Full, and prefill aside, streamed gives more tokens/s only if a step of its 90 sessions takes "
            "less than 2.00x one of the in-GPU cache's 45: offload-eval capacity times both." in words_of(study)
        )

    def test_a_strategy_that_could_not_run_says_why(self):
        study = Study(make_experiment(), [make_record(), make_failure("unsupported", message="no such card")])
        assert "offload not known (streamed: no such card)" in words_of(study)

    def test_a_cell_on_tokens_of_its_own_is_chosen_for_no_speed(self):
        own = make_streamed(trials=make_trials(0.001), conditions=Conditions(forced_tokens=False))
        assert choice_of(Study(make_experiment(), [make_record(), own]), "tokens_per_s").strategy == "dynamic"

    def test_times_of_a_disk_decide_nothing(self):
        swapped = tuple(replace(each, swap_in_bytes=10**9, swap_out_bytes=0) for each in make_trials(0.001))
        study = Study(make_experiment(), [make_record(), make_streamed(trials=swapped)])
        assert choice_of(study, "tokens_per_s").strategy == "dynamic"

    def test_fidelity_is_that_of_the_same_lengths_else_the_worst_of_others_by_name(self):
        loads = (make_workload(), make_workload(name="long", prompt_tokens=200))
        records = [
            make_record(spec=make_spec(DYNAMIC, workload=loads[0])),
            make_record(spec=make_spec(DYNAMIC, workload=loads[1])),
            make_record(spec=make_spec(QUANTIZED, workload=loads[1]), fidelity=make_fidelity(0.3)),
            make_record(spec=make_spec(QUANTIZED, workload=loads[0]), fidelity=None),
        ]
        asked = make_experiment(workloads=loads, strategies=(DYNAMIC, QUANTIZED))
        study = Study(asked, records)
        small, long = study.verdict.situations
        assert small.standings[1].fidelity == long.standings[1].fidelity
        assert "under quantized-hqq-int4 on long" in " ".join(
            plain(line) for line in situation_lines(small, study.verdict)
        )
        records[-1] = replace(records[-1], fidelity=make_fidelity(0.1))
        small, long = Study(asked, records).verdict.situations
        assert small.standings[1].fidelity.mean_kl_nats == pytest.approx(0.1)


class TestSearch:
    def test_offload_is_chosen_where_it_holds_and_gives_more(self):
        study = searched()
        sessions, speed = choice_of(study, "sessions"), choice_of(study, "tokens_per_s")
        assert (sessions.strategy, sessions.value, sessions.over_in_gpu) == ("streamed", 9, 9 / 4)
        assert speed.strategy == "streamed"
        assert speed.value == pytest.approx(9 * 157 / (0.5 + 156 * 0.015))
        assert speed.over_in_gpu == pytest.approx(9 / 4 * 2.06 / 2.84)
        fit, failed = probe(STREAMED, 9), probe(STREAMED, 10, status="oom")
        assert sessions.run_ids == (fit.run_id, failed.run_id)
        assert speed.run_ids == (probe(STREAMED, 9, tpot_s=0.015).run_id,)

    def test_the_batch_from_which_offload_gives_more_lies_between_two_that_were_timed(self):
        (situation,) = searched().verdict.situations
        (found,) = situation.break_evens
        assert (found.strategy, found.wins_from, found.loses_up_to, found.best_at) == ("streamed", 9, 4, 9)

    def test_objectives_leave_the_batches_that_keep_them(self):
        study = searched(tpot_limit_s=0.0145)
        sessions = choice_of(study, "sessions")
        assert (sessions.strategy, sessions.value) == ("dynamic", 4)
        assert "under TPOT at most 14.5 ms" in words_of(study)
        # streamed at 4 sessions: 4 * 157 / (0.5 + 156 * 0.014) = 234.0 tokens/s, less than 304.9.
        assert choice_of(study, "tokens_per_s").strategy == "dynamic"

    def test_how_many_of_the_sessions_keep_them_is_said_where_not_all_do(self):
        study = searched(tpot_limit_s=0.0145)
        # streamed: 9 sessions, of which the 4 at 14 ms keep it; dynamic's 4 all do.
        assert "offload 9 under streamed, 2.25x of in-GPU, 4 of them within the objectives, against" in words_of(study)
        assert "in-GPU 4 under dynamic, against" in words_of(study)

    def test_a_strategy_that_never_keeps_them_is_named_and_not_chosen(self):
        study = searched(tpot_limit_s=0.012)
        assert "Never within TPOT at most 12 ms: streamed." in words_of(study)
        assert choice_of(study, "sessions").strategy == "dynamic"

    def test_nothing_is_chosen_where_nobody_keeps_them(self):
        study = searched(tpot_limit_s=0.001)
        assert choice_of(study, "sessions") is None
        assert "Never within TPOT at most 1 ms: dynamic, streamed." in words_of(study)

    def test_lengths_make_a_break_even_in_context(self):
        records = []
        for prompt_tokens, in_gpu, streamed in ((100, 8, 9), (400, 4, 9), (900, 2, 9)):
            for strategy, sessions, tpot_s in ((DYNAMIC, in_gpu, 0.010), (STREAMED, streamed, 0.015)):
                common = {"prompt_tokens": prompt_tokens}
                records += [
                    probe(strategy, sessions, **common),
                    probe(strategy, sessions + 1, status="oom", **common),
                    probe(strategy, sessions, tpot_s=tpot_s, **common),
                ]
        loads = tuple(make_workload(name=None, prompt_tokens=tokens) for tokens in (100, 400, 900))
        capacity = CapacitySpec(repeats=1)
        study = Study(make_experiment(workloads=loads, strategies=(DYNAMIC, STREAMED), capacity=capacity), records)
        # 9 / 8 * 2.06 / 2.84 = 0.816, 9 / 4 * 0.7254 = 1.632 and 9 / 2 * 0.7254 = 3.264.
        (found,) = study.verdict.break_evens
        assert (found.tokens, found.wins_from, found.best_at) == ((257, 557, 1057), 557, 1057)
        assert found.best_ratio == pytest.approx(9 / 2 * 2.06 / 2.84)
        assert (
            "streamed gives more tokens/s than the in-GPU cache from 557 tokens on, up to 1,057, and not at 257; at "
            "best 3.26x of the in-GPU cache's, at 1,057 tokens." in plain(overview(study.verdict)[-1])
        )
        assert len(answer(study.verdict)) == 3


class TestBreakEven:
    def test_never_is_an_answer(self):
        found = batch_break_even("s", [batch(1, 10), batch(8, 60)], [batch(4, 100)])
        assert (found.wins_from, found.loses_up_to, found.best_at) == (None, 8, 8)
        assert found.best_ratio == pytest.approx(0.6)

    def test_every_batch_may_win(self):
        found = batch_break_even("s", [batch(1, 200), batch(8, 300)], [batch(4, 100)])
        assert (found.wins_from, found.loses_up_to) == (1, None)

    def test_a_gain_that_ends_at_larger_batches_is_no_break_even(self):
        found = batch_break_even("s", [batch(6, 150), batch(9, 60)], [batch(4, 100)])
        assert (found.wins_from, found.loses_up_to, found.best_at) == (None, 9, 6)
        assert set(found.run_ids) == {"9@60", "6@150", "4@100"}

    @pytest.mark.parametrize(("tokens_per_s", "wins_from"), [(104, None), (106, 8)])
    def test_less_than_5_percent_is_no_gain(self, tokens_per_s, wins_from):
        assert batch_break_even("s", [batch(8, tokens_per_s)], [batch(4, 100)]).wins_from == wins_from

    def test_without_times_of_both_there_is_none(self):
        assert batch_break_even("s", [], [batch(4, 100)]) is None
        assert batch_break_even("s", [batch(4, 100)], []) is None
        assert self.contexts((batch(1, 1), batch(1, 1))) is None

    def test_a_gain_that_ends_at_longer_contexts_is_no_break_even(self):
        assert self.contexts((batch(1, 200), batch(1, 100)), (batch(1, 90), batch(1, 100))).wins_from is None

    def test_where_one_was_seen_to_have_no_batch_the_other_gives_more(self):
        found = self.contexts((batch(1, 50), batch(1, 100)), (batch(1, 50), None))
        assert (found.wins_from, found.best_ratio, found.best_at) == (110 * 2, 0.5, 110)
        alone = self.contexts((batch(1, 50), None), (batch(1, 50), None))
        assert (alone.wins_from, alone.best_ratio) == (110, None)
        assert self.contexts((batch(1, 200), batch(1, 100)), (None, batch(1, 100))).wins_from is None

    def contexts(self, *best):
        """At 110, 220, ... tokens of context."""
        lengths = [Lengths(prompt_tokens=110 * place - 10, output_tokens=10) for place in range(1, len(best) + 1)]
        return context_break_even("s", dict(zip(lengths, best, strict=True)), is_searched=True)


CHOSEN = ", the in-GPU cache: no other strategy without loss was seen to have"


class TestWhatIsNotKnown:
    """None is not zero: what nobody looked at is neither a win nor a loss."""

    def said(self, *records, **experiment):
        study = Study(make_experiment(**{"strategies": (DYNAMIC, STREAMED)} | experiment), records)
        lines = [line for each in study.verdict.situations for line in situation_lines(each, study.verdict)]
        return [plain(line) for line in lines], study

    def limits(self, dynamic=4, streamed=9, **changes):
        pairs = ((DYNAMIC, dynamic), (STREAMED, streamed))
        return [
            record
            for strategy, limit in pairs
            for record in (
                *([probe(strategy, limit, **changes)] if limit else []),
                probe(strategy, limit + 1, status="oom", **changes),
            )
        ]

    def capacity(self, **changes):
        return CapacitySpec(repeats=1, drills=False, **changes)

    def test_a_search_in_progress_is_not_filled_up_with_cells(self):
        cells = [make_record(), make_streamed()]
        half = [probe(DYNAMIC, 4), probe(DYNAMIC, 5, status="oom"), probe(DYNAMIC, 4, tpot_s=0.010)]
        said, study = self.said(*cells, *half, capacity=self.capacity())
        assert said[0] == (
            f"Choose for most sessions, no SLO being stated: dynamic, 4 sessions{CHOSEN} more. "
            "Not known of streamed (not searched yet)."
        )
        assert "offload not known (streamed: not searched yet)" in said[2]
        assert "The search is not done: 1 limits are missing" in render_report(study).split("### ")[0]

    def test_nothing_keeps_an_objective_that_was_not_timed(self):
        said, _ = self.said(*self.limits(), capacity=self.capacity(timing_trials=0, tpot_limit_s=0.001))
        assert said[0] == "Nothing was timed, so that it is not known what keeps TPOT at most 1 ms."
        assert not any("Choose" in line for line in said)

    def test_a_time_of_the_disk_is_not_known(self):
        swapped = probe(STREAMED, 9, tpot_s=0.5)
        swapped = replace(
            swapped, trials=tuple(replace(each, swap_in_bytes=10**9, swap_out_bytes=0) for each in swapped.trials)
        )
        said, _ = self.said(
            *self.limits(), probe(DYNAMIC, 4, tpot_s=0.010), swapped, capacity=self.capacity(tpot_limit_s=0.0145)
        )
        assert "dynamic, 4 sessions" in said[0]
        assert said[0].endswith("Not known of streamed.")  # its limit is known, its time is not
        assert "Timed only while the machine swapped, which counts for nothing: streamed." in said

    def test_an_in_gpu_cache_without_a_time_is_unknown_and_not_none(self):
        said, _ = self.said(*self.limits(), probe(STREAMED, 9, tpot_s=0.5), capacity=self.capacity())
        assert said[1].startswith(
            "Choose for most tokens/s, no SLO being stated: streamed, 18.0 tokens/s at 9 sessions."
        )
        assert "none" not in said[1]

    def test_an_in_gpu_cache_that_holds_nothing_has_none(self):
        records = [*self.limits(dynamic=0), probe(STREAMED, 9, tpot_s=0.015)]
        said, _ = self.said(*records, capacity=self.capacity())
        assert (
            said[0]
            == "Choose for most sessions, no SLO being stated: streamed, 9 sessions; the in-GPU cache has none."
        )
        assert said[1].endswith("tokens/s at 9 sessions; the in-GPU cache has none.")
        assert "in-GPU 0 under dynamic" in said[2]

    def test_a_crash_is_no_break_even(self):
        loads = (make_workload(name="a"), make_workload(name="b", prompt_tokens=200))
        records = [make_record(spec=make_spec(kind, workload=load)) for kind in (DYNAMIC, STREAMED) for load in loads]
        crash = make_failure("failed", DYNAMIC, spec=make_spec(DYNAMIC, workload=loads[1]))
        _, study = self.said(records[0], crash, *records[2:], workloads=loads)
        assert study.verdict.break_evens == ()
        assert "200 + 157 tokens (the in-GPU cache being unknown)" in " ".join(map(plain, overview(study.verdict)))

    def test_where_the_in_gpu_cache_ran_out_of_memory_the_break_even_says_so_and_names_the_record(self):
        loads = tuple(make_workload(name=f"b1-{tokens}", batch_size=1, prompt_tokens=tokens) for tokens in (100, 200))
        records = [make_record(spec=make_spec(kind, workload=load)) for kind in (DYNAMIC, STREAMED) for load in loads]
        lost = make_failure("oom", DYNAMIC, spec=make_spec(DYNAMIC, workload=loads[1]))
        lost = replace(lost, run_id=content_hash(lost.spec))
        _, study = self.said(records[0], lost, *records[2:], workloads=loads)
        (found,) = study.verdict.break_evens
        assert (found.wins_from, found.without_in_gpu) == (357, (357,))
        assert lost.run_id in found.run_ids
        assert (
            "at 357 tokens, the longest context, and not at 257; the in-GPU cache has no batch at 357 tokens; at best"
            in plain(overview(study.verdict)[-1])
        )

    def test_an_output_that_differs_is_a_loss_whatever_the_kind(self):
        roomy = tuple(
            replace(
                each,
                prefill=PhaseSample(peak_allocated_bytes=1_020_000),
                decode=PhaseSample(peak_allocated_bytes=1_018_000),
            )
            for each in make_trials(0.015)
        )
        said, study = self.said(make_record(), make_streamed(trials=roomy, fidelity=make_fidelity(0.5)))
        assert choice_of(study, "sessions").strategy == "dynamic"
        assert choice_of(study, "sessions").lossy == "streamed"
        assert "offload 90 under streamed, which loses something" in " ".join(said)
        assert re.search(r"Findings against these numbers, .*lossless_differs \(1\)", render_report(study))

    def test_a_batch_past_the_host_budget_gives_nothing(self):
        budget, offloaded = make_budget(host_bytes=5 * 16_384), OffloadedSpec()
        probes = [
            probe(DYNAMIC, 4),
            probe(DYNAMIC, 5, status="oom"),
            probe(DYNAMIC, 4, tpot_s=0.010),
            probe(offloaded, 9),
            probe(offloaded, 10, status="oom"),
            probe(offloaded, 9, tpot_s=0.005),
        ]
        specs = [replace(each.spec, budget=budget) for each in probes]
        records = [
            replace(each, spec=spec, run_id=content_hash(spec)) for each, spec in zip(probes, specs, strict=True)
        ]
        said, study = self.said(*records, strategies=(DYNAMIC, offloaded), budget=budget, capacity=self.capacity())
        assert "offload 5 under offloaded, 1.25x of in-GPU, by the arithmetic of host memory" in said[2]
        assert choice_of(study, "tokens_per_s").strategy == "dynamic"
        assert study.verdict.situations[0].break_evens == ()

    def test_a_cell_that_ran_out_of_memory_bounds_what_is_extrapolated(self):
        loads = (make_workload(), make_workload(name="big", batch_size=8))
        failed = make_failure("oom", DYNAMIC, spec=make_spec(DYNAMIC, workload=loads[1]))
        said, _ = self.said(make_record(), failed, workloads=loads)
        assert "in-GPU 7 under dynamic" in " ".join(said)

    @pytest.mark.parametrize(
        "stranger",
        [
            make_streamed(
                spec=make_spec(STREAMED, budget=make_budget(device_bytes=20_000_000)), trials=make_trials(0.005)
            ),
            make_streamed(machine=make_machine(cpu="Another"), started_at_utc="2020-01-01T00:00:00Z"),
            make_streamed(evidence="measured", started_at_utc="2020-01-01T00:00:00Z"),
        ],
        ids=["budget", "machine", "rung"],
    )
    def test_cells_of_another_budget_machine_or_rung_are_left_out(self, stranger):
        said, study = self.said(make_record(), stranger)
        assert "offload not known (streamed: not run yet)" in " ".join(said)
        assert study.verdict.num_left_out == 1
        assert "1 cells of another model, budget, version or machine" in render_report(study)

    def test_a_range_has_no_ratio_and_says_or_more(self):
        records = [
            probe(DYNAMIC, 4),
            probe(DYNAMIC, 8, status="oom"),
            probe(STREAMED, 6),
            probe(STREAMED, 10, status="oom"),
        ]
        said, _ = self.said(*records, capacity=self.capacity(timing_trials=0))
        assert said[0] == "Choose for most sessions, no SLO being stated: streamed, 6 sessions or more."
        assert (
            "in-GPU 4 or more under dynamic, against 54 by arithmetic; offload 6 or more under streamed, against"
            in said[1]
        )

    def test_at_all_means_every_combination_of_lengths(self):
        loads = [
            make_workload(name=name, prompt_tokens=tokens) for name, tokens in (("a", 100), ("b", 200), ("c", 300))
        ]
        records = [make_record(spec=make_spec(DYNAMIC, workload=load)) for load in loads[:2]]
        lost = make_failure("oom", DYNAMIC, spec=make_spec(DYNAMIC, workload=loads[2]))
        _, study = self.said(*records, lost, workloads=tuple(loads))
        first = plain(overview(study.verdict)[0])
        assert "at all" not in first
        assert first.endswith("At 300 + 157 tokens nothing is known of it.")

    def test_only_lossy_strategies_leave_a_choice_of_them(self):
        said, _ = self.said(make_failure("oom", DYNAMIC), make_quantized(), strategies=(DYNAMIC, QUANTIZED))
        assert said[0] == (
            "Choose for most sessions, no SLO being stated: none without loss is known. Where its loss is acceptable: "
            "quantized-hqq-int4, 47 sessions."
        )

    def test_cells_say_nothing_of_sessions_under_objectives(self):
        said, _ = self.said(make_record(), make_streamed(), capacity=self.capacity(tpot_limit_s=0.5))
        assert not any("most sessions" in line for line in said)
        assert "under TPOT at most 500 ms" in said[0]

    def test_contexts_of_other_output_lengths_are_not_held_against_one_another(self):
        loads = (make_workload(name="a"), make_workload(name="b", prompt_tokens=57, output_tokens=200))
        records = [make_record(spec=make_spec(kind, workload=load)) for kind in (DYNAMIC, STREAMED) for load in loads]
        assert self.said(*records, workloads=loads)[1].verdict.break_evens == ()

    def test_traces_alone_name_their_records(self):
        said, study = self.said(make_traced(), make_traced(STREAMED))
        assert said[0] == f"Choose for most sessions, by trace: dynamic, 48 sessions{CHOSEN} more."
        assert study.verdict.situations[0].standings[0].session_run_ids == (make_traced().run_id,)

    def test_bit_equal_elsewhere_says_where(self):
        loads = (make_workload(name="a"), make_workload(name="b", prompt_tokens=200))
        records = [make_record(spec=make_spec(DYNAMIC, workload=load)) for load in loads]
        records += [make_record(spec=make_spec(STREAMED, workload=loads[0]), fidelity=make_fidelity(0.0))]
        records += [make_record(spec=make_spec(STREAMED, workload=loads[1]), fidelity=None)]
        said, _ = self.said(*records, workloads=loads)
        assert [line for line in said if line.startswith("Output")] == [
            "Output: bit-equal under streamed.",
            "Output: bit-equal under streamed on a.",
        ]


class TestSources:
    def test_ids_are_as_short_as_tells_them_apart(self):
        record = make_record()
        assert telling_characters([record]) == 8
        alike = [replace(record, run_id=run_id) for run_id in ("0123456789abcdef", "0123456789ffffff")]
        assert telling_characters(alike) == 11

    def test_a_hostile_name_in_a_sentence_is_escaped(self):
        text = markdown(["a | <b> ", "of `x`", Source(("0123456789abcdef",)), "."], 8)
        assert text == "a &#124; &#60;b&#62; of &#96;x&#96; (`01234567`)."

    @pytest.mark.parametrize("study", [searched(), searched(tpot_limit_s=0.0145)], ids=["free", "objectives"])
    def test_every_line_with_a_number_of_a_record_names_it(self, study):
        self.check(study)

    def test_every_line_about_cells_names_them(self):
        self.check(Study(make_experiment(), [make_record(), make_streamed(), make_quantized()]))

    def check(self, study):
        section = render_report(study).split("## Verdict")[1].split("\n## ")[0]
        lines = [line for line in section.splitlines() if line.startswith("- ")]
        known = {record.run_id[:8] for record in study.records}
        assert len(lines) > 4
        for line in lines:
            ids = re.findall(r"`([0-9a-f]{8,16})`", line)
            assert ids, line
            assert {each[:8] for each in ids} <= known
