"""What is said of transfers, over records: expected values are worked out by hand in the comments."""

import msgspec
import pytest
from factories import (
    DYNAMIC,
    STREAMED,
    WEIGHTS_BYTES,
    make_experiment,
    make_facts,
    make_phase,
    make_phase_trace,
    make_record,
    make_shape,
    make_spec,
    make_streamed,
    make_timing,
    make_trace,
    make_traced,
    make_trial,
    make_trials,
    make_workload,
)

from offload_eval.analysis.calibrated_link import bandwidth_of, fitting_link
from offload_eval.analysis.comparison import Counterparts
from offload_eval.analysis.findings import find
from offload_eval.analysis.study import Study
from offload_eval.analysis.traced_totals import traced_decode
from offload_eval.analysis.transfers import explain_transfers, transfer_reference
from offload_eval.bounds.strategy_bound import moved_bytes
from offload_eval.core.experiment import CpuSpec, OffloadedSpec, OffloadedStaticSpec, StreamedSpec
from offload_eval.core.hardware import HardwareProfile, LinkProfile, PeakFlops, SourcedValue
from offload_eval.core.records import ProfiledCopies, ProfiledDirection
from offload_eval.core.shape import LayerGroup
from offload_eval.core.trace import PhaseTrace, StepTrace
from offload_eval.reporting.method_columns import METHODS
from offload_eval.reporting.report import render_report
from offload_eval.reporting.transfer_tables import TIMES, TRAFFIC, render_transfers

BELOW = "below_ideal_bound"


def sourced(value):
    return SourcedValue(value=value, source="test", date="2026-01-01")


def make_link(**changes):
    """10 MB/s alone and 6 MB/s opposed, 0.4 ms a copy."""
    rates = {"h2d_bytes_per_s": sourced(10e6), "d2h_bytes_per_s": sourced(10e6)}
    opposed = {"h2d_with_d2h_bytes_per_s": sourced(6e6), "d2h_with_h2d_bytes_per_s": sourced(6e6)}
    return LinkProfile(**{"name": "slow link", "latency_s": sourced(4e-4)} | rates | opposed | changes)


def make_hardware(emulated=False, **changes):
    """1 GFLOP/s and 1 GB/s of memory."""
    base = {
        "name": "small",
        "memory_bytes_per_s": sourced(1e9),
        "peak_flops_per_s": PeakFlops(bfloat16=sourced(1e9)),
        "link": make_link(emulated=emulated),
    }
    return HardwareProfile(**base | changes)


def make_moving(h2d_busy_s=0.9, tpot_s=0.015, evidence="measured", strategy=STREAMED, **decode):
    """156 steps that fetch 7,800,000 bytes in 156 copies, in 0.9 s unless told otherwise, and write nothing."""
    moved = {"h2d_bytes": 7_800_000, "d2h_bytes": 0, "num_h2d_copies": 156, "num_pageable_copies": 0}
    times = {"h2d_busy_s": h2d_busy_s, "d2h_busy_s": 0.0, "exposed_transfer_s": 0.78}
    sample = make_phase(1_030_000, **moved | times | decode)
    kv = {"kv_cache_device_bytes": 32_768, "kv_cache_host_bytes": 32_768}
    return make_record(strategy, trials=make_trials(tpot_s, decode=sample, **kv), evidence=evidence)


def codes(records, hardware=None):
    return [finding.code for finding in find(records, hardware)]


def decode_of(records, hardware=None):
    (found,) = [each for each in explain_transfers(records, hardware) if each.phase == "decode"]
    return found


