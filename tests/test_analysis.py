"""Judgement over records: expected values are worked out by hand in the comments."""

import re

import msgspec
import pytest
from factories import (
    DYNAMIC,
    QUANTIZED,
    STREAMED,
    WEIGHTS_BYTES,
    make_budget,
    make_conditions,
    make_facts,
    make_failure,
    make_fidelity,
    make_machine,
    make_phase,
    make_quantized,
    make_record,
    make_shape,
    make_spec,
    make_streamed,
    make_timing,
    make_trial,
    make_trials,
    make_workload,
)

from offload_eval.analysis import statistics
from offload_eval.analysis.capacity import (
    analytic_bound,
    analytic_sessions,
    bytes_per_session_by_peak,
    sessions_by_peak,
)
from offload_eval.analysis.cells import (
    busy_s_per_step,
    bytes_moved_per_token,
    exposed_s_per_token,
    latest_records,
    mean_kl_nats,
    merged_sample,
    noise_floor_nats,
)
from offload_eval.analysis.comparison import compare_with_baseline
from offload_eval.analysis.findings import CELL_RULES, DIRECTORY_RULES, find
from offload_eval.analysis.swap import SwapUse, is_swapped, swap_use
from offload_eval.core.experiment import MeasurementPlan, OffloadedSpec, QuantizedSpec, StaticSpec
from offload_eval.core.records import Conditions, PhaseSample, TrialSample
from offload_eval.core.shape import LayerGroup


def codes(findings):
    return [finding.code for finding in findings]


class TestIntervals:
    def test_no_samples_have_no_interval(self):
        assert statistics.summarize([]) is None

    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_too_few_samples_give_their_range_without_a_confidence(self, count):
        # Five samples cover the median with 1 - 2 * (1/2)^5 = 0.9375, which is under 0.95.
        interval = statistics.summarize([float(value) for value in range(count, 0, -1)])
        assert (interval.low, interval.high, interval.confidence) == (1.0, float(count), None)
        assert (interval.samples, interval.median) == (count, (count + 1) / 2)

    def test_six_samples_are_the_first_to_have_a_confidence(self):
        # 1 - 2 * (1/2)^6 = 0.96875 for minimum to maximum.
        interval = statistics.summarize([6.0, 1.0, 5.0, 2.0, 4.0, 3.0])
        assert (interval.median, interval.low, interval.high, interval.confidence) == (3.5, 1.0, 6.0, 0.96875)

    def test_nine_samples_drop_one_at_each_end(self):
        # Second to eighth: 1 - 2 * (C(9,0) + C(9,1)) / 2^9 = 1 - 20/512 = 0.9609375.
        interval = statistics.summarize([float(value) for value in range(1, 10)])
        assert (interval.low, interval.high, interval.confidence) == (2.0, 8.0, 0.9609375)

    def test_eight_samples_may_not(self):
        # Second to seventh: 1 - 2 * (1 + 8) / 2^8 = 0.9297, under 0.95; first to eighth: 1 - 2/256 = 0.9921875.
        interval = statistics.summarize([float(value) for value in range(1, 9)])
        assert (interval.low, interval.high, interval.confidence) == (1.0, 8.0, 0.9921875)

    @pytest.mark.parametrize(("percent", "expected"), [(25, 10.0), (26, 20.0), (50, 20.0), (99, 40.0), (100, 40.0)])
    def test_percentiles_are_nearest_rank(self, percent, expected):
        assert statistics.percentile([40.0, 10.0, 30.0, 20.0], percent) == expected

    def test_percentile_of_nothing_is_absent_and_of_0_is_refused(self):
        assert statistics.percentile([], 50) is None
        with pytest.raises(ValueError, match="percent is 0; allowed: 1 to 100"):
            statistics.percentile([1.0], 0)

    def test_spread_is_the_range_over_the_median(self):
        assert statistics.relative_spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)

    @pytest.mark.parametrize("samples", [[], [1.0], [0.0, 0.0]])
    def test_spread_without_a_denominator_is_absent(self, samples):
        assert statistics.relative_spread(samples) is None


