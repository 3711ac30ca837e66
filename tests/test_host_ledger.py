"""The host ledger of a cell, on every rung, against arithmetic by hand.

Analytic: SmolLM2-135M, where a layer of one session of 519 tokens takes 519 * 768 = 398,592 bytes, and 30 of them
11,957,760. On records: the default cell of `factories`, whose session has 2 layers of 8,192 bytes on the host.
"""

from typing import Any

import pytest
from factories import (
    DYNAMIC,
    STREAMED,
    make_budget,
    make_experiment,
    make_facts,
    make_record,
    make_spec,
    make_streamed,
    make_trace,
    make_traced,
)
from msgspec.structs import replace
from rich.console import Console
from test_real_caches import CONFIGS
from test_strategy_bound import SHAPE
from test_trace import BATCH, LLAMA_TOKEN_BYTES, build, workload

from offload_eval.analysis.capacity import admitted_by_peak, admitted_by_trace
from offload_eval.analysis.findings import find
from offload_eval.analysis.study import Study
from offload_eval.bounds.host_ledger import HOST_NOT_CHECKED, PINNED_ROUNDS, UPSTREAM_ALLOCATES
from offload_eval.bounds.strategy_bound import strategy_bound
from offload_eval.core.experiment import (
    BudgetSpec,
    DeviceName,
    DynamicSpec,
    OffloadedSpec,
    OffloadedStaticSpec,
    StrategySpec,
    StreamedSpec,
    Workload,
)
from offload_eval.core.judgement import Bound
from offload_eval.core.run_spec import RunSpec, content_hash
from offload_eval.reporting.report import render_report
from offload_eval.reporting.tables import strategy_frame
from offload_eval.reporting.terminal import render_terminal
from offload_eval.tracing.admission import trace_admission
from offload_eval.tracing.trace import trace_strategy

LAYER_BYTES = 519 * 768
DEVICE_SESSIONS = (536_870_912 - 269_030_272 - 1024) // (3 * LAYER_BYTES)
"""Of three slots: 223."""


def bound(strategy: StrategySpec, host_bytes: int | None, device: DeviceName = "cpu") -> Bound:
    asked = Workload(prompt_tokens=384, output_tokens=136)
    budget = BudgetSpec(device_bytes=512 * 1024**2, runtime_bytes=1000, reserve_bytes=24, host_bytes=host_bytes)
    card = strategy_bound(SHAPE, 269_030_272, "bfloat16", asked, strategy, budget, device)
    assert card is not None
    return card