class TestSpeed:
    def test_expected_time_counts_latency_and_bandwidth(self):
        # 156 copies of 0.4 ms and 7.8 MB at 10 MB/s: 0.0624 + 0.78 = 0.8424 s.
        use = decode_of([make_moving()], make_hardware()).h2d
        assert (use.expected_s, use.of_link_ratio) == (pytest.approx(0.8424), pytest.approx(0.936))
        assert use.bytes_per_s == pytest.approx(7.8e6 / 0.9)
        assert "link_below_calibration" not in codes([make_moving()], make_hardware())

    def test_a_link_more_than_a_tenth_below_is_a_finding(self):
        # With 156 times 0.01 ms between events: 0.844 / 0.94 = 0.898 and 0.844 / 0.93 = 0.907.
        assert "link_below_calibration" in codes([make_moving(0.94)], make_hardware())
        assert "link_below_calibration" not in codes([make_moving(0.93)], make_hardware())

    def test_where_no_latency_is_stated_a_copy_may_take_a_little_longer(self):
        # 0.78 s, and 156 times 0.01 ms on a device: 0.78156 / 0.9 = 0.8684 s.
        unstated = make_hardware(link=make_link(latency_s=None))
        assert "link_below_calibration" in codes([make_moving(0.8685)], unstated)
        assert "link_below_calibration" not in codes([make_moving(0.8683)], unstated)
        assert decode_of([make_moving(0.8)], unstated).h2d.of_link_ratio == pytest.approx(0.975)

    def test_a_stated_latency_takes_nothing_from_what_lies_between_two_events(self):
        # 0.78 s, and 156 times 0.001 ms of latency and 0.01 ms between events: 0.781716 / 0.9 = 0.86857 s.
        stated = make_hardware(link=make_link(latency_s=sourced(1e-6)))
        assert "link_below_calibration" not in codes([make_moving(0.8685)], stated)
        assert "link_below_calibration" in codes([make_moving(0.8686)], stated)

    def test_copies_that_latency_decides_say_nothing_of_bandwidth(self):
        # 156 of 5 ms are 0.78 s, as long as the bytes: less than nine tenths are the bytes'.
        slow = make_hardware(link=make_link(latency_s=sourced(5e-3)))
        assert "link_below_calibration" not in codes([make_moving(3.0)], slow)
        assert decode_of([make_moving(3.0)], slow).h2d.of_link_ratio == pytest.approx(1.56 / 3)

    def test_the_other_direction_counts_for_as_long_as_it_was_busy(self):
        assert bandwidth_of(make_link(), "h2d", 0.0) == 10e6
        assert bandwidth_of(make_link(), "h2d", 0.25) == pytest.approx(9e6)
        assert bandwidth_of(make_link(), "d2h", 1.0) == 6e6
        assert bandwidth_of(make_link(emulated=True), "h2d", 1.0) == 10e6, "one thread serves one copy at a time"
        assert bandwidth_of(make_link(h2d_bytes_per_s=None), "h2d", 0.0) is None

    def test_a_profile_of_another_rung_is_not_used_and_said_so(self):
        for record, hardware in (
            (make_moving(evidence="emulated"), make_hardware()),
            (make_moving(), make_hardware(emulated=True)),
            (make_moving(), make_hardware(link=None)),
        ):
            assert fitting_link(record, hardware) is None
            assert "hardware_not_used" in codes([record], hardware)
            assert decode_of([record], hardware).h2d.of_link_ratio is None
        assert "hardware_not_used" not in codes([make_moving()], make_hardware())

    def test_the_pace_is_the_calibration_of_an_emulated_link_without_another(self):
        paced = make_moving(evidence="emulated")
        paced = msgspec.structs.replace(paced, spec=make_spec(STREAMED, cpu=CpuSpec(link_bytes_per_s=8_000_000)))
        assert fitting_link(paced, None).h2d_bytes_per_s.value == 8_000_000
        assert fitting_link(paced, make_hardware()).h2d_bytes_per_s.value == 8_000_000
        assert fitting_link(paced, make_hardware(emulated=True)).h2d_bytes_per_s.value == 10e6
        assert fitting_link(make_moving(evidence="emulated"), None) is None