class TestTimes:
    def test_tpot_leaves_the_first_token_out(self):
        # (2.0 - 0.5) / (4 - 1)
        assert statistics.tpot_s(TrialSample(ttft_s=0.5, e2e_latency_s=2.0, output_tokens=4)) == 0.5

    @pytest.mark.parametrize("missing", ["ttft_s", "e2e_latency_s", "output_tokens"])
    def test_tpot_of_an_untimed_trial_is_absent(self, missing):
        assert statistics.tpot_s(make_timing(**{missing: None})) is None

    def test_tpot_of_one_token_is_absent(self):
        assert statistics.tpot_s(make_timing(output_tokens=1)) is None

    def test_throughput_counts_the_batch_and_the_prefill(self):
        # 2 * 157 / (0.5 + 156 * 0.010) = 314 / 2.06
        assert statistics.tokens_per_s(make_timing(), batch_size=2) == pytest.approx(152.427, abs=1e-3)
        assert statistics.tokens_per_s(TrialSample(), batch_size=2) is None

    def test_a_record_gives_medians_over_its_trials(self):
        record = make_record(trials=(make_trial(0.010), make_timing(0.030), make_timing(0.011)))
        assert statistics.summarize_tpot(record).median == pytest.approx(0.011)
        assert statistics.summarize_ttft(record).median == 0.5
        # 314 / (0.5 + 156 * 0.011)
        assert statistics.summarize_throughput(record).median == pytest.approx(141.697, abs=1e-3)

    def test_latencies_of_all_trials_are_pooled(self):
        # 312 latencies of 10 ms and 156 of 50 ms: rank ceil(4.68 * 50) = 234 and ceil(4.68 * 99) = 464.
        record = make_record(trials=(make_trial(0.010), make_timing(0.050), make_timing(0.010)))
        assert statistics.itl_percentile_s(record, 50) == 0.010
        assert statistics.itl_percentile_s(record, 99) == 0.050

    def test_a_record_without_trials_has_no_times(self):
        record = make_failure("failed")
        assert statistics.summarize_tpot(record) is None
        assert statistics.itl_percentile_s(record, 50) is None


class TestCells:
    def test_a_retried_cell_counts_once_by_its_last_record(self):
        done = make_streamed()
        assert latest_records([make_failure("failed"), make_record(), done]) == (done, make_record())

    def test_passes_are_laid_over_one_another(self):
        memory = TrialSample(decode=PhaseSample(peak_allocated_bytes=7), kv_cache_host_bytes=0)
        transfer = TrialSample(decode=PhaseSample(h2d_bytes=5))
        merged = merged_sample(make_record(trials=(make_timing(), memory, transfer)))
        assert merged.decode == PhaseSample(peak_allocated_bytes=7, h2d_bytes=5)
        # 0 was looked at, None was not.
        assert (merged.kv_cache_host_bytes, merged.kv_cache_device_bytes) == (0, None)

    def test_peaks_of_several_trials_are_the_highest_and_the_rest_the_median(self):
        trials = [
            TrialSample(
                peak_host_rss_bytes=peak,
                pinned_requested_bytes=moved,
                num_alloc_retries=retries,
                decode=PhaseSample(
                    peak_allocated_bytes=peak,
                    peak_reserved_bytes=peak + 1,
                    peak_device_used_bytes=peak + 2,
                    h2d_bytes=moved,
                    h2d_busy_s=busy_s,
                    exposed_transfer_s=busy_s / 4,
                ),
            )
            for peak, moved, busy_s, retries in ((10, 100, 0.5, 1), (30, 104, 4.0, 0), (20, 900, 1.0, 2))
        ]
        merged = merged_sample(make_record(trials=trials))
        peaks = (merged.decode.peak_allocated_bytes, merged.decode.peak_reserved_bytes)
        assert (*peaks, merged.decode.peak_device_used_bytes, merged.peak_host_rss_bytes) == (30, 31, 32, 30)
        assert (merged.decode.h2d_bytes, merged.pinned_requested_bytes) == (104, 104)
        assert (merged.decode.h2d_busy_s, merged.decode.exposed_transfer_s) == (1.0, 0.25)
        assert merged.num_alloc_retries == 3

    def test_a_median_of_bytes_is_whole(self):
        trials = [TrialSample(decode=PhaseSample(h2d_bytes=size)) for size in (4, 7)]
        assert repr(merged_sample(make_record(trials=trials)).decode.h2d_bytes) == "6"

    def test_bytes_moved_count_both_directions_for_each_session(self):
        # (7,800,000 + 7,800,000) / (156 steps * 2 sessions)
        assert bytes_moved_per_token(make_streamed()) == 50_000

    @pytest.mark.parametrize("missing", ["h2d_bytes", "d2h_bytes"])
    def test_bytes_moved_are_absent_when_one_direction_is(self, missing):
        decode = make_phase(**{missing: None})
        assert bytes_moved_per_token(make_streamed(trials=make_trials(decode=decode))) is None

    def test_exposed_time_is_a_part_of_tpot_and_not_divided_by_the_batch(self):
        # 0.78 s / 156 steps
        assert exposed_s_per_token(make_streamed()) == pytest.approx(0.005)
        assert exposed_s_per_token(make_failure("oom")) is None

    def test_link_time_is_a_step_s(self):
        # 0.4 s and 0.1 s over 156 steps
        assert busy_s_per_step(make_streamed(), "h2d") == pytest.approx(0.9 / 156)
        assert busy_s_per_step(make_streamed(), "d2h") == pytest.approx(0.1 / 156)
        assert busy_s_per_step(make_record(), "h2d") is None

    def test_mean_kl_is_over_positions(self):
        fidelity = msgspec.structs.replace(make_fidelity(), kl_nats=(0.25, 0.75))
        assert mean_kl_nats(make_streamed(fidelity=fidelity)) == 0.5
        assert mean_kl_nats(make_streamed(fidelity=None)) is None
        assert noise_floor_nats(make_streamed()) is None

    def test_the_baselines_comparison_with_itself_is_a_noise_floor_and_no_kl(self):
        assert mean_kl_nats(make_record()) is None
        assert noise_floor_nats(make_record()) == pytest.approx(0.001)


