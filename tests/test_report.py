"""Reports over records. The Markdown is read back with an independent parser, markdown-it."""

import html
import io
import json
import re
import time

import pandas as pd
import pytest
from factories import (
    DYNAMIC,
    QUANTIZED,
    STREAMED,
    make_budget,
    make_conditions,
    make_experiment,
    make_facts,
    make_failure,
    make_fidelity,
    make_machine,
    make_phase,
    make_quantized,
    make_record,
    make_spec,
    make_streamed,
    make_timing,
    make_traced,
    make_trial,
    make_trials,
    make_workload,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

from offload_eval.analysis.study import Study
from offload_eval.core.experiment import MeasurementPlan, ModelSpec, OffloadedSpec, QuantizedSpec
from offload_eval.core.records import Conditions
from offload_eval.reporting import markdown
from offload_eval.reporting.detail_tables import fidelity_frame, host_frame
from offload_eval.reporting.display import byte_scale, one_line, show_bytes, show_count, show_ms, show_number
from offload_eval.reporting.report import render_report, write_report
from offload_eval.reporting.sentences import cell_texts
from offload_eval.reporting.sourced import plain
from offload_eval.reporting.tables import analytic_frame, strategy_frame, trials_frame
from offload_eval.reporting.terminal import render_terminal
from offload_eval.reporting.verdict_text import answer

HOSTILE = "a|b\nc `d` ``e`` <script>x</script> **f** [g](http://h) \\| \x1b[31m\u202e # _i_ ~~j~~ $k$ &lt;"
PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def clean_records():
    return [make_record(), make_streamed(), make_quantized()]


def tables_of(text):
    """Every table of a Markdown text, as rows of cells as a reader sees them."""
    rendered = PARSER.render(text)
    return [
        [
            [_shown(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
            for row in re.findall(r"<tr>(.*?)</tr>", table, re.S)
        ]
        for table in re.findall(r"<table>(.*?)</table>", rendered, re.S)
    ]


def _shown(cell):
    return html.unescape(re.sub(r"</?(code|strong|em)>", "", cell))


def table_with(text, title):
    (found,) = [table for table in tables_of(text) if title in table[0]]
    return found


def sentences_of(records, **changes):
    return tuple(plain(text) for text in cell_texts(make_experiment(**changes), records)["small"])


def printed(renderable, width=100):
    console = Console(width=width, file=io.StringIO(), force_terminal=False, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


class TestDisplay:
    @pytest.mark.parametrize(
        ("value", "shown"),
        [(None, "-"), (0, "0"), (0.0, "0"), (12, "12.00"), (12345.6, "12,346"), (0.00123456, "0.001235"),
         (1.5e-9, "1.50e-09"), (-2.5, "-2.500"), (float("inf"), "inf")],
    )  # fmt: skip
    def test_numbers_keep_four_significant_digits(self, value, shown):
        assert show_number(value) == shown

    def test_missing_is_a_dash_and_zero_is_a_zero(self):
        scale = byte_scale([None])
        assert (show_count(None), show_ms(None), show_bytes(None, scale)) == ("-", "-", "-")
        assert (show_count(0), show_ms(0.0), show_bytes(0, scale)) == ("0", "0", "0")

    @pytest.mark.parametrize(
        ("sizes", "unit"),
        [([], "B"), ([1023], "B"), ([1, 1024], "KiB"), ([None, 3 * 1024**2], "MiB"), ([5, -(1024**3)], "GiB")],
    )
    def test_a_column_takes_the_unit_of_its_largest_value(self, sizes, unit):
        assert byte_scale(sizes).unit == unit

    def test_one_line_drops_controls_and_says_what_it_cuts(self):
        assert one_line(" a\r\n\tb\x1b[31m\u202ec\udc80 ") == "a b [31m c"
        assert one_line("abcdef", limit=4) == "abc…"


class TestMarkdown:
    @given(st.lists(st.text(max_size=40), min_size=2, max_size=2))
    @settings(max_examples=300, deadline=None)
    def test_no_text_breaks_a_table(self, cells):
        """A table of any text reads back as that text, cell by cell."""
        (table,) = tables_of(markdown.render_table(["x", "y"], [cells, ["1", "2"]], "lr"))
        assert table == [["x", "y"], [one_line(cell) for cell in cells], ["1", "2"]]

    @given(st.text(max_size=40))
    @settings(max_examples=300, deadline=None)
    def test_no_text_adds_markup_to_a_list(self, text):
        """A list item of any text is one paragraph in one list."""
        rendered = PARSER.render(markdown.bullets(["x" + "y", text]))
        assert rendered.count("<li>") == 2
        assert set(re.findall(r"<(\w+)", rendered)) <= {"ul", "li"}

    @pytest.mark.parametrize(
        "text", ["# a", "1. a", "12) a", "- a", "+ a", "---", "* a", "> a", "<!-- a", "=== a", "    a"]
    )
    def test_text_at_the_start_of_a_line_is_text(self, text):
        assert PARSER.render(markdown.paragraph(text)) == f"<p>{html.escape(text.strip(), quote=False)}</p>\n"

    @pytest.mark.parametrize("text", ["plain", "a|b", "a`b``c", "<b>*c*", "back\\slash"])
    def test_code_shows_any_text(self, text):
        (table,) = tables_of(markdown.render_table(["x", "y"], [[markdown.code(text), "2"]], "ll"))
        assert table[1] == [text, "2"]

    def test_a_row_of_another_length_is_refused(self):
        with pytest.raises(ValueError, match="1 columns where the header has 2"):
            markdown.render_table(["x", "y"], [["1"]], "ll")
        with pytest.raises(ValueError, match="3 columns where the header has 2"):
            markdown.render_table(["x", "y"], [["1", "2"]], "lll")

    def test_a_fence_outlasts_the_backticks_in_it(self):
        assert markdown.fence("a ``` b") == "````\na ``` b\n````"


class TestFrames:
    def test_strategies_hold_raw_si_numbers(self):
        row = strategy_frame(clean_records()).set_index("strategy").loc["streamed"]
        expected = {
            "workload": "small", "status": "ok", "evidence": "emulated", "analytic_sessions": 54,
            "sessions_by_peak": 45, "ttft_s": 0.5, "prefill_peak_bytes": 1_040_000,
            "decode_peak_bytes": 1_030_000, "kv_device_bytes": 32_768, "kv_host_bytes": 32_768,
            "bytes_moved_per_token": 50_000.0, "mean_kl_nats": 0.0, "noise_floor_nats": pytest.approx(0.001),
        }  # fmt: skip
        assert {name: row[name] for name in expected} == expected
        assert row["tpot_s"] == pytest.approx(0.015)
        assert row["exposed_s_per_token"] == pytest.approx(0.005)
        # 2 * 157 / (0.5 + 156 * 0.015)
        assert row["tokens_per_s"] == pytest.approx(314 / 2.84)

    def test_a_cell_without_a_result_has_a_row_of_missing_values(self):
        (row,) = strategy_frame([make_failure("oom")]).to_dict("records")
        known = {"workload", "strategy", "status", "evidence", "analytic_sessions", "run_id"}
        known |= {"batch_size", "attn_implementation"}  # what was asked for
        assert {name for name, value in row.items() if not pd.isna(value)} == known

    def test_a_missing_number_leaves_its_column_whole_numbers(self):
        frame = strategy_frame([make_record(), make_failure("oom")])
        assert frame["decode_peak_bytes"].tolist()[0] == 1_036_000
        assert "1036000," in frame.to_csv()

    def test_the_analytic_card(self):
        frame = analytic_frame(clean_records()).set_index("strategy")
        # 255 cached tokens * 64 bytes * 2 sessions to the device, one token's 64 bytes * 2 back.
        streamed = frame.loc["streamed"]
        moved = (streamed["h2d_bytes_per_step"], streamed["d2h_bytes_per_step"])
        assert moved == (0, 128), "two layers stay in two slots"
        assert (streamed["kv_device_bytes_per_session"], streamed["kv_host_bytes_per_session"]) == (16_384, 16_384)
        quantized = frame.loc["quantized-hqq-int4"]
        assert (quantized["kv_device_bytes_per_session"], quantized["analytic_sessions"]) == (5_896, 90)
        assert "up to 127, are unquantized" in quantized["assumptions"]

    def test_the_card_is_missing_where_arithmetic_refuses(self):
        (row,) = analytic_frame([make_record(model=make_facts(shape=None))]).to_dict("records")
        assert {name for name, value in row.items() if not pd.isna(value)} == {"workload", "strategy", "run_id"}

    def test_every_raw_trial_is_a_row(self):
        trials = (make_trial(0.25, inter_token_latencies_s=(0.1, 0.30000000000000004)), make_timing(0.5))
        frame = trials_frame([make_record(trials=trials), make_failure("failed"), make_streamed()])
        assert frame["trial"].tolist() == [1, 2, 1, 2, 3]
        assert frame["inter_token_latencies_s"][0] == "0.1 0.30000000000000004"
        assert frame["tpot_s"].tolist()[:2] == [0.25, 0.5]
        assert frame["prefill_peak_allocated_bytes"][0] == 1_040_000
        assert pd.isna(frame["prefill_peak_allocated_bytes"][1])
        assert pd.isna(frame["peak_host_rss_bytes"]).all()

    @pytest.mark.parametrize("frame_of", [strategy_frame, fidelity_frame, host_frame, analytic_frame, trials_frame])
    def test_no_records_give_an_empty_frame_with_its_columns(self, frame_of):
        frame = frame_of([])
        assert len(frame) == 0
        assert list(frame) == list(frame_of(clean_records()))


class TestSentences:
    def test_a_strategy_that_moves_kv_is_one_text_of_three_sentences(self):
        assert sentences_of(clean_records())[1] == (
            "streamed (emulated) buys: 45 sessions by peak against dynamic's 45 (54 against 54 by arithmetic); device "
            "peak the same in prefill, 5.86 KiB lower in decode. It costs: TPOT 15.0 ms, 1.50x dynamic's 10.0 ms; "
            "48.83 KiB across the link and 5.00 ms of waiting a token. Its output: bit-equal to dynamic."
        )

    def test_a_lossy_strategy_stays_off_the_link_and_stands_beside_the_noise_floor(self):
        assert sentences_of(clean_records())[2] == (
            "quantized-hqq-int4 (emulated) buys: 47 sessions by peak against dynamic's 45 (90 against 54 by "
            "arithmetic); device peak 1.95 KiB lower in prefill, the same in decode. It costs: TPOT 12.0 ms, 1.20x "
            "dynamic's 10.0 ms. Its output: mean KL 0.0200 nats, noise floor 0.00100 nats; top-1 agrees on 95 % of "
            "positions."
        )

    def test_the_baseline_has_figures_of_its_own(self):
        # 1,040,000 and 1,036,000 bytes.
        assert sentences_of(clean_records())[0] == (
            "dynamic (emulated), the baseline: 45 sessions by peak (54 by arithmetic); device peak 1015.62 KiB in "
            "prefill, 1011.72 KiB in decode; TPOT 10.0 ms; noise floor 0.00100 nats."
        )

    @pytest.mark.parametrize(
        ("ratio", "said"), [(1.0, "100 %"), (0.9999, "99.9 %"), (0.98, "98 %"), (0.9444, "94.4 %"), (0.0, "0 %")]
    )
    def test_not_every_position_is_never_all_of_them(self, ratio, said):
        record = make_quantized(fidelity=make_fidelity(0.02, top1_agreement_ratio=ratio))
        assert f"top-1 agrees on {said} of positions" in sentences_of([make_record(), record])[2]

    def test_every_time_and_peak_of_an_emulated_run_says_so(self):
        for text in sentences_of([*clean_records(), make_failure("oom", OffloadedSpec())]):
            assert not re.search(r"TPOT|TTFT|peak|memory|waiting", text) or "(emulated)" in text

    def test_a_measured_run_does_not_call_itself_emulated(self):
        said = " ".join(sentences_of([make_record(evidence="measured"), make_streamed(evidence="measured")]))
        assert "emulated" not in said
        assert "streamed (measured) buys: " in said

    def test_no_ratio_without_a_denominator(self):
        untimed = make_record(trials=(make_trial(ttft_s=None, e2e_latency_s=None),), fidelity=None)
        own, text, _ = sentences_of([untimed, make_quantized()], strategies=(DYNAMIC, QUANTIZED, STREAMED))
        assert "It costs: TPOT 12.0 ms. Its output: mean KL 0.0200 nats; top-1" in text
        assert not re.search(r"TPOT|noise", own)

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            (
                {"trials": make_trials()[1:], "fidelity": None, "model": make_facts(shape=None)},
                "streamed (emulated) costs: TPOT 10.0 ms, 1.00x dynamic's 10.0 ms.",
            ),
            (
                {"trials": make_trials()[1:], "fidelity": None},
                "streamed (emulated) buys: 54 sessions by arithmetic against dynamic's 54. It costs: TPOT 10.0 ms, "
                "1.00x dynamic's 10.0 ms.",
            ),
            (
                {"trials": (), "model": make_facts(shape=None)},
                "streamed (emulated), its output: bit-equal to dynamic.",
            ),
            (
                {"trials": (), "fidelity": None, "model": make_facts(shape=None)},
                "streamed (emulated): nothing was measured.",
            ),
        ],
        ids=["times alone", "no peaks", "output alone", "nothing"],
    )
    def test_what_was_not_measured_leaves_its_clause_out(self, changes, text):
        assert sentences_of([make_record(), make_streamed(**changes)])[1] == text

    def test_a_higher_peak_is_called_higher(self):
        worse = make_quantized(trials=make_trials(prefill=make_phase(1_042_048)))
        assert any("device peak 2.00 KiB higher in prefill" in line for line in sentences_of([make_record(), worse]))

    @pytest.mark.parametrize(
        ("record", "text"),
        [
            (make_failure("unsupported", message="it needs a GPU."), "streamed cannot run here: it needs a GPU."),
            (
                make_failure("oom", conditions=Conditions(cap_bytes=1024**2)),
                "streamed (emulated) does not fit the enforced cap of 1.00 MiB: during the memory pass, in prefill: "
                "ProblemError: no memory.",
            ),
            (
                make_failure("oom", conditions=Conditions(cap_bytes=1024**2), failed={"ledger": "host"}),
                "streamed (emulated) ran out of host memory during the memory pass, in prefill: ProblemError: no "
                "memory.",
            ),
            (
                make_failure("oom"),
                "streamed (emulated) ran out of device memory during the memory pass, in prefill: ProblemError: no "
                "memory.",
            ),
            (
                make_failure("timeout"),
                "streamed (emulated) was given up after 3,600 s, during the memory pass, in prefill: ProblemError: no "
                "memory.",
            ),
            (
                make_failure("failed"),
                "streamed failed during the memory pass, in prefill: ProblemError: no memory.",
            ),
        ],
    )
    def test_a_cell_without_a_result_is_said_in_words(self, record, text):
        assert sentences_of([make_record(), record])[1] == text

    def test_a_cell_that_was_not_run_is_named(self):
        assert "streamed was not run: there is no record of it." in sentences_of([make_record()])

    def test_a_strategy_without_a_baseline_stands_alone(self):
        assert sentences_of([make_failure("failed", DYNAMIC), make_streamed()])[1] == (
            "streamed (emulated): 45 sessions by peak (54 by arithmetic); device peak 1015.62 KiB in prefill, 1005.86 "
            "KiB in decode; TPOT 15.0 ms; 48.83 KiB across the link and 5.00 ms of waiting a token. Its output: "
            "bit-equal to dynamic. It is compared with nothing: no ok record of dynamic differs from it in the "
            "strategy alone."
        )

    def test_a_strategy_on_its_own_tokens_stands_alone(self):
        own = make_streamed(fidelity=None, conditions=make_conditions(forced_tokens=False))
        text = sentences_of([make_record(), own])[1]
        assert text.endswith("It is compared with nothing: it ran on its own tokens.")
        assert "dynamic" not in text

    def test_one_session_is_not_sessions(self):
        spec = make_spec(budget=make_budget(device_bytes=1_120_000))
        (text,) = sentences_of([make_record(spec=spec)], strategies=(DYNAMIC,))
        # 20,000 bytes are left: one of 16,384, and one of 20,000.
        assert "1 session by peak (1 by arithmetic)" in text


class TestReport:
    def test_sections_stand_in_the_order_a_reader_needs(self):
        text = render_report(Study(make_experiment(), clean_records()))
        assert re.findall(r"^## (.*)$", text, re.M) == [
            "Verdict", "Strategies", "Analytic card", "Memory: analytic, traced, and of the run", "Transfers",
            "Findings", "Spread", "Method", "Machine, versions and model",
            "How to reproduce", "Cells",
        ]  # fmt: skip
        assert text.startswith("# does-it-pay\n\nDoes streaming the KV cache pay?\n\nEvidence: emulated on a CPU")

    def test_the_strategy_table_has_units_and_four_digits(self):
        text = render_report(Study(make_experiment(), clean_records()))
        capacity = table_with(text, "sessions by peak")
        assert capacity[0] == [
            "strategy", "analytic sessions", "sessions by peak", "prefill peak (KiB)", "decode peak (KiB)",
            "KV device (KiB)", "KV host (KiB)",
        ]  # fmt: skip
        # 1,040,000 / 1024 = 1015.6, 1,030,000 / 1024 = 1005.9
        assert capacity[2] == ["streamed", "54", "45", "1,016", "1,006", "32.00", "32.00"]
        costs = table_with(text, "tokens/s")
        assert costs[2] == ["streamed", "500.0", "15.00", "110.6", "48.83", "5.000"]
        # The baseline does not use the link.
        assert costs[1][4:] == ["-", "-"]

    def test_strategy_tables_are_at_most_140_columns_wide(self):
        text = render_report(Study(make_experiment(), clean_records()))
        strategies = text.split("## Strategies")[1].split("## Analytic card")[0]
        assert max(map(len, strategies.splitlines())) <= 140

    def test_missing_is_a_dash_in_every_table(self):
        text = render_report(Study(make_experiment(), [make_record(), make_failure("oom")]))
        assert table_with(text, "sessions by peak")[2] == ["streamed (oom)", "54", "-", "-", "-", "-", "-"]
        assert table_with(text, "tokens/s")[2] == ["streamed (oom)", *["-"] * 5]

    def test_the_fidelity_table(self):
        fidelity = make_fidelity(
            0.02,
            max_kl_nats=0.5,
            top1_agreement_ratio=0.95,
            nll_change_nats=-0.0125,
            first_divergence_tokens=(30, 7, None),
        )
        records = [make_record(), make_streamed(), make_quantized(fidelity=fidelity)]
        assert table_with(render_report(Study(make_experiment(), records)), "noise floor") == [
            ["strategy", "mean KL", "max KL", "noise floor", "top-1 (ratio)", "NLL change", "first divergence",
             "top-1 margin", "bit-equal"],
            ["dynamic", "-", "-", "0.001000", "-", "-", "-", "0.1000", "-"],
            ["streamed", "0", "0", "0.001000", "1.000", "0", "none", "0.1000", "yes"],
            ["quantized-hqq-int4", "0.02000", "0.5000", "0.001000", "0.9500", "-0.01250", "7", "0.1000", "no"],
        ]  # fmt: skip

    def test_the_noise_floor_is_never_shown_as_the_baselines_error(self):
        records = [make_record(fidelity=make_fidelity(0.123, against="chunked_prefill", top1_agreement_ratio=0.456))]
        experiment = make_experiment(strategies=(DYNAMIC,))
        text = render_report(Study(experiment, records))
        for table in tables_of(text):
            for title, cell in zip(table[0], table[1], strict=True):
                assert ("0.1230" in cell) <= (title == "noise floor")
        assert "0.4560" not in text
        assert "0.1230" not in printed(render_terminal(Study(experiment, records))).split("strategy ")[-1]
        (row,) = fidelity_frame(records).to_dict("records")
        assert (row["noise_floor_nats"], row["against"]) == (pytest.approx(0.123), "chunked_prefill")
        assert all(pd.isna(row[name]) for name in ("mean_kl_nats", "max_kl_nats", "top1_agreement_ratio", "bit_equal"))

    def test_host_and_allocator_tables_have_the_columns_that_are_known(self):
        decode = make_phase(
            1_030_000, 7_800_000, h2d_busy_s=0.312, d2h_busy_s=0.156, peak_reserved_bytes=3 * 2**20,
            peak_device_used_bytes=2**30,
        )  # fmt: skip
        trials = make_trials(
            decode=decode,
            peak_host_rss_bytes=2**30,
            pinned_requested_bytes=3 * 2**19,
            pinned_allocated_bytes=2**21,
            num_alloc_retries=2,
        )
        text = render_report(Study(make_experiment(), [make_record(), make_streamed(trials=trials)]))
        assert table_with(text, "H2D busy/step (ms)") == [
            ["strategy", "host RSS peak (GiB)", "pinned asked (MiB)", "pinned allocated (MiB)", "H2D busy/step (ms)",
             "D2H busy/step (ms)"],
            ["dynamic", *["-"] * 5],
            ["streamed", "1.000", "1.500", "2.000", "2.000", "1.000"],
        ]  # fmt: skip
        assert table_with(text, "alloc retries") == [
            ["strategy", "decode reserved (MiB)", "decode device used (GiB)", "alloc retries"],
            ["dynamic", "-", "-", "0"],
            ["streamed", "3.000", "1.000", "2"],
        ]

    def test_pressure_on_host_memory_has_a_table_of_its_own(self):
        first = make_trial(
            0.015,
            peak_cgroup_bytes=3 * 2**30,
            cgroup_limit_bytes=4 * 2**30,
            cgroup_swap_bytes=2**20,
            swap_in_bytes=8192,
            num_major_faults=3,
            num_minor_faults=1200,
        )
        again = make_timing(0.015, swap_in_bytes=4096, swap_out_bytes=0, num_major_faults=4, num_minor_faults=34)
        text = render_report(Study(make_experiment(), [make_record(), make_streamed(trials=(first, again, again))]))
        assert table_with(text, "major faults") == [
            ["strategy", "cgroup peak (GiB)", "cgroup limit (GiB)", "cgroup swap (MiB)", "swapped in (KiB)",
             "swapped out (B)", "major faults", "minor faults"],
            ["dynamic", "-", "-", "-", "0", "0", "-", "-"],
            ["streamed", "3.000", "4.000", "1.000", "16.00", "0", "11", "1,268"],
        ]  # fmt: skip

    def test_a_table_that_knows_nothing_is_left_out(self):
        bare = make_trials(num_alloc_retries=None, swap_in_bytes=None, swap_out_bytes=None)
        text = render_report(Study(make_experiment(), [make_record(trials=bare, fidelity=None)]))
        strategies = text.split("## Strategies")[1].split("## Analytic card")[0]
        assert re.findall(r"^### (.*): small$", strategies, re.M) == [
            "Capacity and memory",
            "Time and transfer",
        ]

    def test_a_rung_is_named_where_there_are_several(self):
        records = [make_record(), make_streamed(evidence="measured")]
        text = render_report(Study(make_experiment(), records))
        times = next(table for table in tables_of(text) if "TTFT (ms)" in table[0])
        assert [row[0] for row in times[1:]] == ["dynamic (emulated)", "streamed (measured)"]
        assert ["TTFT", "emulated, measured"] in [row[:2] for row in table_with(text, "rung")]

    def test_every_cell_is_accounted_for(self):
        stray = make_record(spec=make_spec(OffloadedSpec()))
        cells = table_with(render_report(Study(make_experiment(), [make_record(), stray])), "run_id")[1:]
        assert [row[:3] for row in cells] == [
            ["small", "dynamic", "ok"],
            ["small", "streamed", "not run"],
            ["small", "quantized-hqq-int4", "not run"],
            ["small", "offloaded", "ok"],
        ]
        assert cells[0][3:5] == [make_record().run_id, "3 of 3"]

    def test_an_assumption_is_given_once_with_its_cells(self):
        text = render_report(Study(make_experiment(), clean_records()))
        assert text.count("fragmentation and paging are not counted") == 1
        assert "- every cell: Activations" in text
        assert "- small / quantized-hqq-int4: 4.5 bits a quantized value" in text

    def test_the_spread_names_its_coverage(self):
        trials = (make_trial(0.010), *(make_timing(tpot_s) for tpot_s in (0.010, 0.011, 0.012, 0.013, 0.014)))
        spec = make_spec(measurement=MeasurementPlan(trials=7))
        text = render_report(Study(make_experiment(), [make_record(spec=spec, trials=trials), make_streamed()]))
        rows = table_with(text, "coverage")
        assert rows[1][:5] == [
            "small / dynamic",
            "6 of 7",
            "96.9%",
            "500.0 (500.0 to 500.0)",
            "11.50 (10.00 to 14.00)",
        ]
        assert rows[2][1:3] == ["3 of 3", "min to max"]

    def test_findings_are_shown_with_their_remedy(self):
        text = render_report(Study(make_experiment(), [make_record(), make_streamed(fidelity=make_fidelity(0.5))]))
        (row,) = table_with(text, "remedy")[1:]
        assert row[:2] == ["error", "lossless_differs"]
        assert row[2].startswith("small / streamed: mean KL to the baseline is 0.5 nats")

    def test_another_machine_is_named(self):
        records = [make_record(), make_streamed(machine=make_machine(cpu="Other CPU"))]
        assert "differs: cpu: Test CPU -&#62; Other CPU." in render_report(Study(make_experiment(), records))

    def test_no_records_still_make_a_report(self):
        text = render_report(Study(make_experiment(), []))
        assert text.count("Nothing has been recorded yet.") == 5
        assert "dynamic was not run" in text

    def test_the_same_records_give_the_same_text(self):
        assert render_report(Study(make_experiment(), clean_records())) == render_report(
            Study(make_experiment(), clean_records())
        )

    def test_hostile_text_shows_as_itself_everywhere(self):
        model, hostile = ModelSpec(source=HOSTILE), make_machine(cpu=HOSTILE, git_commit=HOSTILE)
        experiment = make_experiment(question=HOSTILE, model=model)
        records = [
            make_record(spec=make_spec(model=model), machine=hostile, model=make_facts(fingerprint=HOSTILE)),
            make_failure("failed", message=HOSTILE, failed={"type": HOSTILE, "stage": HOSTILE}),
            make_quantized(model=make_facts(shape=None, shape_refusal=HOSTILE)),
        ]
        text = render_report(Study(experiment, records))
        rendered = PARSER.render(text)
        assert not {"script", "a", "s", "em"} & set(re.findall(r"<(\w+)", rendered))
        bold = re.findall(r"<strong>(.*?)</strong>", rendered)
        assert bold
        assert all(re.fullmatch(r"Choose for most [\w/]+|Sessions|Price|Output|Break-even", each) for each in bold)
        assert "\x1b" not in rendered
        assert "\u202e" not in rendered
        for table in tables_of(text):
            assert {len(row) for row in table} == {len(table[0])}
        shown = one_line(HOSTILE)
        assert [row[1] for row in table_with(text, "value") if row[0] == "model fingerprint"] == [shown]
        assert any(shown in row[2] for row in table_with(text, "remedy")[1:])
        assert f"<p>{html.escape(shown, quote=False)}</p>" in rendered


class TestMethod:
    def method_of(self, records, **plan):
        text = render_report(Study(make_experiment(measurement=MeasurementPlan(**plan)), records))
        return " ".join(text.split("## Method")[1].split("## Machine")[0].split())

    def test_every_shown_column_has_a_method(self):
        decode = make_phase(
            1, 1, peak_reserved_bytes=1, peak_device_used_bytes=1, h2d_busy_s=1.0, d2h_busy_s=1.0,
            exposed_transfer_s=1.0,
        )  # fmt: skip
        trials = make_trials(
            prefill=decode, decode=decode, peak_host_rss_bytes=1, pinned_requested_bytes=1, pinned_allocated_bytes=1
        )
        text = render_report(Study(make_experiment(), [make_record(), make_streamed(trials=trials)]))
        strategies = text.split("## Strategies")[1].split("## Analytic card")[0]
        shown = {re.sub(r" \(.*", "", title) for table in tables_of(strategies) for title in table[0][1:]}
        described = {name for row in table_with(text, "rung")[1:] for name in row[0].split(", ")}
        assert len(shown) > 20
        assert {re.sub(r"^(prefill|decode) (?!peak)", "", title) for title in shown} <= described

    def test_it_counts_what_the_plan_asks_for(self):
        said = self.method_of(clean_records(), trials=5, memory_trials=2, transfer_trials=4, warmups=1)
        assert "The plan for each cell: 5 for time with nothing else attached, 2 for memory, 4 for transfers" in said
        assert "Warm-up: 1 full-length runs before anything is timed, besides the fidelity pass" in said

    def test_without_fidelity_neither_its_pass_nor_the_noise_floor_is_described(self):
        assert "one that compares logits" in self.method_of([make_record()])
        said = self.method_of([make_record(fidelity=None)], fidelity=False)
        assert not re.search(r"fidelity|noise|KL|top-1|NLL|logit", said, re.IGNORECASE)

    def test_chunks_are_those_that_the_baseline_was_prefilled_in(self):
        short = make_record(conditions=make_conditions(noise_floor_chunk_tokens=49))
        spec = make_spec(workload=make_workload(name="long"))
        long = make_record(spec=spec, conditions=make_conditions(noise_floor_chunk_tokens=255))
        assert "prefilled in chunks of 49 tokens." in self.method_of([short, make_streamed()])
        assert "in chunks of 49 tokens (small), 255 tokens (long)." in self.method_of([short, long])
        assert "prefilled in chunks." in self.method_of([make_record()])

    def test_the_same_work_is_claimed_only_of_cells_that_were_given_the_tokens(self):
        assert "given to every strategy, so that all do the same work and logits compare" in self.method_of(
            clean_records()
        )
        own = make_streamed(fidelity=None, conditions=make_conditions(forced_tokens=False))
        said = self.method_of([make_record(), own])
        assert "the same work" not in said
        assert "except for small / streamed, which ran on tokens of their own" in said


class TestWriting:
    def test_files_are_written_whole_and_replace_earlier_ones(self, tmp_path):
        write_report(tmp_path, Study(make_experiment(), [make_record()]))
        paths = write_report(tmp_path, Study(make_experiment(), clean_records()))
        tables = ("strategies", "fidelity", "host", "analytic", "memory", "transfers", "trials")
        names = ["report.md", "report.html", "report.json", *(f"tables/{table}.csv" for table in tables)]
        assert paths == [tmp_path / name for name in names]
        assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(paths)
        assert paths[0].read_text() == render_report(Study(make_experiment(), clean_records()))
        frame = pd.read_csv(tmp_path / "tables/strategies.csv")
        assert frame["tpot_s"].tolist() == pytest.approx([0.010, 0.015, 0.012])
        assert len(pd.read_csv(tmp_path / "tables/trials.csv")) == 9

    def test_rows_stand_in_the_experiments_order(self, tmp_path):
        write_report(tmp_path, Study(make_experiment(), clean_records()[::-1]))
        assert pd.read_csv(tmp_path / "tables/analytic.csv")["strategy"].tolist() == [
            "dynamic",
            "streamed",
            "quantized-hqq-int4",
        ]

    def test_a_failed_write_leaves_the_earlier_report(self, tmp_path, monkeypatch):
        (report, *_) = write_report(tmp_path, Study(make_experiment(), [make_record()]))
        before = report.read_text()

        def refuse(self, target):
            raise OSError("disk full")

        monkeypatch.setattr(type(report), "replace", refuse)
        with pytest.raises(OSError, match="disk full"):
            write_report(tmp_path, Study(make_experiment(), clean_records()))
        assert report.read_text() == before
        assert not list(tmp_path.rglob("*.part"))

    def test_a_report_takes_time_in_proportion_to_its_records(self, tmp_path):
        few_s, many_s = (self.seconds(tmp_path, num_workloads) for num_workloads in (150, 600))
        assert many_s < 6 * few_s

    def seconds(self, tmp_path, num_workloads):
        loads = tuple(make_workload(name=f"load-{number}") for number in range(num_workloads))
        makers = {DYNAMIC: make_record, STREAMED: make_streamed, QUANTIZED: make_quantized}
        records = [make(spec=make_spec(kind, workload=load)) for load in loads for kind, make in makers.items()]
        records += [make_traced(spec=make_spec(workload=load)) for load in loads]
        started = time.process_time()
        write_report(tmp_path, Study(make_experiment(workloads=loads), records))
        return time.process_time() - started

    def test_of_thousands_of_cells_the_text_has_the_first_and_the_tables_have_all(self, tmp_path):
        loads = tuple(make_workload(name=f"load-{number}") for number in range(300))
        records = [make_record(spec=make_spec(workload=load)) for load in loads]
        write_report(tmp_path, Study(make_experiment(workloads=loads), records))
        text = (tmp_path / "report.md").read_text()
        assert "Details are of the first 66 of 300 workloads" in text  # 200 cells of 3 strategies
        assert "load-65" in text
        assert "load-66" not in text.split("## Strategies")[1]
        assert len(pd.read_csv(tmp_path / "tables/strategies.csv")) == 300
        assert len(json.loads((tmp_path / "report.json").read_text())["tables"]["strategies"]) == 300
        assert (tmp_path / "report.html").stat().st_size < 2_000_000

    def test_the_json_has_verdict_findings_and_tables_in_si_units(self, tmp_path):
        records = [make_record(), make_streamed(), make_failure("failed", QUANTIZED, message="no luck")]
        write_report(tmp_path, Study(make_experiment(), records))
        document = json.loads((tmp_path / "report.json").read_text())
        assert document["schema_version"] == 1
        assert (document["experiment"], document["budget"]["device_bytes"]) == ("does-it-pay", 2_000_000)
        assert [machine["cpu"] for machine in document["machines"]] == ["Test CPU"]
        (situation,) = document["verdict"]["situations"]
        assert [each["sessions"] for each in situation["standings"]] == [45, 45, None]
        assert [(each["goal"], each["strategy"]) for each in situation["choices"]] == [
            ("sessions", "dynamic"),
            ("tokens_per_s", "dynamic"),
        ]
        assert [finding["code"] for finding in document["findings"]] == ["failed"]
        tables = document["tables"]
        assert set(tables) == {path.stem for path in (tmp_path / "tables").iterdir()} - {"trials"}
        assert [row["tpot_s"] for row in tables["strategies"]] == [pytest.approx(0.010), pytest.approx(0.015), None]
        assert {row["run_id"] for row in tables["fidelity"]} == {record.run_id for record in records}

    def test_a_table_without_a_row_is_not_written_and_an_earlier_one_is_removed(self, tmp_path):
        write_report(tmp_path, Study(make_experiment(), [make_record(), make_streamed()]))
        assert (tmp_path / "tables/transfers.csv").exists()
        paths = write_report(tmp_path, Study(make_experiment(), [make_record()]))
        assert "transfers.csv" not in [path.name for path in paths]
        assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(paths)


class TestTerminal:
    def test_the_table_fits_100_columns_with_every_number(self):
        long = QuantizedSpec(backend="hqq", nbits=2, axis_key=1, axis_value=1, q_group_size=32, residual_length=64)
        load = make_workload(name="a-workload-with-a-rather-long-name", prompt_tokens=100)
        experiment = make_experiment(workloads=(load,), strategies=(DYNAMIC, STREAMED, long))
        big = make_trials(123.4567, decode=make_phase(10**12, 10**12))
        records = [
            make_record(spec=make_spec(DYNAMIC, workload=load)),
            make_record(spec=make_spec(long, workload=load), trials=big, fidelity=make_fidelity(1.234e-9)),
        ]
        text = printed(render_terminal(Study(experiment, records)))
        assert max(map(len, text.splitlines())) <= 100
        assert "…" not in text
        # 10**12 / 1024**3 = 931.32 GiB at the peak; 2 * 10**12 / 312 / 1024**3 = 5.970 GiB a token.
        for number in ("931.3", "123,457", "5.970", "1.23e-09"):
            assert number in text.split("strategy ")[-1]

    def test_the_verdict_comes_first_and_findings_are_counted(self):
        text = printed(render_terminal(Study(make_experiment(), [make_record(), make_failure("failed")])), width=300)
        assert text.startswith("  - Choose for most sessions, no SLO being stated: dynamic, 45 sessions")
        assert "Findings in the report: 1 error." in text

    def test_a_bullet_hangs_its_later_lines_under_its_first_word(self):
        study = Study(make_experiment(), clean_records())
        lines = printed(render_terminal(study), width=80).split("\n\n")[0].splitlines()
        marks = [line[:4] for line in lines if line.strip()]
        assert marks.count("  - ") == len(answer(study.verdict)) > 4
        assert set(marks) == {"  - ", "    "}
        assert len(marks) > 10
        words = " ".join("".join(f"{line[4:]} " for line in lines).split())
        assert words == " ".join(map(plain, answer(study.verdict)))

    def test_hostile_text_is_not_markup(self):
        record = make_failure("failed", message="[bold]x[/bold] \x1b[31m [link=http://h]y")
        text = printed(render_terminal(Study(make_experiment(), [record])), width=300)
        assert "[bold]x[/bold] [31m [link=http://h]y" in text
        assert "\x1b" not in text

    def test_no_records_have_no_table(self):
        text = printed(render_terminal(Study(make_experiment(), [])))
        assert text == "Nothing has been recorded yet.\n"