class TestExposed:
    def test_both_ways_and_the_hidden_share(self):
        # Waits: 0.78 s / 156 = 5 ms; 15 ms - 10 ms = 5 ms; 1 - 0.78 / 1.0 = 22 % is hidden.
        seen = decode_of([make_record(), make_streamed()])
        assert seen.exposed_by_waits_s == pytest.approx(0.005)
        assert seen.exposed_by_difference_s == pytest.approx(0.005)
        assert seen.hidden_ratio == pytest.approx(0.22)
        assert seen.reference == "dynamic"

    @pytest.mark.parametrize(("tpot_s", "disagrees"), [(0.0156, False), (0.0159, True), (0.0142, True)])
    def test_they_may_differ_by_a_twentieth_of_tpot(self, tpot_s, disagrees):
        # 0.6 ms of 15.6 ms is under 5 %; 0.9 ms of 15.9 ms and 0.8 ms of 14.2 ms are over.
        found = codes([make_record(evidence="measured"), make_moving(tpot_s=tpot_s)])
        assert ("exposed_time_disagrees" in found) == disagrees

    def test_noise_widens_what_they_may_differ_by(self):
        """TPOT of the trials ranges over 2 ms, so that 0.9 ms apart is nothing."""
        moving = make_moving(tpot_s=0.0159)
        trials = (moving.trials[0], make_timing(0.0149), make_timing(0.0169))
        noisy = msgspec.structs.replace(moving, trials=trials)
        assert "exposed_time_disagrees" not in codes([make_record(evidence="measured"), noisy])

    def test_the_message_says_what_either_sign_can_mean(self):
        for tpot_s, words in (
            (0.017, "takes longer than the reference's, or waits are missing"),
            (0.013, "takes less"),
        ):
            found = find([make_record(evidence="measured"), make_moving(tpot_s=tpot_s)])
            (message,) = [each.message for each in found if each.code == "exposed_time_disagrees"]
            assert words in message

    def test_one_step_that_waits_counts_in_both_alike(self):
        """One of 156 steps waits 200 ms: 1.282 ms a step by the waits, and by the steps."""
        times = (0.210,) + (0.010,) * 155
        decode = make_phase(1_030_000, 7_800_000, exposed_transfer_s=0.2, h2d_busy_s=0.9, d2h_busy_s=0.1)
        seen = decode_of(
            [make_record(), make_streamed(trials=(make_trial(inter_token_latencies_s=times, decode=decode),) * 3)]
        )
        assert seen.exposed_by_waits_s == pytest.approx(0.2 / 156)
        assert seen.exposed_by_difference_s == pytest.approx(0.2 / 156)

    def test_the_noise_of_a_mean_is_two_of_its_standard_errors(self):
        """Steps are 4 and 6 ms longer in turn, each 1 ms from the mean: 2 * sqrt(156 / 155) / sqrt(156) ms."""
        trial = make_trial(inter_token_latencies_s=(0.014, 0.016) * 78, decode=make_streamed().trials[0].decode)
        seen = decode_of([make_record(), make_streamed(trials=(trial,))])
        assert seen.difference_noise_s == pytest.approx(2e-3 / 155**0.5)

    @pytest.mark.parametrize(
        ("knobs", "tpot_s", "severity"),
        [
            ({}, 0.017, "warning"),
            ({"host_dtype": "int8"}, 0.017, "note"),
            ({"host_dtype": "int8"}, 0.013, "warning"),
            ({"host_dtype": "int8", "resident_share": 1.0}, 0.017, "warning"),
        ],
    )
    def test_dequantizing_is_an_expected_cause_of_longer_steps_alone(self, knobs, tpot_s, severity):
        """Waits are 5 ms a step, and steps 7 or 3 ms longer; with every layer resident nothing is dequantized."""
        strategy = msgspec.structs.replace(STREAMED, **knobs)
        found = find([make_record(evidence="measured"), make_moving(tpot_s=tpot_s, strategy=strategy)])
        (finding,) = [each for each in found if each.code == "exposed_time_disagrees"]
        assert finding.severity == severity
        assert ("dequantizing" in finding.message) == (severity == "note")

    def test_steps_are_compared_at_the_same_length(self):
        """Latencies grow alike from 10 to 25 ms and from 13 to 28 ms: 3 ms at every length."""
        growing = [tuple(start + step * 1e-4 for step in range(156)) for start in (0.010, 0.013)]
        baseline, streamed = (
            msgspec.structs.replace(record, trials=(make_trial(inter_token_latencies_s=times, decode=decode),))
            for record, times, decode in (
                (make_record(), growing[0], make_phase(1_036_000)),
                (make_streamed(), growing[1], make_streamed().trials[0].decode),
            )
        )
        seen = decode_of([baseline, streamed])
        assert seen.exposed_by_difference_s == pytest.approx(0.003)
        # The last 15 of 156: from 13 + 14.1 to 13 + 15.5 ms, the middle at 27.8 ms.
        assert seen.end_latency_s == pytest.approx(0.0278)

    def test_the_reference_of_streamed_is_a_resident_one_which_is_the_same_cache_whatever_its_other_knobs(self):
        baseline, streamed = make_record(), make_streamed()
        quantized = make_record(StreamedSpec(host_dtype="int4"))
        resident = make_record(StreamedSpec(resident_share=1.0))
        other = make_record(StreamedSpec(resident_share=1.0, host_dtype="int8", prefetch_layers=5))
        for each in (streamed, quantized):
            assert transfer_reference(each, Counterparts([baseline, streamed, quantized])) is baseline
            assert transfer_reference(each, Counterparts([baseline, streamed, quantized, resident])) is resident
            assert transfer_reference(each, Counterparts([baseline, streamed, quantized, other])) is other
        assert transfer_reference(resident, Counterparts([baseline, streamed, resident, other])) is baseline
        assert transfer_reference(baseline, Counterparts([baseline])) is None