class TestCapacity:
    def test_arithmetic(self):
        # 900,000 // (256 tokens * 64 bytes)
        assert analytic_sessions(make_record()) == 54
        # 900,000 // (100 prompt tokens * 18 bytes + 127 unquantized ones * 64 bytes), before the flush
        assert analytic_sessions(make_quantized()) == 90

    def test_no_shape_means_no_bound(self):
        record = make_record(model=make_facts(shape=None))
        assert analytic_bound(record) is None
        assert analytic_sessions(record) is None

    def test_sessions_by_peak_come_from_the_worse_phase(self):
        # (1,040,000 - 1,000,000) / 2 = 20,000 a session; 900,000 // 20,000
        assert bytes_per_session_by_peak(make_record()) == 20_000
        assert sessions_by_peak(make_record()) == 45
        # Decode is the worse one here: 30,000 a session.
        trials = make_trials(decode=make_phase(1_060_000))
        assert sessions_by_peak(make_record(trials=trials)) == 30

    def test_a_session_is_rounded_up(self):
        # 40,001 / 2 = 20,000.5
        record = make_record(trials=make_trials(prefill=make_phase(1_040_001)))
        assert bytes_per_session_by_peak(record) == 20_001
        assert sessions_by_peak(record) == 44

    def test_the_budget_may_state_other_weights_than_the_run_loaded(self):
        # The run's 1,000,000 come off the peak; the deployment's 1,500,000 come off the budget: 400,000 // 20,000.
        spec = make_spec(budget=make_budget(weights_bytes=1_500_000))
        assert sessions_by_peak(make_record(spec=spec)) == 20

    def test_what_is_live_before_any_session_is_no_sessions(self):
        # Of the 40,000 bytes above the weights, a library's workspace holds 10,000 already: 15,000 a session.
        record = make_record(conditions=make_conditions(baseline_bytes=WEIGHTS_BYTES + 10_000))
        assert bytes_per_session_by_peak(record) == 15_000
        # It comes off the budget too: 890,000 // 15,000.
        assert sessions_by_peak(record) == 59

    def test_weights_that_the_budget_states_take_the_place_of_what_was_live(self):
        # 2,000,000 - 1,500,000 - 100,000 = 400,000 // 15,000
        spec = make_spec(budget=make_budget(weights_bytes=1_500_000))
        conditions = make_conditions(baseline_bytes=WEIGHTS_BYTES + 10_000)
        assert sessions_by_peak(make_record(spec=spec, conditions=conditions)) == 26

    def test_where_nothing_was_counted_before_the_weights_stand_for_it(self):
        assert bytes_per_session_by_peak(make_record(conditions=Conditions())) == 20_000

    def test_the_highest_of_several_memory_trials_decides(self):
        # (1,050,000 - 1,000,000) / 2 = 25,000 a session.
        trials = (make_trial(), make_trial(prefill=make_phase(1_050_000)), make_trial())
        assert sessions_by_peak(make_record(trials=trials)) == 36

    @pytest.mark.parametrize(
        "record",
        [
            make_record(status="oom"),
            make_record(trials=(make_timing(),)),
            make_record(trials=make_trials(prefill=make_phase(None))),
            make_record(trials=make_trials(decode=make_phase(None))),
            make_record(trials=make_trials(prefill=make_phase(900_000), decode=make_phase(1_000_000))),
        ],
        ids=["not ok", "no memory pass", "no prefill", "no decode", "below the weights"],
    )
    def test_sessions_by_peak_are_absent_when_a_phase_is_unknown(self, record):
        assert sessions_by_peak(record) is None


