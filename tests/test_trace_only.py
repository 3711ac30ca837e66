"""Traces alone: what is planned for a card that is not here, and what a run adds to it later."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import WriteExperiment
from factories import (
    DYNAMIC,
    STREAMED,
    WEIGHTS_BYTES,
    make_experiment,
    make_machine,
    make_phase_trace,
    make_record,
    make_spec,
    make_trace,
    make_traced,
    make_workload,
)
from msgspec.structs import replace
from typer.testing import CliRunner

from offload_eval.analysis.bounded_price import bound_prices, traced_alone
from offload_eval.analysis.compare_pairs import RunSide
from offload_eval.analysis.compare_runs import compare_runs
from offload_eval.analysis.compare_states import compare_limits
from offload_eval.analysis.limits import find_limits, missing_limits
from offload_eval.analysis.policy import policy_of
from offload_eval.analysis.probes import lengths_of
from offload_eval.analysis.study import Study
from offload_eval.cli.app import app
from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.experiment import BudgetSpec, StrategySpec
from offload_eval.core.hardware import HardwareProfile, LinkProfile, PeakFlops, SourcedValue
from offload_eval.core.records import Conditions, RunRecord
from offload_eval.core.trace import PhaseTrace, StepTrace, Trace
from offload_eval.reporting.price_table import comparison_line
from offload_eval.reporting.report import render_report
from offload_eval.reporting.sourced import plain

WITH_LIMITS = {
    "trace": True,
    "budget": {"device_bytes": "1200 KiB", "host_bytes": "96 KiB"},
    "workloads": [{"prompt_tokens": 24, "output_tokens": 6, "prompt": {"kind": "random"}}],
    "measurement": {"trials": 1},
    "capacity": {"timing_trials": 0, "drills": False, "repeats": 1},
}


def call(*arguments: str | Path) -> tuple[int, Any, str]:
    """Exit code, what --json printed, and the whole output."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    document = json.loads(result.stdout) if result.stdout.startswith("{") else None
    return result.exit_code, document, result.output


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]


class TestOnTheCpu:
    """Traced is equal to run there, so what a search finds is known beforehand."""

    @pytest.fixture(scope="class")
    @staticmethod
    def both(tmp_path_factory: pytest.TempPathFactory, tiny_experiment: WriteExperiment) -> tuple[Any, Any, Path, int]:
        """What --trace-only says, and what the same directory says once it was resumed and everything ran."""
        folder = tmp_path_factory.mktemp("both")
        file, out = tiny_experiment(folder, **WITH_LIMITS), folder / "run"
        code, traced, output = call("run", file, "--trace-only", "--out", out)
        assert code == 0, output
        num_traces = len(lines_of(out))
        code, ran, output = call("run", file, "--resume", "--out", out)
        assert code == 0, output
        return traced, ran, out, num_traces

    def test_nothing_is_run(self, both: tuple[Any, Any, Path, int]) -> None:
        traced, _, out, num_traces = both
        assert {line["evidence"] for line in lines_of(out)[:num_traces]} == {"traced"}
        assert traced["cells"] == []
        assert len(traced["traces"]) == 3
        assert all(limit["evidence"] == "traced" and limit["measured"] is None for limit in traced["limits"])
        assert not any("policy" in file for file in traced["files"])

    def test_the_traced_limit_is_the_one_that_runs(self, both: tuple[Any, Any, Path, int]) -> None:
        traced, ran, _, _ = both
        assert [limit["strategy"] for limit in traced["limits"]] == [limit["strategy"] for limit in ran["limits"]]
        assert len(traced["limits"]) == 3
        for by_trace, as_run in zip(traced["limits"], ran["limits"], strict=True):
            assert by_trace["traced"] == as_run["measured"] > 0
            assert by_trace["failed_at"] == as_run["failed_at"]
            assert by_trace["limiting_ledger"] == as_run["limiting_ledger"]
            assert by_trace["traced_run_ids"] == as_run["traced_run_ids"]
            assert by_trace["gain_over_in_gpu"] == as_run["gain_over_in_gpu"]
        assert {limit["limiting_ledger"] for limit in ran["limits"]} == {"device", "host"}

    def test_a_run_repeats_no_trace_and_makes_no_other(self, both: tuple[Any, Any, Path, int]) -> None:
        _, _, out, num_traces = both
        lines = lines_of(out)
        traces = [line["run_id"] for line in lines if line["evidence"] == "traced"]
        assert len(lines) > num_traces
        assert len(traces) == len(set(traces)) == num_traces

    def test_a_limit_names_the_traces_of_it_and_of_the_next(self, both: tuple[Any, Any, Path, int]) -> None:
        traced, _, out, _ = both
        batches = {line["run_id"]: line["spec"]["workload"]["batch_size"] for line in lines_of(out)}
        for limit in traced["limits"]:
            assert [batches[run_id] for run_id in limit["traced_run_ids"]] == [limit["traced"], limit["traced"] + 1]