def step_of(step, h2d, d2h, copies=2, **changes):
    moved = {"h2d_bytes": h2d, "d2h_bytes": d2h, "num_h2d_copies": copies, "num_d2h_copies": 2}
    parts = {"TinyForCausalLM": 33_488}
    return StepTrace(step=step, **make_phase_trace(1_033_488, 32_768, parts, **moved | changes))


class TestTrace:
    def test_steps_between_the_traced_ones_are_on_a_line(self):
        # 155 steps from 1,000 to 1,000 + 154 * 10 = 2,540 bytes are 155 * 1,770 = 274,350; the last fetches 900.
        trace = make_trace(
            STREAMED, steps=(step_of(1, 1000, 64), step_of(155, 2540, 64), step_of(156, 900, 64, copies=1))
        )
        assert traced_decode(make_streamed(), trace) == (274_350 + 900, 156 * 64, 155 * 2 + 1, 156 * 2)

    def test_where_the_line_may_bend_nothing_is_claimed(self):
        trace = make_trace(STREAMED, steps=(step_of(1, 1000, 64), step_of(155, 2540, 64), step_of(156, 900, 64)))
        window = LayerGroup(count=2, cache="sliding", window_tokens=50, kv_heads=2, key_head_dim=4, value_head_dim=4)
        windowed = make_streamed(model=make_facts(shape=make_shape(layer_groups=(window,))))
        assert traced_decode(windowed, trace) is None
        assert traced_decode(make_streamed(model=make_facts(shape=None, shape_refusal="unknown")), trace) is None
        coded = make_streamed(spec=make_spec(StreamedSpec(host_dtype="int4")))
        assert traced_decode(coded, trace) == traced_decode(make_streamed(), trace) is not None, "rows of one size"
        short = make_trace(STREAMED, steps=(step_of(1, 1000, 64), step_of(156, 900, 64)))
        assert traced_decode(make_streamed(), short) is None

    def test_a_trace_in_full_is_summed_whatever_the_model(self):
        workload = make_workload(output_tokens=3)
        trace = make_trace(STREAMED, workload=workload, steps=(step_of(1, 1000, 64), step_of(2, 7, 64, copies=1)))
        unknown = make_streamed(model=make_facts(shape=None, shape_refusal="unknown"))
        assert traced_decode(unknown, trace) == (1007, 128, 3, 4)

    @pytest.mark.parametrize(("seen_bytes", "differs"), [(5_120, False), (5_136, True)])
    def test_a_prefill_is_held_to_its_trace_less_what_the_baselines_sends(self, seen_bytes, differs):
        """A window's layers are set up with two scalars of 8 bytes, under the baseline as well."""
        parts = {"TinyForCausalLM": 37_488}
        own = {"h2d_bytes": 16, "num_h2d_copies": 2}
        fetched = {"h2d_bytes": 5_136, "num_h2d_copies": 3, "d2h_bytes": 640, "num_d2h_copies": 2}
        traces = [
            make_traced(
                strategy,
                trace=make_trace(strategy, prefill=PhaseTrace(**make_phase_trace(1_037_488, 0, parts, **moved))),
            )
            for strategy, moved in ((DYNAMIC, own), (STREAMED, fetched))
        ]
        prefill = make_phase(h2d_bytes=seen_bytes, d2h_bytes=640, num_h2d_copies=1, num_d2h_copies=2)
        trials = make_trials(0.015, prefill=prefill, decode=make_phase(1_030_000))
        assert ("transfers_differ_from_trace" in codes([make_streamed(trials=trials), *traces])) == differs
        assert "transfers_differ_from_trace" not in codes([make_streamed(trials=trials), traces[1]])

    @pytest.mark.parametrize(
        ("own_of_last", "seen_bytes", "differs"), [(32, 0, False), (32, 32, True), (64, 32, False)]
    )
    def test_decode_is_held_to_its_trace_less_the_models_own_copies(self, own_of_last, seen_bytes, differs):
        """The model sends 32 bytes in one copy a step, which no link counts; where they grow nothing is claimed."""
        own = [step_of(step, size, 0, copies=1, num_d2h_copies=0) for step, size in ((1, 32), (156, own_of_last))]
        steps = (step_of(1, 1032, 64, copies=3), step_of(155, 2572, 64, copies=3), step_of(156, 932, 64, copies=2))
        traces = [
            make_traced(DYNAMIC, trace=make_trace(DYNAMIC, steps=tuple(own))),
            make_traced(STREAMED, trace=make_trace(STREAMED, steps=steps)),
        ]
        counted = {"num_h2d_copies": 155 * 2 + 1, "num_d2h_copies": 156 * 2, "h2d_bytes": 274_350 + 900 + seen_bytes}
        run = make_streamed(trials=make_trials(0.015, decode=make_phase(1_030_000, d2h_bytes=156 * 64, **counted)))
        assert ("transfers_differ_from_trace" in codes([run, *traces])) == differs
        assert "transfers_differ_from_trace" in codes([run, traces[1]]), "nobody says which copies are the model's"

    @pytest.mark.parametrize(
        ("strategy", "fetched", "written"),
        # A token of both layers is 128 bytes for the batch, 156 steps: buffers of 256 tokens; or 100 to 255 tokens.
        [
            (OffloadedStaticSpec(), 156 * 256 * 128, 156 * 256 * 128),
            (STREAMED, 0, 19_968),  # both layers stay in the two slots
            # One slot; a head's 4 values are 2 bytes and two numbers of 2 instead of 8.
            (msgspec.structs.replace(STREAMED, host_dtype="int4"), 3_544_320 * 6 // 8, 19_968 * 6 // 8),
            (OffloadedSpec(), 3_544_320, 3_544_320 + 19_968),
            (DYNAMIC, 0, 0),
        ],
    )
    def test_the_card_of_all_steps(self, strategy, fetched, written):
        assert moved_bytes(make_spec(strategy), make_facts()) == (fetched, written)


class TestBounds:
    def test_a_tpot_below_the_first_steps_ideal_bound_is_the_instruments_fault(self):
        # 2e7 FLOPs at 1 GFLOP/s are 20 ms for the first step already; TPOT is 15 ms.
        steps = (step_of(1, 0, 0, matmul_flops=20_000_000), step_of(156, 0, 0, matmul_flops=30_000_000))
        traced = make_traced(STREAMED, trace=make_trace(STREAMED, steps=steps))
        seen = decode_of([make_moving(), traced], make_hardware())
        assert (seen.floor_s, seen.ideal_s) == (pytest.approx(0.020), pytest.approx(0.030))
        assert "below_ideal_bound" in codes([make_moving(), traced], make_hardware())

    def test_a_ttft_below_the_prefills_ideal_bound_is_found(self):
        # 0.6 GFLOP at 1 GFLOP/s take 600 ms, 0.4 take 400; 9 MB at 10 MB/s are 900 ms and do not count.
        parts = {"generate": 1_037_488 - WEIGHTS_BYTES}
        run = make_record(
            STREAMED, trials=make_trials(0.015, prefill=make_phase(moved_bytes=9_000_000)), evidence="measured"
        )
        for flops, is_found in ((600_000_000, True), (400_000_000, False)):
            moved = {"matmul_flops": flops, "d2h_bytes": 9_000_000}
            prefill = PhaseTrace(**make_phase_trace(1_037_488, 0, parts, **moved))
            traced = make_traced(STREAMED, trace=make_trace(STREAMED, prefill=prefill))
            messages = [each.message for each in find([run, traced], make_hardware()) if each.code == BELOW]
            start = "small / streamed: TTFT is 500.000 ms where the ideal bound is 600.000 ms"
            assert [message[: len(start)] for message in messages] == [start] * is_found

    @pytest.mark.parametrize(("flops", "is_found"), [(15_400_000, False), (15_500_000, True)])
    def test_a_latency_may_lie_3_percent_below_its_bound(self, flops, is_found):
        # 15 ms are 0.974 of 15.4 ms, and 0.968 of 15.5 ms.
        steps = (step_of(1, 0, 0, matmul_flops=flops), step_of(156, 0, 0, matmul_flops=30_000_000))
        traced = make_traced(STREAMED, trace=make_trace(STREAMED, steps=steps))
        messages = [each.message for each in find([make_moving(), traced], make_hardware()) if each.code == BELOW]
        assert ["more than the 3% below it" in message for message in messages] == [True] * is_found

    def test_a_mean_below_the_last_steps_bound_is_none(self):
        steps = (step_of(1, 0, 0, matmul_flops=14_000_000), step_of(156, 0, 0, matmul_flops=30_000_000))
        traced = make_traced(STREAMED, trace=make_trace(STREAMED, steps=steps))
        assert "below_ideal_bound" not in codes([make_moving(), traced], make_hardware())

    def test_without_peaks_there_are_no_bounds(self):
        traced = make_traced(STREAMED, trace=make_trace(STREAMED))
        assert decode_of([make_moving(), traced], make_hardware(peak_flops_per_s=PeakFlops())).ideal_s is None
        assert decode_of([make_moving()], make_hardware()).ideal_s is None


def make_profiled(**changes):
    """Ten copies of 1,000 bytes and 1 ms each, by the profiler and by the account; nothing goes the other way."""
    same = {
        "bytes": 10_000, "num_copies": 10, "num_pageable_copies": 0, "copy_s": 0.010, "accounted_bytes": 10_000,
        "num_accounted_copies": 10, "accounted_busy_s": 0.010, "num_other_copies": 17,
    }  # fmt: skip
    nothing = ProfiledDirection(**dict.fromkeys(same, 0))
    profiled = ProfiledCopies(output_tokens=17, h2d=ProfiledDirection(**same | changes), d2h=nothing)
    record = make_record(evidence="measured")
    first = msgspec.structs.replace(record.trials[0], profiled_copies=profiled)
    return msgspec.structs.replace(record, trials=(first, *record.trials[1:]))


class TestProfiler:
    @pytest.mark.parametrize(
        ("changes", "code"),
        [
            ({"bytes": 11_000, "num_copies": 11}, "profiler_bytes_differ"),
            ({"accounted_bytes": 10_001}, "profiler_bytes_differ"),
            # 5 % of 10 ms and 10 times 5 µs: 0.55 ms more are allowed, and 0.5 ms less.
            ({"accounted_busy_s": 0.01056}, "profiler_time_differs"),
            ({"accounted_busy_s": 0.00949}, "profiler_time_differs"),
            ({"num_copies": 0, "bytes": 0, "copy_s": 0.0, "num_other_copies": 0}, "profiler_saw_nothing"),
        ],
    )
    def test_what_differs_is_found_alone(self, changes, code):
        assert codes([make_profiled(**changes)]) == [code]

    @pytest.mark.parametrize("changes", [{}, {"accounted_busy_s": 0.01054}, {"accounted_busy_s": 0.00951}])
    def test_what_agrees_is_not(self, changes):
        assert codes([make_profiled(**changes)]) == []


class TestReport:
    def test_every_number_has_its_unit_and_its_rung(self):
        # 7.8 MB / 156 steps = 48.83 KiB; 0.9 s / 156 = 5.769 ms; 7.8 MB / 0.9 s = 0.008667 GB/s; 0.8424 / 0.9.
        steps = (step_of(1, 0, 0, matmul_flops=1_000_000), step_of(156, 0, 0, matmul_flops=3_000_000))
        traced = make_traced(STREAMED, trace=make_trace(STREAMED, steps=steps))
        text = render_transfers([make_record(evidence="measured"), make_moving(), traced], make_hardware())
        assert "held against slow link. Bounds: of small" in text
        assert "Traffic of a decode step, measured: small" in text
        assert table_rows(text, "H2D (KiB)") == [
            {
                "strategy": "streamed",
                "H2D (KiB)": "48.83",
                "D2H (B)": "0",
                "H2D copies": "1.000",
                "pageable, whole phase (copies)": "0",
                "H2D busy (ms)": "5.769",
                "D2H busy (ms)": "0",
                "H2D speed (GB/s)": "0.008667",
                "H2D of the link (%)": "93.6",
            }
        ]
        (times,) = table_rows(text, "hidden (%)")
        assert (times["exposed by waits (ms)"], times["exposed by difference (ms)"]) == ("5.000", "5.000")
        # 1 - 0.78 / 0.9 = 13.3 %; 3 MFLOP at 1 GFLOP/s is 3 ms, more than 1 MB of weights at 1 GB/s.
        assert (times["hidden (%)"], times["reference"]) == ("13.3", "dynamic")
        assert (times["end latency (ms)"], times["ideal, traced (ms)"]) == ("15.00", "3.000")

    def test_without_a_calibrated_link_the_report_says_what_is_missing(self):
        text = render_transfers([make_moving()])
        assert "No calibrated link is known" in text
        assert "of the link" not in text

    def test_nothing_is_said_where_no_cell_uses_the_link(self):
        assert render_transfers([make_record()], make_hardware()) == ""
        assert "No cell that uses the link has been measured." in render_report(
            Study(make_experiment(), [make_record()])
        )

    def test_every_column_is_in_the_method_table(self):
        named = " ".join(method.columns for method in METHODS)
        for column in (*TRAFFIC, *TIMES):
            title = column.title.split(" (")[0].split(",")[0]
            assert title in named or title == "reference", title


def table_rows(text, title):
    """The rows of the one table with a column of that title, as a reader sees them."""
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|") and title in block]
    ((head, _, *rows),) = blocks
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in (head, *rows)]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[1:]]


def test_records_from_before_copies_were_counted_still_load_and_say_nothing_of_them():
    old = msgspec.json.decode(b'{"h2d_bytes": 5, "d2h_bytes": 6}', type=type(make_phase()))
    assert (old.num_h2d_copies, old.num_d2h_copies, old.num_pageable_copies) == (None, None, None)
    assert codes([make_record(DYNAMIC), make_streamed()]) == []