class TestAnalytic:
    @pytest.mark.parametrize(
        ("device", "sessions"),
        [
            pytest.param("cpu", 8, id="as-asked-for"),  # 104,857,600 // 11,957,760
            # 30 buffers: of 5 sessions 1,992,960 bytes, rounded to 2 MiB; of 6 2,391,552, rounded to 4 MiB.
            pytest.param("cuda", 5, id="rounded"),
        ],
    )
    def test_the_smaller_ledger_decides(self, device: DeviceName, sessions: int):
        card = bound(StreamedSpec(), 100 * 1024**2, device)
        assert (card.sessions, card.host_sessions, card.device_sessions) == (sessions, sessions, DEVICE_SESSIONS)
        assert card.limiting_ledger == "host"
        assert HOST_NOT_CHECKED not in card.assumptions
        assert (PINNED_ROUNDS in card.assumptions) == (device == "cuda")

    def test_a_host_that_holds_as_many_leaves_the_device_to_decide(self):
        at_it = bound(StreamedSpec(), DEVICE_SESSIONS * 30 * LAYER_BYTES)
        assert (at_it.sessions, at_it.host_sessions, at_it.limiting_ledger) == (223, 223, "device")
        below = bound(StreamedSpec(), DEVICE_SESSIONS * 30 * LAYER_BYTES - 1)
        assert (below.sessions, below.host_sessions, below.limiting_ledger) == (222, 222, "host")

    def test_a_host_that_holds_none_admits_none(self):
        assert bound(StreamedSpec(), 30 * LAYER_BYTES - 1).sessions == 0

    def test_without_host_memory_in_the_budget_it_is_not_checked(self):
        card = bound(StreamedSpec(), None)
        assert (card.sessions, card.host_sessions, card.limiting_ledger) == (223, None, None)
        assert HOST_NOT_CHECKED in card.assumptions

    def test_a_cache_on_the_device_has_no_host_ledger(self):
        card = bound(DynamicSpec(), 1)
        assert (card.sessions, card.host_sessions, card.limiting_ledger) == (22, None, "device")
        assert not {HOST_NOT_CHECKED, PINNED_ROUNDS} & set(card.assumptions)

    @pytest.mark.parametrize("strategy", [OffloadedSpec(), OffloadedStaticSpec()], ids=["offloaded", "static"])
    def test_upstreams_offloading_counts_and_is_not_held(self, strategy: StrategySpec):
        """30 layers of keys and of values: 60 buffers of 199,296 bytes a session, 5 of them in 1 MiB each."""
        card = bound(strategy, 60 * 1024**2, "cuda")
        assert (card.sessions, card.limiting_ledger) == (5, "host")
        assert UPSTREAM_ALLOCATES in card.assumptions
        assert UPSTREAM_ALLOCATES not in bound(StreamedSpec(), 60 * 1024**2, "cuda").assumptions

    def test_resident_bytes_keep_fewer_layers_off_the_host_the_larger_the_batch(self):
        """Ten layers of one session: of 8 sessions one layer. 8 * 29 layers are 232; of 9 sessions 261."""
        spec = StreamedSpec(resident_bytes=10 * LAYER_BYTES)
        assert bound(spec, 232 * LAYER_BYTES).host_sessions == 8
        assert bound(spec, 232 * LAYER_BYTES - 1).host_sessions == 7
        # Of 2 sessions 25 buffers of 797,184 bytes, rounded to 1 MiB; of 3 sessions 27 of 1,195,776, to 2 MiB.
        assert bound(spec, 25 * 1024**2, "cuda").host_sessions == 2
        assert bound(spec, 54 * 1024**2 - 1, "cuda").host_sessions == 2
        assert bound(spec, 54 * 1024**2, "cuda").host_sessions == 3
        # Of 4 sessions, and of 5 as well, 28 buffers of 2 MiB.
        assert bound(spec, 56 * 1024**2, "cuda").host_sessions == 5


def spec_with_host(host_bytes: int | None = 100_000, strategy: StrategySpec = STREAMED, **changes: Any) -> RunSpec:
    return make_spec(strategy, **{"budget": make_budget(host_bytes=host_bytes)} | changes)


class TestRecords:
    def test_by_peak_each_session_is_charged_its_part_of_the_payload(self):
        """100,000 // (32,768 / 2) = 6; the device ledger admits 45."""
        assert admitted_by_peak(make_streamed(spec=spec_with_host())) == (6, 45, "host")
        assert admitted_by_peak(make_streamed(spec=spec_with_host(10**6))) == (45, 45, "device")
        assert admitted_by_peak(make_streamed()) == (45, 45, None)
        assert admitted_by_peak(make_record(spec=spec_with_host(1, DYNAMIC))) == (45, 45, "device")

    def test_by_peak_no_more_are_admitted_than_rounded_buffers_allow(self):
        """Two buffers: of 4 sessions 32,768 bytes each; of 5 40,960, rounded to 65,536."""
        record = make_streamed(spec=spec_with_host(device="cuda"), evidence="measured")
        assert admitted_by_peak(record) == (4, 45, "host")
        # Where the arithmetic refuses the model, the payload alone says it.
        assert admitted_by_peak(replace(record, model=make_facts(shape=None))) == (6, 45, "host")

    def test_by_trace_the_tokens_on_the_host_are_no_cache(self):
        """40,000 bytes at the peak; live 32,784 after the last step, of which 32,768 are payload: 16 are tokens.

        ceil(39,984 / 2) = 19,992 bytes a session: five in 100,000.
        """
        trace = make_trace(STREAMED)
        step = replace(trace.decode, kv_host_bytes=32_768, live_host_bytes=32_784, peak_host_bytes=35_000)
        trace = replace(trace, prefill=replace(trace.prefill, peak_host_bytes=40_000), steps=(step,))
        assert trace.kv_host_peak_bytes == 39_984
        record = make_traced(spec=spec_with_host(), trace=trace)
        # (2,000,000 - 1,000,000 - 100,000) // ceil(37,488 / 2)
        assert admitted_by_trace(record) == (5, 48, "host")
        assert admitted_by_trace(make_traced(spec=spec_with_host())) == (48, 48, "device")

    def test_a_device_bound_that_is_beaten_is_found_where_the_host_decides_too(self):
        """100 bytes above the start for two sessions: 900,000 // 50 fit the device; the host admits 6 either way."""
        record = make_streamed(spec=spec_with_host())
        assert find([record]) == ()
        first = record.trials[0]
        low = {name: replace(getattr(first, name), peak_allocated_bytes=1_000_100) for name in ("prefill", "decode")}
        beaten = replace(record, trials=(replace(first, **low), *record.trials[1:]))
        assert admitted_by_peak(beaten) == (6, 18_000, "host")
        assert "sessions_above_bound" in [finding.code for finding in find([beaten])]

    def test_a_budget_without_host_memory_keeps_the_names_of_cells(self):
        assert content_hash(spec_with_host(None)) == content_hash(make_spec(STREAMED))
        assert content_hash(spec_with_host()) != content_hash(make_spec(STREAMED))


