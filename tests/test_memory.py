"""Memory on three rungs: a trace beside its cell, what lies between them by name, and what must not mistake one.

The default cell by hand: weights of 1,000,000 bytes; 2 sessions * 64 bytes a token are 12,800 bytes of KV after a
prompt of 100 tokens and 32,768 when the last token is computed; 2 * 157 forced tokens of 8 bytes are 2,512.
"""

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from factories import (
    DYNAMIC,
    QUANTIZED,
    STREAMED,
    WEIGHTS_BYTES,
    make_conditions,
    make_experiment,
    make_facts,
    make_failure,
    make_phase,
    make_phase_trace,
    make_quantized,
    make_record,
    make_spec,
    make_streamed,
    make_trace,
    make_traced,
    make_trials,
)
from test_report import printed, table_with, tables_of

from offload_eval.analysis.capacity import sessions_by_trace
from offload_eval.analysis.cells import latest_records, latest_traces
from offload_eval.analysis.comparison import compare_with_baseline
from offload_eval.analysis.findings import find
from offload_eval.analysis.memory import explain_memory
from offload_eval.analysis.study import Study
from offload_eval.bounds.strategy_bound import kv_device_bytes_after
from offload_eval.core.experiment import OffloadedSpec, StaticSpec
from offload_eval.core.judgement import PhaseMemory
from offload_eval.core.records import Failure, RunRecord
from offload_eval.core.trace import PhaseTrace, StepTrace
from offload_eval.reporting.detail_tables import fidelity_frame, host_frame
from offload_eval.reporting.memory_tables import MEMORY_COLUMNS, PARTS, memory_frame
from offload_eval.reporting.report import render_report, write_report
from offload_eval.reporting.sentences import cell_texts
from offload_eval.reporting.tables import analytic_frame, strategy_frame, trials_frame
from offload_eval.reporting.terminal import render_terminal

ATTENTION = "model.layers.*.self_attn"


def parts(memory: PhaseMemory) -> dict[str, int]:
    """The bytes that are known and not zero."""
    return {name: value for name in PARTS_OF_A_ROW if (value := getattr(memory, name))}


PARTS_OF_A_ROW = [part.name for part in PARTS]


def make_untraced(status: str, message: str = "no data", **changes: Any) -> RunRecord:
    failure = Failure(type="ProblemError", message=message, stage="trace")
    return make_traced(**{"status": status, "failure": failure, "trace": None} | changes)