class TestForADeviceThatIsNotHere:
    def test_cuda_is_followed_without_one_and_its_report_has_bounds(
        self, tiny_experiment: WriteExperiment, tmp_path: Path
    ) -> None:
        changes = WITH_LIMITS | {"device": "cuda", "hardware": "h100-sxm", "budget": {"device_bytes": "1 MiB"}}
        strategies = [{"kind": "dynamic"}, {"kind": "offloaded"}, {"kind": "streamed"}]
        file = tiny_experiment(tmp_path, **changes | {"strategies": strategies})
        code, document, output = call("capacity", file, "--trace-only", "--out", tmp_path / "out")
        assert code == 0, output
        assert {limit["label"] for limit in document["limits"]} == {"dynamic", "offloaded", "streamed"}
        assert all(limit["traced"] for limit in document["limits"])
        report = (tmp_path / "out" / "report.md").read_text()
        assert "Price by bounds, not measured: profile h100-sxm, from documents" in report
        assert (tmp_path / "out" / "tables" / "prices.csv").exists()
        assert not (tmp_path / "out" / "policy.yaml").exists()

    def test_what_the_device_lacks_is_refused_with_its_reason(
        self, tiny_experiment: WriteExperiment, tmp_path: Path
    ) -> None:
        changes = WITH_LIMITS | {"strategies": [{"kind": "dynamic"}, {"kind": "offloaded"}]}
        code, document, output = call(
            "capacity", tiny_experiment(tmp_path, **changes), "--trace-only", "--out", tmp_path / "out"
        )
        assert code == 0, output
        (limit,) = [limit for limit in document["limits"] if limit["label"] == "offloaded"]
        assert limit["traced"] is None
        assert "cuda" in limit["refusal"].lower()

    def test_a_run_without_the_device_is_refused_still(self, tiny_experiment: WriteExperiment, tmp_path: Path) -> None:
        code, _, output = call("run", tiny_experiment(tmp_path, device="cuda"), "--out", tmp_path / "out")
        assert code == 3, output

    def test_a_dry_run_shows_the_cells(self, tiny_experiment: WriteExperiment, tmp_path: Path) -> None:
        file = tiny_experiment(tmp_path, device="cuda", trace=True)
        code, document, output = call("run", file, "--trace-only", "--dry-run", "--out", tmp_path / "out")
        assert code == 0, output
        assert document["device"] == "cuda"
        assert not (tmp_path / "out").exists()

    def test_trace_false_leaves_nothing_to_do(self, tiny_experiment: WriteExperiment, tmp_path: Path) -> None:
        code, _, output = call("run", tiny_experiment(tmp_path), "--trace-only", "--out", tmp_path / "out")
        assert code == 2
        assert "trace: false leaves --trace-only nothing to do" in output


def traced_probe(sessions: int, peak_bytes: int, strategy: StrategySpec = DYNAMIC, **changes: Any) -> RunRecord:
    """Weights of 1,000,000 bytes and activations, both phases alike; the cap is 2,000,000 - 100,000."""
    workload = make_workload(name=None, batch_size=sessions)
    fields = make_phase_trace(peak_bytes, 0, {"model.layers.*.mlp": peak_bytes - WEIGHTS_BYTES})
    trace = make_trace(
        strategy,
        workload=workload,
        prefill=PhaseTrace(**fields),
        steps=(StepTrace(step=156, **fields | {"kv_host_bytes": 0} | changes),),
    )
    return make_traced(strategy, spec=make_spec(strategy, workload=workload, role="fit"), trace=trace)


SEARCHED = make_experiment(capacity=CapacitySpec(), strategies=(DYNAMIC, STREAMED))