class TestComparison:
    def test_ratios_are_strategy_over_baseline(self):
        (comparison,) = compare_with_baseline([make_record(), make_streamed()])
        assert (comparison.workload, comparison.strategy) == ("small", "streamed")
        assert comparison.baseline_run_id == make_record().run_id
        assert comparison.tpot_ratio == pytest.approx(1.5)
        assert comparison.ttft_ratio == 1.0
        # (0.5 + 156 * 0.010) / (0.5 + 156 * 0.015) = 2.06 / 2.84
        assert comparison.throughput_ratio == pytest.approx(2.06 / 2.84)
        assert comparison.prefill_peak_saved_bytes == 0
        assert comparison.decode_peak_saved_bytes == 6_000
        assert comparison.kv_device_saved_bytes == 0
        assert comparison.sessions_gained == 0
        assert comparison.extra_bytes_moved_per_token == 50_000
        assert (comparison.mean_kl_nats, comparison.noise_floor_nats) == (0.0, pytest.approx(0.001))

    def test_sessions_gained_are_those_by_peak(self):
        # 900,000 // 19,000 = 47 against 45.
        (comparison,) = compare_with_baseline([make_record(), make_quantized()])
        assert comparison.sessions_gained == 2

    @pytest.mark.parametrize(("baseline_bytes", "extra"), [(None, 50_000), (780_000, 45_000)])
    def test_a_baseline_that_does_not_use_the_link_moves_nothing(self, baseline_bytes, extra):
        # 2 * 780,000 / 312 = 5,000 a token.
        baseline = make_record(trials=make_trials(decode=make_phase(1_036_000, baseline_bytes)))
        (comparison,) = compare_with_baseline([baseline, make_streamed()])
        assert comparison.extra_bytes_moved_per_token == extra
        (comparison,) = compare_with_baseline([baseline, make_quantized()])
        assert comparison.extra_bytes_moved_per_token is None

    def test_a_cell_that_ran_on_its_own_tokens_is_compared_with_nothing(self):
        own = make_streamed(fidelity=None, conditions=make_conditions(forced_tokens=False))
        assert compare_with_baseline([make_record(), own]) == ()

    def test_a_missing_side_leaves_its_figure_absent(self):
        untimed = make_record(trials=(), fidelity=None)
        (comparison,) = compare_with_baseline([untimed, make_streamed()])
        figures = ("tpot_ratio", "ttft_ratio", "throughput_ratio", "prefill_peak_saved_bytes", "sessions_gained")
        assert [getattr(comparison, name) for name in figures] == [None] * 5
        assert comparison.noise_floor_nats is None

    def test_each_workload_has_its_own_baseline(self):
        long = make_workload(name="long", prompt_tokens=500)
        other = [
            make_record(spec=make_spec(strategy, workload=long), trials=make_trials(tpot_s))
            for strategy, tpot_s in ((DYNAMIC, 0.020), (STREAMED, 0.040))
        ]
        comparisons = compare_with_baseline([make_record(), *other, make_streamed()])
        ratios = {comparison.workload: comparison.tpot_ratio for comparison in comparisons}
        assert ratios == {"long": pytest.approx(2.0), "small": pytest.approx(1.5)}

    @pytest.mark.parametrize(
        "baseline",
        [
            make_failure("oom", DYNAMIC),
            make_record(evidence="measured"),
            make_record(machine=make_machine(cpu="Other CPU")),
            make_record(spec=make_spec(workload=make_workload(seed=9))),
            make_record(spec=make_spec(model_fingerprint="other")),
        ],
        ids=["not ok", "another rung", "another machine", "same label, other workload", "another model"],
    )
    def test_only_cells_that_differ_in_the_strategy_alone_are_compared(self, baseline):
        assert compare_with_baseline([baseline, make_streamed()]) == ()

    def test_another_commit_is_the_same_machine(self):
        baseline = make_record(machine=make_machine(git_commit="abc"))
        assert len(compare_with_baseline([baseline, make_streamed()])) == 1

    def test_only_ok_cells_are_compared(self):
        assert compare_with_baseline([make_record(), make_failure("oom")]) == ()


SHORT = make_workload(output_tokens=128)
UNFLUSHED = make_spec(QUANTIZED, workload=SHORT)
OFFLOADED = OffloadedSpec()
OLD_UPSTREAM = make_machine(versions={"torch": "2.13.0", "transformers": "5.19.1"})


def make_offloaded(machine=None, host_bytes=32_768):
    """Two and a half layers of 8,192 bytes a session are on the device at once: 43 sessions; 40 by this peak."""
    trials = make_trials(prefill=make_phase(1_045_000), kv_cache_device_bytes=0, kv_cache_host_bytes=host_bytes)
    record = make_record(OFFLOADED, trials=trials, fidelity=make_fidelity(0.0))
    return record if machine is None else msgspec.structs.replace(record, machine=machine)