class TestParts:
    def test_a_cell_adds_up_from_the_arithmetic_to_the_run(self):
        prefill, decode = explain_memory([make_traced(), make_record()])
        assert parts(prefill) == {
            "analytic_bytes": 1_012_800,
            "cache_transient_bytes": 1_000,
            "logits_bytes": 6_000,
            "activations_bytes": 17_688,
            "traced_peak_bytes": 1_037_488,
            "forced_tokens_bytes": 2_512,
            "peak_allocated_bytes": 1_040_000,
        }
        assert parts(decode) == {
            "analytic_bytes": 1_032_768,
            "logits_bytes": 400,
            "activations_bytes": 320,
            "traced_peak_bytes": 1_033_488,
            "forced_tokens_bytes": 2_512,
            "peak_allocated_bytes": 1_036_000,
        }
        assert (prefill.step, decode.step) == (None, 156)
        for memory in (prefill, decode):
            assert memory.unexplained_bytes == memory.workspaces_bytes == memory.kv_beyond_bytes == 0
            assert memory.allocator_bytes is memory.context_bytes is None
            assert (memory.run_id, memory.traced_run_id) == (make_record().run_id, make_traced().run_id)

    def test_what_only_a_real_device_knows(self):
        phase = make_phase(1_040_000, peak_reserved_bytes=2**21, peak_device_used_bytes=2**22)
        conditions = make_conditions(baseline_bytes=1_000_300)
        run = make_record(trials=make_trials(prefill=phase), conditions=conditions, evidence="measured")
        memory, _ = explain_memory([run, make_traced()])
        # 1,040,000 - 1,037,488 - 300 - 2,512; 2,097,152 - 1,040,000.
        assert (memory.workspaces_bytes, memory.unexplained_bytes) == (300, -300)
        assert (memory.allocator_bytes, memory.context_bytes) == (1_057_152, 2_097_152)

    def test_the_step_of_the_highest_traced_peak_is_held_against_its_own_arithmetic(self):
        """A flush after 128 steps: 228 tokens of 32 values at 4.5 bits are 4,104 bytes a session."""
        cache = {f"{ATTENTION}.kv_cache": 10_000, "lm_head": 1}
        flush = StepTrace(step=128, requantizes=True, **make_phase_trace(1_010_001, 8_208, cache))
        last = StepTrace(step=156, **make_phase_trace(1_000_001, 11_792, {"lm_head": 1}))
        traced = make_traced(QUANTIZED, trace=make_trace(QUANTIZED, steps=(flush, last)))
        _, memory = explain_memory([traced])
        assert (memory.step, memory.analytic_bytes) == (128, WEIGHTS_BYTES + 8_208)
        assert (memory.kv_beyond_bytes, memory.cache_transient_bytes) == (0, 1_792)
        assert memory.run_id is memory.peak_allocated_bytes is memory.unexplained_bytes is None

    def test_at_a_peak_in_an_early_layer_the_later_ones_have_no_kv_yet(self):
        early = PhaseTrace(**make_phase_trace(1_006_500, 12_800, {f"{ATTENTION}.kv_cache": 6_400, "model": 100}))
        memory, _ = explain_memory([make_traced(trace=make_trace(prefill=early))])
        assert (memory.kv_beyond_bytes, memory.traced_kv_bytes, memory.cache_transient_bytes) == (-6_400, 6_400, 0)

    def test_weights_that_a_trace_counts_otherwise_are_a_part(self):
        memory, _ = explain_memory([make_traced(model=make_facts(weights_bytes=999_000))])
        assert (memory.analytic_bytes, memory.weights_beyond_bytes) == (1_011_800, 1_000)

    def test_absent_is_none(self):
        run, traced = make_record(model=make_facts(shape=None)), make_traced(model=make_facts(shape=None))
        memory, _ = explain_memory([run, traced])
        assert memory.analytic_bytes is memory.kv_beyond_bytes is None
        assert (memory.traced_kv_bytes, memory.unexplained_bytes) == (12_800, 0)
        alone, _ = explain_memory([make_record()])
        known = {"analytic_bytes", "forced_tokens_bytes", "peak_allocated_bytes"}
        assert {name for name in PARTS_OF_A_ROW if getattr(alone, name) is not None} == known
        older = make_record(conditions=make_conditions(baseline_bytes=None, forced_tokens=None))
        memory, _ = explain_memory([older, make_traced()])
        assert memory.workspaces_bytes is memory.forced_tokens_bytes is memory.unexplained_bytes is None

    def test_a_baseline_that_was_given_no_tokens_holds_none(self):
        memory, _ = explain_memory([make_record(conditions=make_conditions(forced_tokens=False)), make_traced()])
        assert (memory.forced_tokens_bytes, memory.unexplained_bytes) == (0, 2_512)

    @pytest.mark.parametrize(
        ("strategy", "prefill_bytes", "decode_bytes"),
        [
            (DYNAMIC, 12_800, 32_768),
            (StaticSpec(), 32_768, 32_768),
            (STREAMED, 32_768, 32_768),  # scratch of 2 layers and 256 rows, from the first token on
            (OffloadedSpec(), 16_000, 40_960),  # two and a half of 2 layers
            (QUANTIZED, 3_600, 11_792),  # 100 tokens of 32 values at 4.5 bits
        ],
        ids=lambda value: getattr(value, "label", None),
    )
    def test_kv_at_the_end_of_a_step(self, strategy: Any, prefill_bytes: int, decode_bytes: int):
        spec, model = make_spec(strategy), make_facts()
        assert [kv_device_bytes_after(spec, model, step) for step in (0, 156)] == [prefill_bytes, decode_bytes]
        assert kv_device_bytes_after(spec, make_facts(shape=None), 0) is None

    def test_sessions_by_trace(self):
        # 37,488 above the weights, 18,744 a session: 900,000 // 18,744.
        assert sessions_by_trace(make_traced()) == 48
        assert sessions_by_trace(make_untraced("failed")) is None