class TestLimitsByTraceAlone:
    def test_limit_what_stops_the_next_one_and_gain_by_hand(self) -> None:
        records = [
            *(traced_probe(20, 1_840_000), traced_probe(21, 1_910_000)),
            *(traced_probe(30, 1_890_000, STREAMED), traced_probe(31, 1_900_001, STREAMED)),
        ]
        dynamic, streamed = find_limits(SEARCHED, records)
        assert (dynamic.evidence, dynamic.measured, dynamic.traced, dynamic.failed_at) == ("traced", None, 20, 21)
        assert (dynamic.sessions, dynamic.is_exact, dynamic.cap_bytes) == (20, True, 1_900_000)
        assert dynamic.limited_by == "device memory in prefill: activations, 100% of what grows with the batch"
        assert dynamic.limit_run_ids == dynamic.traced_run_ids == (records[0].run_id, records[1].run_id)
        assert (streamed.traced, streamed.in_gpu, streamed.gain_over_in_gpu) == (30, 20, 1.5)
        assert missing_limits(SEARCHED, [dynamic, streamed]) == 0
        assert policy_of(SEARCHED, [dynamic, streamed], records) is None

    def test_a_peak_that_fills_the_cap_fits_and_one_byte_more_does_not(self) -> None:
        (limit,) = find_limits(SEARCHED, [traced_probe(20, 1_900_000), traced_probe(21, 1_900_001)])
        assert limit.traced == 20

    def test_host_memory_stops_what_the_device_would_take(self) -> None:
        """50,000 bytes a session on the host; the budget has 1,000,000 there."""
        budget = BudgetSpec(device_bytes=2_000_000, runtime_bytes=100_000, host_bytes=1_000_000)
        records = []
        for sessions in (20, 21):
            host = {"kv_host_bytes": 50_000 * sessions, "peak_host_bytes": 50_000 * sessions}
            record = traced_probe(sessions, 1_500_000, STREAMED, **host, live_host_bytes=50_000 * sessions)
            spec = replace(record.spec, budget=budget)
            records.append(make_traced(STREAMED, spec=spec, trace=record.trace))
        (limit,) = find_limits(replace(SEARCHED, budget=budget), records)
        assert (limit.traced, limit.failed_at, limit.limiting_ledger) == (20, 21, "host")

    def test_on_cuda_the_host_takes_what_a_pinned_allocator_rounds(self) -> None:
        """By hand, of 2 layers' keys and values, each 256 tokens * 16 bytes a session.

        Those of 33 sessions, 135,168 bytes, are rounded up to 262,144, and four of them are more than 1,000,000; those
        of 32 fill 131,072. As asked for, 61 would fit.
        """
        budget = BudgetSpec(device_bytes=2_000_000, runtime_bytes=100_000, host_bytes=1_000_000)
        records = []
        for sessions, peak_bytes in ((32, 1_600_000), (33, 1_610_000), (50, 1_899_000), (51, 1_901_000)):
            record = traced_probe(sessions, peak_bytes, STREAMED)
            spec = replace(record.spec, budget=budget, device="cuda")
            records.append(make_traced(STREAMED, spec=spec, trace=record.trace))
        (limit,) = find_limits(replace(SEARCHED, budget=budget, device="cuda"), records)
        assert (limit.traced, limit.failed_at, limit.limiting_ledger) == (32, 33, "host")
        assert limit.traced_run_ids == tuple(record.run_id for record in records[:2])

    def test_a_gap_in_the_traces_is_no_limit(self) -> None:
        assert find_limits(SEARCHED, [traced_probe(20, 1_840_000), traced_probe(22, 1_950_000)]) == ()

    def test_traces_hold_beside_runs_of_another_machine_with_the_same_code(self) -> None:
        """The build of torch and the card are the machine's; another transformers is other code."""
        traces = [traced_probe(20, 1_840_000), traced_probe(21, 1_910_000)]
        run = make_run(20, versions={"torch": "2.13.0+cu130", "transformers": "5.24.0", "triton": "3.5"})
        (limit,) = find_limits(SEARCHED, [*traces, run])
        assert (limit.evidence, limit.traced, limit.measured) == ("emulated", 20, 20)
        run = make_run(20, versions={"torch": "2.13.0", "transformers": "5.25.0"})
        (limit,) = find_limits(SEARCHED, [*traces, run])
        assert (limit.traced, limit.measured) == (None, 20)

    def test_where_one_ran_the_others_are_missing_and_no_ratio_mixes_rungs(self) -> None:
        records = [make_run(20), traced_probe(30, 1_890_000, STREAMED), traced_probe(31, 1_900_001, STREAMED)]
        dynamic, streamed = find_limits(SEARCHED, records)
        assert (dynamic.measured, streamed.traced, streamed.gain_over_in_gpu) == (20, 30, None)
        assert missing_limits(SEARCHED, [dynamic, streamed]) == 1

    def test_the_report_has_no_column_of_what_did_not_run(self) -> None:
        records = [traced_probe(20, 1_840_000), traced_probe(21, 1_910_000)]
        report = render_report(Study(SEARCHED, records))
        assert "dynamic admits 20 sessions (traced)" in report
        assert "Nothing was run" in report
        assert "batches tried" not in report

    def test_a_verdict_rests_on_both_traces_and_holds_traced_against_traced(self) -> None:
        records = [
            *(traced_probe(20, 1_840_000), traced_probe(21, 1_910_000)),
            *(traced_probe(30, 1_890_000, STREAMED), traced_probe(31, 1_900_001, STREAMED)),
        ]
        study = Study(SEARCHED, records)
        (situation,) = study.verdict.situations
        assert [(each.traced, each.sessions) for each in situation.standings] == [(20, 20), (30, 30)]
        assert situation.standings[1].session_run_ids == (records[2].run_id, records[3].run_id)
        assert [situation.over_in_gpu(each) for each in situation.standings] == [1.0, 1.5]
        verdict = render_report(study).split("## Verdict")[1].split("\n## ")[0]
        (row,) = [line for line in verdict.splitlines() if line.startswith("| streamed")]
        assert [cell.strip() for cell in row.split("|")[3:5]] == ["30", "1.50x"]

    def test_a_verdict_of_cells_rests_on_their_traces(self) -> None:
        record = make_traced()
        (situation,) = Study(make_experiment(), [record]).verdict.situations
        standing = situation.standings[0]
        assert (situation.basis, standing.evidence) == ("traces", "traced")
        assert standing.sessions == standing.traced == 48
        assert standing.session_run_ids == (record.run_id,)

    def test_two_releases_that_were_only_traced_are_held_against_one_another(self) -> None:
        old = (traced_probe(20, 1_840_000), traced_probe(21, 1_910_000))
        new = (traced_probe(18, 1_840_000), traced_probe(19, 1_910_000))
        sides = [RunSide(name=name, experiment=SEARCHED, records=each) for name, each in (("r1", old), ("r2", new))]
        changes = {change.metric: change for change in compare_runs(*sides).changes}
        traced = changes["limit_traced_sessions"]
        assert (traced.baseline, traced.candidate, traced.verdict) == (20, 18, "worse")

    def test_compare_names_a_search_by_trace(self) -> None:
        def side(records: list[RunRecord]) -> RunSide:
            return RunSide(name="run", experiment=SEARCHED, records=tuple(records))

        traced = side([traced_probe(20, 1_840_000), traced_probe(21, 1_910_000)])
        states, figures, pairs = compare_limits(traced, traced)
        assert (states, pairs) == ([], 1)
        assert [change.metric for change in figures] == ["limit_traced_sessions", "limit_analytic_sessions"]
        (state,), _, _ = compare_limits(traced, side([make_run(20)]))
        assert (state.baseline, state.candidate) == ("traced", "searched")


