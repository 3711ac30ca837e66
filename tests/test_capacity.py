"""The largest batch that really runs: how it is searched, what is concluded, and a search over real models."""

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from factories import (
    DYNAMIC,
    QUANTIZED,
    STREAMED,
    make_experiment,
    make_machine,
    make_phase_trace,
    make_record,
    make_spec,
    make_trace,
    make_traced,
    make_workload,
)
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console

from offload_eval.analysis.limits import find_limits, has_failed_search
from offload_eval.analysis.policy import policy_of
from offload_eval.analysis.study import Study
from offload_eval.bounds.limit_search import next_batch
from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.experiment import BudgetSpec, FactorsSpec, MeasurementPlan
from offload_eval.core.factors import expand_workloads, lengths_alone
from offload_eval.core.records import Conditions, Failure, PhaseSample, TrialSample
from offload_eval.core.trace import PhaseTrace, StepTrace
from offload_eval.reporting.capacity_tables import limits_frame, render_limits, show_under_objectives
from offload_eval.reporting.report import render_report
from offload_eval.reporting.terminal import render_terminal

CONFIGS = Path(__file__).parents[1] / "configs"
MIB = 1024**2


def search(peak, available, start, slope=None, most=4096, max_probes=100):
    """What a search finds against a real peak, and how many batches it tried."""
    seen = {}
    while len(seen) < max_probes:
        batch = next_batch(seen, available, start=start, most=most, slope_bytes=slope)
        if batch is None:
            break
        assert batch not in seen
        assert 1 <= batch <= most
        seen[batch] = peak(batch) if peak(batch) <= available else None
    passing = [batch for batch, size in seen.items() if size is not None]
    return max(passing, default=0), len(seen)