class TestFindings:
    def test_a_trace_that_explains_its_run_is_no_finding(self):
        assert find([make_traced(), make_record()]) == ()
        assert find([make_traced()]) == ()

    @pytest.mark.parametrize(
        ("evidence", "peak_bytes", "said"),
        [
            ("emulated", 1_040_001, "1 bytes more than the trace"),
            ("emulated", 1_039_999, "1 bytes less than the trace"),
            # 2,200 of 42,200 bytes above the weights; 2,000 of 42,000 would be within 5 %.
            ("measured", 1_042_200, "2,200 bytes more than the trace and the named parts add up to, 5.2% of what"),
        ],
    )
    def test_what_stays_unexplained_is_found(self, evidence: Any, peak_bytes: int, said: str):
        run = make_record(evidence=evidence, trials=make_trials(prefill=make_phase(peak_bytes)))
        (finding,) = find([make_traced(), run])
        assert (finding.code, finding.severity) == ("trace_unexplained", "warning")
        assert finding.message.startswith(f"small / dynamic: the prefill peak is {said}")
        assert finding.run_ids == (run.run_id,)

    def test_a_real_allocator_may_round(self):
        run = make_record(evidence="measured", trials=make_trials(prefill=make_phase(1_042_000)))
        assert find([make_traced(), run]) == ()

    def test_a_traced_cache_is_held_to_the_arithmetic(self):
        last = StepTrace(step=156, **make_phase_trace(1_032_766, 32_766, {f"{ATTENTION}.kv_cache": 32_766}))
        (finding,) = find([make_traced(trace=make_trace(steps=(last,)))])
        assert (finding.code, finding.severity) == ("traced_kv_differs", "error")
        assert "32,766 bytes on the device where the arithmetic gives 32,768: 2 bytes fewer" in finding.message

    @pytest.mark.parametrize(
        ("status", "code", "severity"),
        [
            ("unsupported", "untraceable", "note"),
            ("failed", "trace_failed", "warning"),
            ("timeout", "trace_failed", "warning"),
        ],
    )
    def test_a_cell_without_a_trace_is_found_and_its_run_is_not_touched(self, status: str, code: str, severity: str):
        (finding,) = find([make_untraced(status), make_record()])
        assert (finding.code, finding.severity) == (code, severity)
        assert finding.message.startswith("small / dynamic: ")
        assert finding.message.endswith("no data")

    def test_what_cannot_run_is_said_once(self):
        refused = make_failure("unsupported", DYNAMIC)
        assert [finding.code for finding in find([make_untraced("unsupported"), refused])] == ["unsupported"]


class TestConsumers:
    """A trace is never taken for a run."""

    RUNS = (make_record(), make_streamed(), make_quantized())
    TRACES = tuple(make_traced(strategy) for strategy in (DYNAMIC, STREAMED, QUANTIZED))

    def test_traces_and_runs_are_told_apart(self):
        mixed = (*self.TRACES, *self.RUNS)
        assert latest_records(mixed) == self.RUNS
        assert latest_traces((make_untraced("failed"), *mixed)) == self.TRACES

    @pytest.mark.parametrize(
        "consumer",
        [
            compare_with_baseline,
            lambda records: strategy_frame(records).drop(columns="sessions_by_trace").to_csv(),
            lambda records: fidelity_frame(records).to_csv(),
            lambda records: host_frame(records).to_csv(),
            lambda records: analytic_frame(records).to_csv(),
            lambda records: trials_frame(records).to_csv(),
            lambda records: cell_texts(make_experiment(), records),
        ],
        ids=["comparison", "strategies", "fidelity", "host", "analytic", "trials", "sentences"],
    )
    def test_what_is_said_of_runs_is_the_same_with_traces_among_them(self, consumer: Any):
        assert consumer([*self.TRACES, *self.RUNS]) == consumer(self.RUNS)
        assert consumer(self.TRACES) == consumer([])

    def test_a_trace_is_no_other_rung_that_runs_stand_on(self):
        assert "mixed_evidence" not in [finding.code for finding in find([*self.TRACES, *self.RUNS])]

    def test_the_terminal_shows_runs_and_counts_findings_on_traces(self):
        traces = [make_untraced("failed"), *self.TRACES[1:]]
        text = printed(render_terminal(Study(make_experiment(), [*traces, *self.RUNS])), width=300)
        assert "traced" not in text.split("Findings")[0].split("strategy ")[-1]
        plain = printed(render_terminal(Study(make_experiment(), self.RUNS)), width=300)
        assert text.split("Times, peaks")[0] == plain.split("Times, peaks")[0]
        assert "1 error" not in plain