def make_run(sessions: int, **machine: Any) -> RunRecord:
    """A probe that ran."""
    spec = make_spec(workload=make_workload(name=None, batch_size=sessions), role="fit")
    return make_record(spec=spec, machine=make_machine(**machine), conditions=Conditions(cap_bytes=1_900_000))


def value(number: float) -> SourcedValue:
    return SourcedValue(value=number, source="by hand", date="2026-01-01")


CARD = HardwareProfile(
    name="by-hand",
    memory_bytes_per_s=value(1e6),
    peak_flops_per_s=PeakFlops(bfloat16=value(1e9)),
    link=LinkProfile(name="link", h2d_bytes_per_s=value(1e5), d2h_bytes_per_s=value(1e5)),
)


def priced_trace(strategy: StrategySpec = DYNAMIC, **changes: int) -> Trace:
    """A prefill of 2 GFLOP that touches 3 MB, and steps 1 and 156 that read 1 MB of weights and touch 1.5 MB."""
    work = {"weights_read_bytes": 1_000_000}
    phase = make_phase_trace(WEIGHTS_BYTES, 0, {})
    steps = (StepTrace(step=number, **phase | work | {"touched_bytes": 1_500_000} | changes) for number in (1, 156))
    prefill = PhaseTrace(**phase | work | {"matmul_flops": 2_000_000_000, "touched_bytes": 3_000_000})
    return make_trace(strategy, device="cuda", prefill=prefill, steps=tuple(steps))