def make_unflushed(strategy=QUANTIZED, output_tokens=128, kv_bytes=19_856):
    """A cell of 128 tokens: 127 decode steps, one short of the residual window.

    100 tokens of 32 values at 4.5 bits and 127 of 64 bytes: 2 * (1,800 + 8,128) = 19,856 bytes.
    """
    workload = make_workload(output_tokens=output_tokens)
    return make_quantized(
        spec=make_spec(strategy, workload=workload),
        run_id=f"unflushed-{output_tokens}-{strategy.label}",
        trials=make_trials(kv_cache_device_bytes=kv_bytes),
    )


def make_compiled(num_compilations, **changes):
    """A static cell, compiled, whose trials have that many compilations each."""
    trials = tuple(msgspec.structs.replace(trial, num_compilations=num_compilations) for trial in make_trials())
    spec = make_spec(StaticSpec(compile="default"))
    return make_record(spec=spec, trials=trials, fidelity=make_fidelity(), **changes)


def make_moved(prefill=(), decode=()):
    """A streamed cell whose copies were counted: 128 bytes for each of 100 + ... + 255 tokens to the device.

    That is 156 * 355 / 2 * 128 = 3,544,320 bytes, of which the first 12,800 / 2 are fetched when the prefill ends.
    """
    copies = {"num_h2d_copies": 1, "num_d2h_copies": 312, "num_pageable_copies": 0}
    first = {"h2d_bytes": 6_400, "d2h_bytes": 12_800} | copies | dict(prefill)
    later = {"h2d_bytes": 3_537_920, "d2h_bytes": 19_968} | copies | dict(decode)
    phases = {"prefill": make_phase(**first), "decode": make_phase(1_030_000, **later)}
    held = {"kv_cache_device_bytes": 16_384, "kv_cache_host_bytes": 32_768}
    four_layers = make_shape(layer_groups=(LayerGroup(count=4, kv_heads=1, key_head_dim=4, value_head_dim=4),))
    return make_streamed(trials=make_trials(0.015, **phases, **held), model=make_facts(shape=four_layers))


PLANTED = {
    "contended_machine": ("warning", make_streamed(conditions=Conditions(contention_ratio=1.51))),
    "tpot_spread": ("warning", make_record(trials=(make_trial(0.010), make_timing(0.0111), make_timing(0.010)))),
    "leaked_bytes": ("warning", make_streamed(conditions=Conditions(leaked_bytes=1))),
    "swap_traffic": ("warning", make_record(trials=make_trials(swap_out_bytes=4096))),
    "cgroup_swap": ("warning", make_record(trials=make_trials(cgroup_swap_bytes=4096))),
    # Three rounds of 0.5 + 156 * 0.010 = 2.06 s: a hundredth of 6.18 s are 618 faults of 0.1 ms.
    "major_faults": ("warning", make_record(trials=make_trials(num_major_faults=619))),
    "alloc_retries": ("warning", make_record(trials=make_trials(num_alloc_retries=1))),
    "few_trials": ("warning", make_record(trials=make_trials()[:2])),
    "no_memory_pass": ("warning", make_record(trials=(make_timing(),) * 3)),
    "compiled_while_timed": ("error", make_compiled(num_compilations=1, evidence="measured")),
    "memory_not_compiled": ("note", make_compiled(num_compilations=0)),
    "unsupported": ("note", make_failure("unsupported")),
    "timeout": ("warning", make_failure("timeout")),
    "failed": ("error", make_failure("failed")),
    "out_of_memory": ("warning", make_failure("oom")),
    "kv_payload_differs": ("error", make_record(trials=make_trials(kv_cache_device_bytes=32_767))),
    "own_tokens": ("error", make_streamed(fidelity=None, conditions=make_conditions(forced_tokens=False))),
    # (1,030,000 - 1,000,000) / 2 = 15,000 a session: 60 sessions against 54.
    "sessions_above_bound": (
        "error",
        make_record(trials=make_trials(prefill=make_phase(1_030_000), decode=make_phase(1_030_000))),
    ),
    "peak_below_weights": (
        "error",
        make_record(trials=make_trials(prefill=make_phase(999_999), decode=make_phase(999_999))),
    ),
    "no_analytic_bound": ("note", make_record(model=make_facts(shape=None, shape_refusal="mamba is not known"))),
    "no_reference": ("warning", make_streamed(fidelity=None)),
    "no_flush": ("warning", make_unflushed()),
    "offload_race": ("warning", make_offloaded(OLD_UPSTREAM)),
    # Two layers' new rows, of 64 bytes a token together, for 2 sessions and 156 steps are 19,968 bytes; one row more.
    "transfers_differ_from_card": ("error", make_moved(decode={"d2h_bytes": 20_032})),
    "pageable_copies": ("warning", make_moved(prefill={"num_pageable_copies": 1})),
}
"""Rules over one record: code -> severity and a record in which that rule alone has something to say."""


