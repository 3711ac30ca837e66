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
    make_experiment,
    make_failure,
    make_fidelity,
    make_quantized,
    make_record,
    make_spec,
    make_streamed,
    make_timing,
    make_trials,
    make_workload,
)
from msgspec.structs import replace

from offload_eval.analysis.break_even import batch_break_even, context_break_even
from offload_eval.analysis.study import Study
from offload_eval.analysis.verdict import family_of
from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.experiment import (
    MeasurementPlan,
    OffloadedSpec,
    OffloadedStaticSpec,
    StaticSpec,
    StreamedSpec,
)
from offload_eval.core.limits import TimedBatch
from offload_eval.core.records import Conditions, PhaseSample, TrialSample
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
        assert not any(each.is_searched for each in situation.standings)
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
            "streamed gives more tokens/s only if a step of its 90 sessions takes less than 2.00x one of the in-GPU "
            "cache's 45" in words_of(study)
        )
        assert "Break-even: as timed, of the in-GPU cache's tokens/s streamed gives 0.73x" in words_of(study)

    def test_a_strategy_that_could_not_run_says_why(self):
        study = Study(make_experiment(), [make_record(), make_failure("unsupported", message="no such card")])
        assert "offload (streamed) none: no such card" in words_of(study)

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
        study = Study(make_experiment(workloads=loads), records)
        small, long = study.verdict.situations
        assert small.standings[1].fidelity == long.standings[1].fidelity
        assert "under quantized-hqq-int4 on long" in " ".join(
            plain(line) for line in situation_lines(small, study.verdict)
        )
        records[-1] = replace(records[-1], fidelity=make_fidelity(0.1))
        small, long = Study(make_experiment(workloads=loads), records).verdict.situations
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
            "streamed gives more tokens/s than the in-GPU cache from 557 tokens on, and not at 257; at best 3.26x of "
            "the in-GPU cache's, at 1,057 tokens." in plain(overview(study.verdict)[-1])
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

    def test_without_times_of_both_there_is_none(self):
        assert batch_break_even("s", [], [batch(4, 100)]) is None
        assert batch_break_even("s", [batch(4, 100)], []) is None
        assert context_break_even("s", {100: (batch(1, 1), batch(1, 1))}) is None

    def test_a_gain_that_ends_at_longer_contexts_is_no_break_even(self):
        lost = {100: (batch(1, 200), batch(1, 100)), 200: (batch(1, 90), batch(1, 100))}
        assert context_break_even("s", lost).wins_from is None

    def test_where_the_in_gpu_cache_has_no_batch_offload_gives_more(self):
        found = context_break_even("s", {100: (batch(1, 50), batch(1, 100)), 200: (batch(1, 50), None)})
        assert (found.wins_from, found.best_ratio, found.best_at) == (200, 0.5, 100)
        alone = context_break_even("s", {100: (batch(1, 50), None), 200: (batch(1, 50), None)})
        assert (alone.wins_from, alone.best_ratio) == (100, None)


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