class TestBoundedPrice:
    """1 GFLOP/s, 1 MB/s of memory and a link of 0.1 MB/s; 2 sessions of 100 + 157 tokens, 64 bytes of KV a token."""

    def price(self, trace: Trace, **changes: Any) -> Any:
        return bound_prices([make_traced(trace.strategy, trace=trace, **changes)], CARD)

    def test_the_in_gpu_cache_by_hand(self) -> None:
        (price,) = self.price(priced_trace())
        # Ideal: 2 GFLOP take 2 s. Step 1 reads 1 MB and 2 * 101 * 64 bytes, step 156 2 * 256 * 64; each of the 154
        # steps between is no faster than the first.
        decode_s = 155 * (1_000_000 + 12_928) / 1e6 + (1_000_000 + 32_768) / 1e6
        assert price.ideal.ttft_s == pytest.approx(2.0)
        assert price.ideal.tpot_s == pytest.approx(decode_s / 156)
        assert price.ideal.tokens_per_s == pytest.approx(2 * 157 / (2.0 + decode_s))
        # As the code runs: 3 MB are touched in prefill, 1.5 MB in a step; serial adds the 2 s of computing.
        assert (price.scheduled.ttft_s, price.scheduled.tpot_s) == pytest.approx((3.0, 1.5))
        assert (price.serial.ttft_s, price.serial.tpot_s) == pytest.approx((5.0, 1.5))
        assert (price.sessions, price.limited_by, price.h2d_bytes_per_step) == (2, "memory", 0)

    def test_streaming_waits_for_the_link(self) -> None:
        """200,000 bytes a step take 2 s one way; the 10,000 back take 0.1 s, which serial adds to 1.5 s of memory."""
        (price,) = self.price(priced_trace(STREAMED, h2d_bytes=200_000, d2h_bytes=10_000))
        assert price.ideal.tpot_s == pytest.approx(2.0)
        assert price.serial.tpot_s == pytest.approx(1.5 + 2.0 + 0.1)
        assert (price.limited_by, price.h2d_bytes_per_step, price.d2h_bytes_per_step) == ("h2d", 200_000, 10_000)

    def test_offload_beside_the_in_gpu_cache_in_a_sentence(self) -> None:
        """Decode: 155 steps of 1.012928 s and one of 1.032768 s, and 2 s first; streamed 156 of 2 s, and 2 s first."""
        records = [
            make_traced(trace=priced_trace()),
            make_traced(STREAMED, trace=priced_trace(STREAMED, h2d_bytes=200_000)),
        ]
        in_gpu, streamed = bound_prices(records, CARD)
        int4 = replace(
            streamed,
            strategy="streamed-int4",
            is_lossless=False,
            ideal=replace(streamed.ideal, tokens_per_s=3 * streamed.ideal.tokens_per_s),
        )
        in_gpu_per_s, streamed_per_s = 314 / 160.036608, 314 / 314
        line = plain(comparison_line([in_gpu, streamed], lengths_of(in_gpu.workload)))
        assert line.startswith(
            f"At the bounds, streamed gives at most {streamed_per_s:.2f} tokens/s at 2 sessions against "
            f"{in_gpu_per_s:.2f} tokens/s at 2 sessions in-GPU: 0.51x the tokens/s for 1.00x the sessions. "
        )
        line = plain(comparison_line([in_gpu, streamed, int4], lengths_of(in_gpu.workload)))
        assert (
            "; streamed-int4, which loses something, gives at most 3.00 tokens/s at 2 sessions: 1.53x the tokens/s"
            in line
        )
        assert comparison_line([streamed], lengths_of(in_gpu.workload)) == []

    def test_no_profile_another_rung_or_a_missing_figure_is_no_price(self) -> None:
        record = make_traced(trace=priced_trace())
        assert bound_prices([record], None) == ()
        assert bound_prices([make_traced(trace=replace(priced_trace(), device="cpu"))], CARD) == ()
        assert bound_prices([record], replace(CARD, memory_bytes_per_s=None)) == ()

    def test_only_what_was_not_run_has_a_price(self) -> None:
        spec = make_spec()
        trace = make_traced(spec=spec, trace=priced_trace())
        assert traced_alone([trace], ()) == (trace,)
        assert traced_alone([trace, make_record(spec=spec)], ()) == ()

    def test_a_limit_is_priced_at_its_own_batch(self) -> None:
        records = [traced_probe(20, 1_840_000), traced_probe(21, 1_910_000)]
        assert traced_alone(records, find_limits(SEARCHED, records)) == (records[0],)
        nothing = [traced_probe(1, 1_910_000)]
        assert traced_alone(nothing, find_limits(SEARCHED, nothing)) == ()