class TestReport:
    CELLS = (make_record(spec=spec_with_host(strategy=DYNAMIC)), make_streamed(spec=spec_with_host()))

    def test_the_table_marks_what_the_host_decides(self):
        text = render_report(Study(make_experiment(budget=make_budget(host_bytes=100_000)), self.CELLS))
        capacity = text.split("### Capacity and memory")[1].split("###")[0]
        cells = {
            line.split("|")[1].strip(): [each.strip() for each in line.split("|")[2:4]]
            for line in capacity.splitlines()
            if "|" in line
        }
        assert cells["dynamic"] == ["54", "45"]
        assert cells["streamed"] == ["6 (host)", "6 (host)"]
        assert "97.66 KiB of host memory for the cache" in text
        assert "6 sessions by peak (host memory decides) against dynamic's 45 (6 against 54 by arithmetic)" in text

    def test_the_terminal_marks_it_too(self):
        console = Console(width=100)
        with console.capture() as captured:
            console.print(render_terminal(Study(make_experiment(), self.CELLS)))
        (row,) = [
            line
            for line in captured.get().splitlines()
            if line.strip().startswith("streamed ") and "(host)" in line and "sessions" not in line
        ]
        assert row.count("6 (host)") == 2

    def test_the_csv_names_the_ledger(self):
        frame = strategy_frame(self.CELLS).set_index("strategy")
        assert frame.loc["streamed", ["analytic_ledger", "ledger_by_peak"]].tolist() == ["host", "host"]
        assert frame.loc["dynamic", ["analytic_ledger", "ledger_by_peak"]].tolist() == ["device", "device"]
        assert strategy_frame([make_streamed()])["ledger_by_peak"].isna().all()


class TestTracedAdmission:
    """A Llama of 4 layers; 23 cached tokens of 5 output tokens, each of one session half of `LLAMA_TOKEN_BYTES`."""

    SESSION_BYTES = 4 * 23 * LLAMA_TOKEN_BYTES // BATCH

    def admit(self, host_bytes: int | None, strategy: StrategySpec = StreamedSpec()) -> Any:  # noqa: B008
        model = build("llama", CONFIGS["llama"])
        asked = workload(5)
        at_four = trace_strategy(model, strategy, replace(asked, batch_size=4))
        room = max(at_four.prefill.peak_device_bytes, at_four.decode_peak_device_bytes)
        return trace_admission(model, strategy, asked, room, host_available_bytes=host_bytes)

    def test_the_host_ledger_is_searched_to_the_byte(self):
        found = self.admit(3 * self.SESSION_BYTES)
        assert (found.limit, found.host_sessions, found.limiting_ledger) == (3, 3, "host")
        assert min(found.prefill_sessions, found.decode_sessions) == 4
        assert self.admit(3 * self.SESSION_BYTES - 1).limit == 2

    def test_a_large_host_leaves_the_device_to_decide(self):
        found = self.admit(9 * self.SESSION_BYTES)
        assert (found.limit, found.host_sessions, found.limiting_ledger) == (4, 9, "device")

    def test_nothing_on_the_host_or_no_budget_for_it_is_no_limit(self):
        assert self.admit(None).host_sessions is self.admit(None).limiting_ledger is None
        inside = self.admit(1, DynamicSpec())
        assert (inside.limit, inside.host_sessions, inside.limiting_ledger) == (4, None, "device")