class TestFindings:
    def test_clean_cells_have_none(self):
        assert find([make_record(), make_streamed(), make_quantized()]) == ()
        assert find([make_offloaded()]) == ()
        assert find([make_moved()]) == ()
        assert find([]) == ()

    @pytest.mark.parametrize("code", PLANTED)
    def test_a_planted_fault_is_found_alone(self, code):
        severity, record = PLANTED[code]
        (finding,) = find([record])
        assert (finding.code, finding.severity, finding.run_ids) == (code, severity, (record.run_id,))
        assert finding.message.startswith(f"{record.spec.label}: ")

    def test_every_rule_has_a_planted_fault(self):
        # check_outcome speaks for four statuses.
        assert len(PLANTED) == len(CELL_RULES) + 3

    @pytest.mark.parametrize(
        "record",
        [
            make_streamed(conditions=Conditions(contention_ratio=1.5, leaked_bytes=0)),
            make_record(trials=(make_trial(0.010), make_timing(0.0109), make_timing(0.010))),
            make_streamed(conditions=Conditions()),
            make_offloaded(make_machine(versions={})),
            make_offloaded(make_machine(versions={"transformers": "5.20.0.dev0"})),
            # 228 and 227 tokens of 32 values at 4.5 bits; 227 at 8 bits and 2 layers' 8 bytes of scales.
            make_unflushed(output_tokens=129, kv_bytes=8_208),
            make_unflushed(QuantizedSpec(backend="fp8"), kv_bytes=14_544),
            make_unflushed(QuantizedSpec(backend="hqq", residual_length=127), kv_bytes=8_172),
            make_streamed(fidelity=None, spec=make_spec(STREAMED, measurement=MeasurementPlan(fidelity=False))),
        ],
        ids=[
            "contention",
            "spread",
            "unknown",
            "no version",
            "version",
            "flush",
            "fp8",
            "short window",
            "no fidelity planned",
        ],
    )
    def test_a_value_at_its_limit_or_unknown_is_not_a_fault(self, record):
        assert find([record]) == ()

    def test_a_traced_cell_needs_no_trials(self):
        record = make_record(evidence="traced", trials=(make_trial(ttft_s=None, e2e_latency_s=None),))
        assert find([record]) == ()

    def test_running_out_of_an_enforced_budget_is_an_answer(self):
        (finding,) = find([make_failure("oom", conditions=Conditions(cap_bytes=2 * 1024**2))])
        assert (finding.code, finding.severity) == ("out_of_memory", "note")
        assert finding.message.endswith(
            "the cell does not fit the enforced cap of 2.00 MiB: during the memory pass, in prefill: "
            "ProblemError: no memory"
        )

    def test_a_few_major_faults_are_a_note_with_what_they_may_have_cost(self):
        (finding,) = find([make_record(trials=make_trials(num_major_faults=618))])
        assert (finding.code, finding.severity, finding.remedy) == ("major_faults", "note", "")
        assert "618 times in 6.18 s of timing passes: at 0.1 ms each 1.00% of that time (limit 1%)" in finding.message
        assert "Suspected cause" in finding.message

    def test_what_swapped_is_summed_over_trials_and_of_a_group_the_most(self):
        trials = (make_trial(swap_in_bytes=3, cgroup_swap_bytes=5), make_trial(swap_in_bytes=4, cgroup_swap_bytes=2))
        assert swap_use(make_record(trials=trials)) == SwapUse(in_bytes=7, out_bytes=0, cgroup_bytes=5)

    @pytest.mark.parametrize(
        ("seen", "expected"),
        [
            ({}, False),
            ({"swap_in_bytes": 1}, True),
            ({"swap_out_bytes": 1}, True),
            ({"cgroup_swap_bytes": 1}, True),
            ({"swap_in_bytes": None, "swap_out_bytes": None, "cgroup_swap_bytes": 0}, False),
            ({"swap_in_bytes": None, "swap_out_bytes": None}, None),
        ],
        ids=["none", "in", "out", "group", "group alone", "unseen"],
    )
    def test_a_cell_is_marked_where_any_swap_was_seen(self, seen, expected):
        assert is_swapped(make_record(trials=make_trials(**seen))) is expected

    def test_running_out_of_the_budgets_host_memory_is_an_answer_too(self):
        failed = {"type": "HostCapError", "ledger": "host", "stage": "warmup"}
        conditions = Conditions(cap_bytes=2 * 1024**2, host_cap_bytes=1024**2)
        (finding,) = find([make_failure("oom", failed=failed, conditions=conditions)])
        assert (finding.code, finding.severity) == ("out_of_memory", "note")
        assert finding.message.endswith(
            "the cell does not fit the enforced host cap of 1.00 MiB: during the warmup pass, in prefill: "
            "HostCapError: no memory"
        )

    @pytest.mark.parametrize(
        ("failed", "cap_bytes", "said"),
        [
            ({"ledger": "device"}, None, "ran out of device memory during the memory pass, in prefill"),
            ({"ledger": "host"}, None, "ran out of host memory during the memory pass, in prefill"),
            ({"ledger": "host"}, 2**21, "ran out of host memory during the memory pass, in prefill"),
            ({"ledger": None}, None, "ran out of memory during the memory pass, in prefill"),
            ({"stage": "load", "phase": None}, 2**21, "ran out of device memory while the model was loaded:"),
            ({"stage": "fidelity"}, 2**21, "ran out of device memory during the fidelity pass, in prefill"),
        ],
        ids=["device", "host", "host under a cap", "unknown", "load under a cap", "a pass without the cap"],
    )
    def test_running_out_of_the_machines_memory_says_nothing_of_a_budget(self, failed, cap_bytes, said):
        spec = make_spec(STREAMED, budget=make_budget(enforce=cap_bytes is not None))
        conditions = Conditions(cap_bytes=cap_bytes)
        (finding,) = find([make_failure("oom", spec=spec, failed=failed, conditions=conditions)])
        assert (finding.code, finding.severity) == ("out_of_memory", "warning")
        assert f"the cell {said}" in finding.message
        assert not re.search(r"budget|cap|fit", finding.message + finding.remedy)

    @pytest.mark.parametrize(
        ("status", "failed", "said"),
        [
            ("failed", {"stage": "timing", "phase": "decode"}, "the cell failed during the timing pass, in decode: "),
            ("failed", {"stage": "load", "phase": None}, "the cell failed while the model was loaded: ProblemError"),
            ("timeout", {"stage": "warmup", "phase": None}, "after 3,600 s, during the warmup pass: ProblemError"),
        ],
    )
    def test_a_failure_says_where(self, status, failed, said):
        (finding,) = find([make_failure(status, failed=failed)])
        assert said in finding.message

    def test_what_is_unsupported_gives_its_reason_alone(self):
        refused = {"type": "Unsupported", "stage": "support", "phase": None}
        (finding,) = find([make_failure("unsupported", message="it needs a GPU", failed=refused)])
        assert finding.message == "small / streamed: this strategy cannot run here: it needs a GPU"

    @pytest.mark.parametrize(
        ("record", "said"),
        [
            (
                make_record(trials=make_trials(kv_cache_device_bytes=32_770)),
                "32,770 bytes on the device where the arithmetic gives 32,768: 2 bytes more",
            ),
            (
                make_record(trials=make_trials(kv_cache_host_bytes=1)),
                "1 bytes on the host where the arithmetic gives 0: 1 bytes more",
            ),
            (
                make_record(trials=(make_trial(), make_trial(kv_cache_device_bytes=5), make_trial())),
                "5 bytes on the device where the arithmetic gives 32,768: 32,763 bytes fewer",
            ),
            (
                make_streamed(trials=make_trials(kv_cache_device_bytes=0, kv_cache_host_bytes=32_768)),
                "0 bytes on the device where the arithmetic gives 32,768: 32,768 bytes fewer",
            ),
            (
                make_streamed(trials=make_trials(kv_cache_device_bytes=32_768, kv_cache_host_bytes=32_767)),
                "32,767 bytes on the host where the arithmetic gives 32,768: 1 bytes fewer",
            ),
            (
                make_quantized(trials=make_trials(kv_cache_device_bytes=11_790)),
                "11,790 bytes on the device where the arithmetic gives 11,792: 2 bytes fewer",
            ),
            (
                make_unflushed(QuantizedSpec(backend="fp8"), kv_bytes=14_528),
                "14,528 bytes on the device where the arithmetic gives 14,544: 16 bytes fewer",
            ),
            (
                make_offloaded(host_bytes=32_767),
                "32,767 bytes on both ledgers together where the arithmetic gives at least 32,768: 1 bytes fewer",
            ),
        ],
        ids=["more", "host", "a later trial", "scratch", "host rows", "quantized", "scales", "offloaded"],
    )
    def test_a_cache_holds_what_its_card_says_in_each_ledger(self, record, said):
        (finding,) = [finding for finding in find([record]) if finding.code == "kv_payload_differs"]
        assert said in finding.message

    def test_a_session_of_a_quantized_cache_may_be_rounded_up_by_a_byte(self):
        assert find([make_quantized(trials=make_trials(kv_cache_device_bytes=11_791))]) == ()

    def test_copies_of_an_offloaded_cache_are_its_own_affair(self):
        assert find([make_offloaded(host_bytes=40_000)]) == ()

    def test_a_lossless_strategy_above_the_noise_floor_is_an_error(self):
        (finding,) = find([make_record(), make_streamed(fidelity=make_fidelity(0.002))])
        assert (finding.code, finding.severity) == ("lossless_differs", "error")
        assert "0.002 nats, above the workload's noise floor of 0.001 nats" in finding.message

    def test_two_roundings_of_one_result_are_no_alarm(self):
        """A floor of 1e-16 nats and 1e-13 above it are both the last bits of the logits; 1e-11 is not."""
        floor = make_record(fidelity=make_fidelity(1e-16, against="chunked_prefill"))
        codes = [find([floor, make_streamed(fidelity=make_fidelity(kl))])[0].code for kl in (1e-13, 1e-11)]
        assert codes == ["lossless_not_bit_equal", "lossless_differs"]

    @pytest.mark.parametrize("others", [[make_record()], []], ids=["at the floor", "floor unknown"])
    def test_a_lossless_strategy_that_is_not_bit_equal_is_noted(self, others):
        (finding,) = find([*others, make_streamed(fidelity=make_fidelity(0.001))])
        assert (finding.code, finding.severity) == ("lossless_not_bit_equal", "note")

    def test_a_lossless_strategy_against_a_lossy_baseline_need_not_agree(self):
        spec = make_spec(STREAMED, baseline=QUANTIZED)
        assert find([make_streamed(spec=spec, fidelity=make_fidelity(5.0))]) == ()

    @pytest.mark.parametrize("phase", ["prefill", "decode"])
    def test_a_peak_above_the_baselines_is_found_in_its_phase(self, phase):
        peaks = {"prefill": make_phase(1_040_000), "decode": make_phase(1_036_000)}
        higher = msgspec.structs.replace(peaks[phase], peak_allocated_bytes=peaks[phase].peak_allocated_bytes + 2048)
        record = make_quantized(trials=make_trials(**peaks | {phase: higher}, kv_cache_device_bytes=11_792))
        (finding,) = find([make_record(), record])
        assert finding.code == "peak_above_baseline"
        assert f"the {phase} peak is 2.00 KiB (2,048 bytes) above" in finding.message
        assert finding.run_ids == (record.run_id, make_record().run_id)

    @pytest.mark.parametrize(
        ("record", "code", "said"),
        [
            (make_streamed(evidence="measured"), "mixed_evidence", "emulated, measured"),
            (make_streamed(machine=make_machine(cpu="Other CPU")), "mixed_machines", "cpu: Test CPU -> Other CPU"),
            (
                make_streamed(spec=make_spec(STREAMED, model_fingerprint="other")),
                "mixed_specs",
                "another model_fingerprint than",
            ),
            (
                make_streamed(spec=make_spec(STREAMED, prompt_fingerprint="other")),
                "mixed_specs",
                "another prompt_fingerprint than",
            ),
        ],
    )
    def test_records_that_do_not_belong_together_are_found(self, record, code, said):
        (finding,) = find([make_record(), record])
        assert (finding.code, finding.severity) == (code, "warning")
        assert said in finding.message
        assert len(DIRECTORY_RULES) == 5

    def test_each_workload_has_its_own_prompt(self):
        long = make_spec(workload=make_workload(name="long"), prompt_fingerprint="other")
        assert find([make_record(), make_record(spec=long)]) == ()

    def test_a_cell_on_its_own_tokens_is_not_said_to_lack_a_reference(self):
        own = make_streamed(fidelity=None, conditions=make_conditions(forced_tokens=False))
        assert codes(find([make_record(), own])) == ["own_tokens"]

    def test_what_several_cells_share_is_said_once(self):
        load = Conditions(contention_ratio=2.0)
        records = [make_record(conditions=load), make_streamed(conditions=load), make_quantized()]
        (finding,) = find(records)
        assert finding.run_ids == (records[0].run_id, records[1].run_id)
        assert finding.message.startswith("small / dynamic, small / streamed: a parallel operation")

    def test_errors_come_first(self):
        records = [
            make_record(trials=make_trials()[:2]),
            make_failure("unsupported", QUANTIZED),
            make_failure("failed"),
        ]
        assert codes(find(records)) == ["failed", "few_trials", "unsupported"]

    def test_a_retried_cell_is_judged_by_its_last_record(self):
        assert find([make_record(), make_failure("failed"), make_streamed()]) == ()