class TestNextBatch:
    def test_a_right_first_guess_takes_two_probes(self):
        assert search(lambda n: 100 + 7 * n, 100 + 7 * 300, start=300, slope=7) == (300, 2)

    @given(
        base=st.integers(0, 10**6),
        slope=st.integers(1, 10**6),
        limit=st.integers(0, 4096),
        start=st.integers(1, 4096),
        most=st.sampled_from([1, 7, 4096]),
    )
    def test_whatever_the_start_the_limit_is_found(self, base, slope, limit, start, most):
        found, _ = search(lambda n: base + slope * n, base + slope * limit, start=start, most=most)
        assert found == min(limit, most)

    @given(
        limit=st.integers(1, 4096),
        start=st.integers(1, 4096),
        bends=st.lists(st.integers(1, 10**5), min_size=1, max_size=4),
    )
    def test_a_peak_with_bends_is_found_too(self, limit, start, bends):
        def peak(n):
            return sum(slope * max(0, n - 900 * place) for place, slope in enumerate(bends))

        found, _ = search(peak, peak(limit), start=start)
        assert found == limit

    @given(
        limit=st.integers(1, 4000),
        off=st.floats(-0.04, 0.04),
        segment=st.sampled_from([1, 2 * MIB, 20 * MIB]),
        slope=st.integers(20 * MIB, 300 * MIB),
    )
    def test_a_traced_limit_4_percent_off_takes_six_probes_in_segments_of_an_allocator(
        self, limit, off, segment, slope
    ):
        def peak(n):
            return -(-slope * n // segment) * segment

        start = max(1, round(limit * (1 + off)))
        found, probes = search(peak, peak(limit), start=start, slope=slope)
        assert found == max(n for n in range(limit, limit + 60) if peak(n) <= peak(limit))
        assert probes <= 6


def limits_of(records, capacity=None, **experiment):
    return find_limits(make_experiment(capacity=capacity, **experiment), records)


LIMIT_PLAN = MeasurementPlan(trials=0, memory_trials=1, transfer_trials=0, fidelity=False)


def make_probe(sessions, *, role="fit", strategy=DYNAMIC, peak_bytes=1_500_000, **changes):
    plan = replace(LIMIT_PLAN, memory_trials=2) if role == "verify" else LIMIT_PLAN
    workload = make_workload(name=None, batch_size=sessions)
    spec = make_spec(strategy, workload=workload, role=role, measurement=plan)
    phase = PhaseSample(peak_allocated_bytes=peak_bytes)
    trials = (TrialSample(prefill=phase, decode=phase),) * plan.memory_trials
    base = {"trials": trials, "conditions": Conditions(cap_bytes=1_900_000)}
    return make_record(strategy, spec=spec, **base | changes)


def make_oom(sessions, *, ledger="device", phase="decode", **changes):
    failure = Failure(type="OutOfMemoryError", message="no room", stage="memory", phase=phase, ledger=ledger)
    return make_probe(sessions, status="oom", failure=failure, trials=(), **changes)


def make_timed(sessions, *, tpot_s, strategy=DYNAMIC):
    trial = TrialSample(
        ttft_s=0.5, inter_token_latencies_s=(tpot_s,) * 156, e2e_latency_s=0.5 + 156 * tpot_s, output_tokens=157
    )
    return make_probe(sessions, role="time", strategy=strategy, trials=(trial,) * 3)


class TestFindLimits:
    def test_a_limit_has_passed_its_repeats_and_the_next_batch_has_failed(self):
        (limit,) = limits_of([make_probe(20), make_oom(21), make_probe(20, role="verify")])
        assert (limit.measured, limit.failed_at, limit.is_exact) == (20, 21, True)
        assert (limit.passes, limit.repeats, limit.probes) == (3, 3, 2)
        assert (limit.limiting_ledger, limit.limiting_phase) == ("device", "decode")
        assert limit.limited_by == "device memory in decode"
        # (2,000,000 - 1,000,000 - 100,000) // 16,384
        assert limit.analytic == 54

    def test_a_limit_that_failed_when_repeated_is_none(self):
        records = [make_probe(20), make_oom(21), make_oom(20, role="verify"), make_probe(19)]
        (limit,) = limits_of([*records, make_probe(19, role="verify")])
        assert (limit.measured, limit.failed_at) == (19, 20)

    def test_what_is_not_narrowed_down_is_a_range(self):
        (limit,) = limits_of([make_oom(40), make_probe(20)])
        assert (limit.measured, limit.failed_at, limit.is_exact) == (20, 40, False)
        assert "20 to 39" in render_limits([limit], CapacitySpec())

    def test_not_even_one_session_is_a_limit_of_zero(self):
        (limit,) = limits_of([make_oom(1)])
        assert (limit.measured, limit.failed_at, limit.is_exact) == (0, 1, True)

    def test_a_host_that_ran_out_is_what_stops_the_next_batch(self):
        (limit,) = limits_of([make_probe(20), make_oom(21, ledger="host", phase=None)])
        assert limit.limiting_ledger == "host"
        assert limit.limited_by.startswith("host memory")

    def test_a_worker_that_the_kernel_killed_ran_out_of_host_memory(self):
        failure = Failure(type="WorkerDied", message="the worker ended with signal 9 (SIGKILL)", stage="memory")
        (limit,) = limits_of([make_probe(20), make_probe(21, status="failed", failure=failure, trials=())])
        assert (limit.measured, limit.failed_at, limit.limiting_ledger) == (20, 21, "host")

    def test_a_failure_of_another_kind_is_no_limit(self):
        failure = Failure(type="ValueError", message="upstream changed", stage="memory")
        (limit,) = limits_of([make_probe(20, status="failed", failure=failure, trials=())])
        assert limit.measured is None
        assert "upstream changed" in limit.refusal

    def test_more_sessions_and_more_throughput_are_kept_apart(self):
        records = [
            make_probe(20), make_oom(21), make_timed(20, tpot_s=0.010),
            make_probe(40, strategy=STREAMED), make_oom(41, strategy=STREAMED),
            make_timed(40, tpot_s=0.040, strategy=STREAMED), make_timed(20, tpot_s=0.015, strategy=STREAMED),
        ]  # fmt: skip
        in_gpu, streamed = limits_of(records)
        assert (streamed.in_gpu, streamed.gain_over_in_gpu) == (20, 2.0)
        # 40 * 157 tokens in 0.5 + 156 * 0.040 = 6.74 s; 20 * 157 in 0.5 + 156 * 0.010 = 2.06 s
        assert streamed.at_limit.tokens_per_s == pytest.approx(40 * 157 / 6.74)
        assert in_gpu.at_limit.tokens_per_s == pytest.approx(20 * 157 / 2.06)
        assert streamed.at_in_gpu_limit.tpot_s == pytest.approx(0.015)
        assert streamed.in_gpu_at_limit == in_gpu.at_limit
        text = render_limits([in_gpu, streamed], CapacitySpec())
        assert "2.00x of the in-GPU cache" in text
        assert "0.61 times the in-GPU cache's at its own limit" in text

    def test_the_batch_under_objectives_is_the_largest_below_all_that_miss_them(self):
        timed = [(40, 0.040), (20, 0.021), (19, 0.020), (25, 0.019)]
        records = [make_probe(40), make_oom(41), *(make_timed(batch, tpot_s=tpot) for batch, tpot in timed)]
        (limit,) = limits_of(records, CapacitySpec(tpot_limit_s=0.020))
        # 25 kept the limit by chance: 20 below it did not.
        assert (limit.under_slo.sessions, limit.slo_failed_at) == (19, 20)
        (limit,) = limits_of(records, CapacitySpec(ttft_limit_s=0.4))
        assert limit.under_slo is None

    def test_cells_and_traces_are_no_probes(self):
        assert limits_of([make_record(), make_record(QUANTIZED)]) == ()

    def test_the_frame_has_a_row_a_limit_in_si_units(self):
        frame = limits_frame(limits_of([make_probe(20), make_oom(21), make_timed(20, tpot_s=0.010)]))
        row = frame.iloc[0]
        assert (row["prompt_tokens"], row["measured"], row["at_limit_tpot_s"]) == (100, 20, pytest.approx(0.010))

    def test_a_report_of_limits_alone_has_no_empty_sections(self):
        text = render_report(Study(make_experiment(), [make_probe(20), make_oom(21)]))
        assert "## Capacity" in text
        assert "## Strategies" not in text
        assert "offload-eval capacity experiment.yaml" in text

    def test_probes_stay_out_of_the_sections_about_cells(self):
        alone = render_report(Study(make_experiment(), [make_record()]))
        beside = render_report(Study(make_experiment(), [make_record(), make_probe(20), make_oom(21)]))
        about = [text[text.index("## Strategies") : text.index("## Method")] for text in (alone, beside)]
        assert about[0] == about[1]
        cells = [text[text.index("## Cells") :] for text in (alone, beside)]
        assert cells[0] == cells[1]


class TestBudget:
    @pytest.mark.parametrize(
        ("budget", "cap_bytes"),
        [
            (BudgetSpec(device_bytes=1000, runtime_bytes=100, reserve_bytes=50), 850),
            # The deployment's weights are 100 larger than those that are loaded: the cache has 100 less.
            (BudgetSpec(device_bytes=1000, weights_bytes=500), 900),
            (BudgetSpec(device_bytes=1000, weights_bytes=2000), 0),
        ],
    )
    def test_a_probe_is_held_to_what_the_arithmetic_gives_out(self, budget, cap_bytes):
        assert budget.cap_bytes(400) == cap_bytes


def run_capacity(*arguments):
    command = [sys.executable, "-m", "offload_eval", "capacity", *arguments, "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    """A whole search over a model with windows: four combinations of lengths, three caches."""
    out = tmp_path_factory.mktemp("capacity") / "run"
    settings = ("budget.device_bytes=12 MiB", "capacity.drills=false", "capacity.timing_trials=0")
    sets = [word for each in settings for word in ("--set", each)]
    done = run_capacity(str(CONFIGS / "capacity_sliding.yaml"), "--out", str(out), *sets)
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)["limits"]


class TestRealSearch:
    def test_every_limit_passes_three_times_and_the_next_batch_fails(self, sliding):
        _, limits = sliding
        assert len(limits) == 12
        for limit in limits:
            assert limit["passes"] == limit["repeats"] == 3
            assert limit["failed_at"] == limit["measured"] + 1
            assert 1 <= limit["probes"] <= 6
            assert limit["cap_bytes"] == 12 * MIB

    def test_traced_and_measured_agree_to_the_session(self, sliding):
        _, limits = sliding
        assert [limit["traced"] for limit in limits] == [limit["measured"] for limit in limits]
        assert all(limit["traced"] < limit["analytic"] for limit in limits)
        assert all(limit["limiting_phase"] in ("prefill", "decode") and limit["limiting_part"] for limit in limits)

    def test_every_probe_is_a_record_with_its_peak_by_phase(self, sliding):
        out, limits = sliding
        records = {}
        for line in (out / "records.jsonl").read_text().splitlines():
            record = json.loads(line)
            records[record["run_id"]] = record
        for limit in limits:
            probes = [records[run_id] for run_id in limit["run_ids"]]
            ok = [probe for probe in probes if probe["status"] == "ok" and probe["spec"]["role"] == "fit"]
            assert all(
                probe["trials"][0][phase]["peak_allocated_bytes"] for probe in ok for phase in ("prefill", "decode")
            )
            (failed,) = [probe for probe in probes if probe["status"] == "oom"]
            assert failed["spec"]["workload"]["batch_size"] == limit["failed_at"]

    def test_resume_runs_nothing_again(self, sliding):
        out, limits = sliding
        before = (out / "records.jsonl").read_bytes()
        settings = ("budget.device_bytes=12 MiB", "capacity.drills=false", "capacity.timing_trials=0")
        sets = [word for each in settings for word in ("--set", each)]
        done = run_capacity(str(CONFIGS / "capacity_sliding.yaml"), "--resume", "--out", str(out), *sets)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["limits"] == limits
        assert (out / "records.jsonl").read_bytes() == before


REAL = """
name: real
model: {{source: {model}, dtype: bfloat16}}
device: cpu
budget: {{device_bytes: 264 MiB}}
workloads: [{{prompt_tokens: 32, output_tokens: 4}}]
strategies: [{{kind: dynamic}}, {{kind: streamed}}]
capacity: {{timing_trials: 1, drills: false}}
"""


def test_a_real_model_on_real_text(tmp_path, demo_model):
    """Weights of SmolLM2-135M take 256.6 MiB; a session's 35 tokens 35 * 23,040 bytes = 0.77 MiB: at most 9."""
    file = tmp_path / "real.yaml"
    file.write_text(REAL.format(model=demo_model))
    done = run_capacity(str(file), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    dynamic, streamed = json.loads(done.stdout)["limits"]
    assert dynamic["analytic"] == 9
    assert dynamic["measured"] < streamed["measured"]
    for limit in (dynamic, streamed):
        assert limit["passes"] == limit["repeats"] == 3
        assert limit["failed_at"] == limit["measured"] + 1
        assert limit["traced"] == limit["measured"] or limit["difference"]
        assert limit["tokens_per_s_at_limit"] > 0
        assert limit["tpot_s_at_limit"] > 0


def test_the_terminal_table_fits_100_columns():
    records = [make_probe(20), make_oom(21), make_timed(20, tpot_s=0.010)]
    experiment = make_experiment(capacity=CapacitySpec(tpot_limit_s=0.02))
    console = Console(width=100, file=StringIO())
    console.print(render_terminal(Study(experiment, records)))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    (row,) = [line.split() for line in lines if line.split()[:1] == ["dynamic"]]
    assert row == ["dynamic", "54", "-", "20", "1.00x", "20", "10.00", "1,524", "decode"]


class TestOneSearch:
    """A directory may hold the probes of several searches; a limit is of one."""

    def test_probes_under_another_budget_are_left_out(self):
        old = [make_probe(20), make_oom(21)]
        budget = BudgetSpec(device_bytes=4_000_000, runtime_bytes=100_000)
        new = [
            replace(record, spec=replace(record.spec, budget=budget), conditions=Conditions(cap_bytes=3_900_000))
            for record in (make_probe(60), make_oom(61))
        ]
        (limit,) = limits_of([*old, *new], budget=budget)
        assert (limit.measured, limit.failed_at, limit.cap_bytes) == (60, 61, 3_900_000)
        assert "2 records of other searches" in render_report(Study(make_experiment(budget=budget), [*old, *new]))

    def test_probes_under_other_versions_are_left_out_with_their_limits(self):
        earlier = make_machine(versions={"torch": "0.0.1"})
        old = [replace(each, machine=earlier, started_at_utc="2026-01-01T00:00:00Z") for each in (make_probe(50),)]
        (limit,) = limits_of([*old, make_probe(20), make_oom(21)])
        assert limit.measured == 20
        policy = policy_of(make_experiment(), (limit,), [*old, make_probe(20), make_oom(21)])
        assert policy.fingerprint.versions["torch"] == "2.13.0"
        assert [each.sessions for each in policy.strategies[0].limits] == [20]

    def test_the_in_gpu_cache_is_one_on_the_device_whatever_the_baseline(self):
        records = [
            replace(record, spec=replace(record.spec, baseline=STREAMED))
            for strategy, limit in ((DYNAMIC, 20), (STREAMED, 40))
            for record in (make_probe(limit, strategy=strategy), make_oom(limit + 1, strategy=strategy))
        ]
        in_gpu, streamed = limits_of(records, baseline="streamed")
        assert (in_gpu.label, in_gpu.is_in_gpu, in_gpu.gain_over_in_gpu) == ("dynamic", True, 1.0)
        assert (streamed.is_in_gpu, streamed.gain_over_in_gpu) == (False, 2.0)

    def test_of_a_range_the_gain_is_the_least(self):
        records = [make_probe(20), make_oom(21), make_probe(30, strategy=STREAMED), make_oom(50, strategy=STREAMED)]
        _, streamed = limits_of(records)
        assert "at least 1.50x of the in-GPU cache" in render_limits([streamed], CapacitySpec())
        records[1] = make_oom(25)
        _, streamed = limits_of(records)
        assert streamed.gain_over_in_gpu is None

    def test_a_limit_that_is_missing_is_said_to_be(self):
        experiment = make_experiment(strategies=(DYNAMIC, STREAMED))
        text = render_report(Study(experiment, [make_probe(20), make_oom(21)]))
        assert "The search is not done: 1 limits are missing" in text
        assert "Settings for" not in text

    def test_a_model_that_does_not_load_in_time_says_nothing_of_a_batch(self):
        failure = Failure(type="Timeout", message="no result within 1 s", stage="load")
        records = [make_probe(20, status="timeout", failure=failure, trials=())]
        (limit,) = limits_of(records)
        assert limit.measured is None
        assert has_failed_search(make_experiment(), records)

    def test_weights_that_do_not_fit_are_named(self):
        conditions = Conditions(cap_bytes=900_000, baseline_bytes=1_000_000)
        (limit,) = limits_of([make_oom(1, conditions=conditions)])
        assert limit.limited_by == "the weights alone: 976.56 KiB of 878.91 KiB"

    def test_objectives_may_leave_a_range(self):
        records = [make_probe(40), make_oom(41), make_timed(40, tpot_s=0.040), make_timed(10, tpot_s=0.010)]
        (limit,) = limits_of(records, CapacitySpec(tpot_limit_s=0.020))
        assert show_under_objectives(limit) == "10 to 39"
        unfinished = make_oom(9, role="time")
        (limit,) = limits_of([*records, unfinished], CapacitySpec(tpot_limit_s=0.020))
        assert show_under_objectives(limit) == "fewer than 9"


def make_traced_probe(sessions, peak_bytes):
    """Weights of 1,000,000 bytes and activations; both phases alike."""
    fields = make_phase_trace(peak_bytes, 0, {"model.layers.*.mlp": peak_bytes - 1_000_000})
    trace = make_trace(prefill=PhaseTrace(**fields), steps=(StepTrace(step=156, **fields),))
    return make_traced(spec=make_probe(sessions).spec, trace=trace)


CONDITIONS = Conditions(cap_bytes=1_900_000, baseline_bytes=1_000_000, forced_tokens=False)


class TestDifference:
    """The cap is 1,900,000 bytes, the weights 1,000,000; a run has 1,500,000 at its peak."""

    def limit(self, *, run_bytes, traced, next_bytes):
        probes = [make_probe(20, peak_bytes=run_bytes, conditions=CONDITIONS), make_oom(21)]
        traces = [make_traced_probe(20, traced), make_traced_probe(21, next_bytes), make_traced_probe(22, 1_950_000)]
        records = [*probes, *traces]
        (limit,) = limits_of(records)
        return limit

    def test_a_part_beyond_the_trace_that_is_larger_than_its_room_is_why(self):
        limit = self.limit(run_bytes=1_890_000, traced=1_840_000, next_bytes=1_870_000)
        assert (limit.measured, limit.traced) == (20, 21)
        # 50,000 beyond the trace; 30,000 of the cap are left to the traced next batch.
        assert limit.difference == (
            "the trace admits 21; at 20 sessions the run's peak in prefill lies 48.83 KiB above the trace's "
            "(unexplained 48.83 KiB), and to the trace the next batch leaves 29.30 KiB: that is why it fails"
        )

    def test_a_part_that_is_smaller_does_not_explain_it(self):
        limit = self.limit(run_bytes=1_850_000, traced=1_840_000, next_bytes=1_870_000)
        assert limit.difference.endswith("that does not explain why it fails")

    def test_limits_that_agree_need_no_words(self):
        limit = self.limit(run_bytes=1_840_000, traced=1_840_000, next_bytes=1_910_000)
        assert (limit.traced, limit.difference) == (20, "")

    def test_a_trace_that_was_lost_leaves_no_limit_by_trace(self):
        """20 could not be traced: what was, does not fit, and says nothing of the batches below."""
        (limit,) = limits_of([make_probe(20), make_oom(21), make_traced_probe(21, 1_950_000)])
        assert (limit.measured, limit.traced, limit.difference) == (20, None, "")
        (limit,) = limits_of([make_oom(1), make_traced_probe(1, 1_950_000)])
        assert (limit.measured, limit.traced) == (0, 0)


class TestHostLedger:
    def test_a_search_that_the_host_stops_tries_the_host_limit_and_one_more(self):
        seen = {}
        for _ in range(6):
            batch = next_batch(seen, 10**9, start=40, most=4096, slope_bytes=1000.0, host_sessions=40)
            if batch is None:
                break
            seen[batch] = 1000 * batch if batch <= 40 else None
        assert seen == {40: 40_000, 41: None}

    def test_a_guess_far_above_the_limit_comes_down_by_factors(self):
        """1,000,000 of weights and 1,000 a session; the arithmetic said 665, and 29 fit."""
        found, probes = 0, {}
        while (batch := next_batch(probes, 1_029_000, start=665, most=4096, base_bytes=1_000_000)) is not None:
            probes[batch] = 1_000_000 + 1000 * batch if batch <= 29 else None
        found = max(batch for batch, peak in probes.items() if peak)
        assert found == 29
        assert len(probes) <= 6


class TestAskedLengths:
    def test_batches_names_and_seeds_do_not_make_another_search(self):
        experiment = make_experiment(
            workloads=(
                make_workload(),
                make_workload(name="again", batch_size=7, seed=3),
                make_workload(name="long", prompt_tokens=200),
            ),
            factors=FactorsSpec(batch_size=(1, 2)),
        )
        alone = lengths_alone(experiment)
        assert [(each.label, each.batch_size) for each in alone.workloads] == [("small", 1), ("long", 1)]
        assert [each.batch_size for each in expand_workloads(alone)] == [1, 1]