class TestReport:
    def section_of(self, *records: RunRecord) -> str:
        text = render_report(Study(make_experiment(strategies=(DYNAMIC,)), records))
        return text.split("## Memory: analytic, traced, and of the run")[1].split("## Findings")[0]

    def test_the_table_of_a_phase_adds_up_in_one_unit(self):
        text = self.section_of(make_traced(), make_record())
        assert re.findall("^### (.*)$", text, re.M) == [
            "Memory of prefill, in KiB: small",
            "Memory of decode, in KiB: small",
        ]
        prefill, decode = tables_of(text)
        # 1,012,800, 1,000, 6,000, 17,688, 1,037,488, 2,512 and 1,040,000 bytes.
        assert dict(zip(*prefill, strict=True)) == {
            "strategy": "dynamic",
            "weights + KV, analytic": "989.1",
            "+ KV, traced": "0",
            "+ cache transients, traced": "0.9766",
            "+ logits, traced": "5.859",
            "+ activations, traced": "17.27",
            "= peak, traced": "1,013",
            "+ forced tokens, emulated": "2.453",
            "+ unexplained, emulated": "0",
            "= peak, emulated": "1,016",
        }
        assert decode[0][:3] == ["strategy", "step", "weights + KV, analytic"]
        assert decode[1][1] == "156"

    def test_what_only_a_real_device_knows_is_named_measured(self):
        phase = make_phase(1_040_000, peak_reserved_bytes=2**21, peak_device_used_bytes=2**22)
        conditions = make_conditions(baseline_bytes=1_000_300)
        run = make_record(trials=make_trials(prefill=phase), conditions=conditions, evidence="measured")
        titles = tables_of(self.section_of(make_traced(), run))[0][0]
        assert titles[-6:] == [
            "+ workspaces, measured", "+ forced tokens, measured", "+ unexplained, measured", "= peak, measured",
            "+ allocator, measured", "+ context, measured",
        ]  # fmt: skip

    def test_a_cell_without_a_trace_or_a_run_has_dashes(self):
        prefill, _ = tables_of(self.section_of(make_record(), make_traced(STREAMED)))
        assert [row[0] for row in prefill[1:]] == ["dynamic", "streamed (not run)"]
        assert prefill[1][2:7] == ["-"] * 5
        assert prefill[2][-2:] == ["-"] * 2

    def test_records_without_traces_keep_what_is_known_of_them(self):
        prefill, _ = tables_of(self.section_of(make_record()))
        assert prefill[0] == ["strategy", "weights + KV, analytic", "+ forced tokens, emulated", "= peak, emulated"]
        text = render_report(Study(make_experiment(), [make_record()]))
        assert "traced" not in " ".join(row[1] for row in table_with(text, "rung"))

    def test_a_directory_of_traces_alone_makes_a_report(self):
        text = render_report(Study(make_experiment(), [make_traced()]))
        assert "Evidence: traced on tensors without data." in text
        assert "dynamic (not run)" in text
        (row,) = table_with(text.split("## Traces of cells that were not run")[1], "run_id")[1:]
        assert row[1:4] == ["dynamic", "ok", make_traced().run_id]

    def test_every_shown_column_has_a_method(self):
        phase = make_phase(1_040_000, peak_reserved_bytes=2**21, peak_device_used_bytes=2**22)
        conditions = make_conditions(baseline_bytes=1_000_300)
        facts = make_facts(weights_bytes=999_000)
        trials = make_trials(prefill=phase)
        run = make_record(trials=trials, conditions=conditions, evidence="measured", model=facts)
        traced = make_traced(model=facts)
        text = render_report(Study(make_experiment(), [traced, run]))
        shown = {
            title.rpartition(", ")[0] or title
            for table in tables_of(self.section_of(traced, run))
            for title in table[0][1:]
        }
        described = {name for row in table_with(text, "rung")[1:] for name in row[0].split(", ")}
        assert len(shown) == len(PARTS)  # the two peaks have one name, and the step is no part
        assert shown <= described
        assert "sessions by trace" in described

    def test_raw_bytes_are_in_a_table_of_their_own(self, tmp_path: Path):
        paths = write_report(tmp_path, Study(make_experiment(), [make_traced(), make_streamed(), make_record()]))
        frame = pd.read_csv(next(path for path in paths if path.name == "memory.csv"))
        assert list(frame) == list(MEMORY_COLUMNS)
        assert frame["strategy"].tolist() == ["dynamic", "dynamic", "streamed", "streamed"]
        assert frame["activations_bytes"].tolist()[:2] == [17_688, 320]
        assert frame["traced_run_id"].tolist()[0] == make_traced().run_id
        assert frame["activations_bytes"].isna().tolist() == [False, False, True, True]
        assert list(memory_frame([])) == list(MEMORY_COLUMNS)

    def test_sessions_by_trace_stand_between_the_others(self):
        text = render_report(Study(make_experiment(), [make_traced(), make_record()]))
        (title, row) = table_with(text, "sessions by trace")[:2]
        assert (title[1:4], row[1:4]) == (
            ["analytic sessions", "sessions by trace", "sessions by peak"],
            ["54", "48", "45"],
        )
