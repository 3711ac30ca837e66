"""compare.html and history.html: what their figures draw and say, worked out by hand, and that no name breaks them."""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from factories import (
    DYNAMIC,
    QUANTIZED,
    STREAMED,
    make_budget,
    make_experiment,
    make_machine,
    make_phase,
    make_quantized,
    make_record,
    make_spec,
    make_streamed,
    make_trials,
    make_workload,
)
from markdown_it import MarkdownIt
from test_compare import compare, timed
from test_history import on, run
from test_html import HOSTILE, Page, words_of
from typer.testing import CliRunner

from offload_eval.analysis.history import make_history
from offload_eval.cli.app import app
from offload_eval.core.comparison import Change, RunComparison
from offload_eval.core.experiment import StreamedSpec
from offload_eval.core.history import HistoryRow
from offload_eval.core.judgement import Interval
from offload_eval.core.records import RunRecord
from offload_eval.reporting.compare_text import render_comparison
from offload_eval.reporting.figures.compare_ratios import (
    MOST_CELLS,
    draw_compare_ratios,
    no_change_band,
    ratio_ends,
    shown_metrics,
)
from offload_eval.reporting.figures.history_trends import MOST_TRENDS, draw_history_trends, run_names
from offload_eval.reporting.figures.page_plates import comparison_plates, history_plates
from offload_eval.reporting.figures.style import house_style
from offload_eval.reporting.history_tables import render_history
from offload_eval.reporting.html_page import render_html
from offload_eval.store.run_directory import RunDirectory


def change(**changes: Any) -> Change:
    base: dict[str, Any] = {
        "metric": "tpot_s", "title": "TPOT", "unit": "s", "workload": "small", "strategy": "dynamic",
        "baseline": 0.010, "candidate": 0.012, "ratio": 1.2, "verdict": "undecided", "lower_is_better": True,
        "test": "ranks",
    }  # fmt: skip
    return Change(**base | changes)


def interval(low: float, high: float) -> Interval:
    return Interval(median=(low + high) / 2, low=low, high=high, confidence=None, samples=3)


def slower() -> RunComparison:
    """TPOT of `streamed` 15 -> 18 ms; the prefill peak of `quantized` 1,038,000 -> 2,000,000 bytes."""
    worse = make_quantized(trials=make_trials(0.012, prefill=make_phase(2_000_000), kv_cache_device_bytes=11_792))
    before = [make_record(), make_streamed(trials=timed([0.0150, 0.0151, 0.0149])), make_quantized()]
    return compare(before, [make_record(), make_streamed(trials=timed([0.0180, 0.0181, 0.0179])), worse])


def comparison_page(comparison: RunComparison) -> str:
    return render_html(render_comparison(comparison), {}, comparison_plates(comparison))


def history_page(rows: Sequence[HistoryRow]) -> str:
    return render_html(render_history(rows, []), {}, history_plates(rows))


def releases(*tpots_s: float, **changes: Any) -> tuple[HistoryRow, ...]:
    """Runs a, b, ... of `dynamic` with these TPOTs, day by day."""
    runs = [
        run(f"releases/{chr(97 + place)}", make_record(trials=make_trials(tpot_s)), day=place + 1, **changes)
        for place, tpot_s in enumerate(tpots_s)
    ]
    return make_history(runs)


@pytest.fixture
def style() -> Any:
    with house_style():
        yield


@pytest.mark.usefixtures("style")
class TestRatios:
    def test_what_is_worse_is_drawn_at_its_ratio(self) -> None:
        """18 / 15 = 1.2 and 2,000,000 / 1,038,000 = 1.927; throughput: (0.5 + 156 * 15 ms) / (0.5 + 156 * 18 ms)."""
        drawing = draw_compare_ratios(slower())
        assert drawing is not None
        panels = {panel.get_title().partition("\n")[0]: panel for panel in drawing.figure.axes}
        assert list(panels) == ["TPOT", "prefill peak allocated", "throughput", "TTFT"]
        assert {panel.get_xlabel() for panel in panels.values()} == {"ratio to baseline"}
        rows = [label.get_text() for label in panels["TPOT"].get_yticklabels()]
        assert rows == ["small / dynamic", "small / streamed", "small / quantized-hqq-int4"]
        assert _marks(panels["TPOT"])[1] == pytest.approx(1.2)
        assert _marks(panels["prefill peak allocated"]) == pytest.approx({0: 1, 1: 1, 2: 2_000_000 / 1_038_000})
        assert _marks(panels["throughput"])[1] == pytest.approx((0.5 + 156 * 0.015) / (0.5 + 156 * 0.018))
        assert panels["throughput"].get_title().endswith("higher is better")

    def test_the_caption_says_what_is_farthest(self) -> None:
        drawing = draw_compare_ratios(slower())
        assert drawing is not None
        assert drawing.caption == (
            "3 of 12 figures shown are worse, farthest prefill peak allocated of small / quantized-hqq-int4: 1.927x "
            "of before's (worse); 7 are undecided."
        )

    def test_nothing_worse_is_said_too(self) -> None:
        drawing = draw_compare_ratios(compare([make_record()], [make_record()]))
        assert drawing is not None
        assert drawing.caption == "None of 4 figures shown of after is worse or better; 2 are undecided."

    def test_runs_that_are_not_alike_are_marked(self) -> None:
        other = make_record(machine=make_machine(cpu="Other CPU"))
        drawing = draw_compare_ratios(compare([make_record()], [other], allow_mismatch=True))
        assert drawing is not None
        assert drawing.caption.startswith("Runs that are not alike: ")

    def test_an_interval_of_a_ratio_has_the_ends_of_both(self) -> None:
        both = change(baseline_interval=interval(8.0, 10.0), candidate_interval=interval(12.0, 16.0))
        assert ratio_ends(both) == (12 / 10, 16 / 8)
        assert ratio_ends(change(candidate_interval=interval(1, 2))) is None
        zero = change(baseline_interval=interval(0.0, 10.0), candidate_interval=interval(12.0, 16.0))
        assert ratio_ends(zero) is None

    @pytest.mark.parametrize(
        ("changes", "band"),
        [
            ({}, (1 / 1.05, 1.05)),
            ({"metric": "exposed_s_per_token"}, None),
            ({"test": "exact", "unit": "bytes"}, (0.99, 1.01)),
            ({"test": "sampled", "unit": "bytes"}, (0.95, 1.05)),
            ({"test": "exact", "unit": "sessions"}, None),
        ],
    )
    def test_the_band_is_the_least_effect(self, changes: dict[str, Any], band: tuple[float, float] | None) -> None:
        assert no_change_band(change(**changes)) == (band if band is None else pytest.approx(band))

    def test_metrics_with_a_verdict_come_first(self) -> None:
        names = {"ttft_s": "same", "tpot_s": "same", "kv_host_bytes": "worse", "decode_peak_bytes": "better"}
        figures = [change(metric=name, verdict=verdict) for name, verdict in names.items()]
        assert shown_metrics(figures) == ["decode_peak_bytes", "kv_host_bytes", "tpot_s", "ttft_s"]

    def test_of_many_cells_the_weightiest_are_drawn(self) -> None:
        loads = [make_workload(name=f"load-{place}", prompt_tokens=100 + place) for place in range(MOST_CELLS + 4)]
        before = [make_record(spec=make_spec(workload=load)) for load in loads]
        worse = make_trials(prefill=make_phase(1_100_000))
        after = [*before[:-1], make_record(spec=before[-1].spec, trials=worse)]
        drawing = draw_compare_ratios(compare(before, after))
        assert drawing is not None
        rows = [label.get_text() for label in drawing.figure.axes[0].get_yticklabels()]
        assert len(rows) == MOST_CELLS
        assert rows[-1] == f"load-{MOST_CELLS + 3} / dynamic"
        assert drawing.caption.endswith("16 of 20 cells and limits are shown, those with the weightiest verdicts.")

    def test_without_a_ratio_there_is_nothing_to_draw(self) -> None:
        assert draw_compare_ratios(RunComparison(baseline="a", candidate="b")) is None
        zero = change(baseline=5, candidate=0, ratio=0.0, unit="bytes", test="exact", verdict="better")
        assert draw_compare_ratios(RunComparison(baseline="a", candidate="b", changes=(zero,))) is None


@pytest.mark.usefixtures("style")
class TestTrends:
    def test_each_run_is_a_point_and_the_caption_has_the_largest_step(self) -> None:
        (drawing,) = draw_history_trends(releases(0.010, 0.012, 0.011))
        tpot, peak, sessions = drawing.figure.axes
        assert [panel.get_ylabel() for panel in (tpot, peak, sessions)] == [
            "TPOT (ms)",
            "device peak (KiB)",
            "sessions (count), by peak",
        ]
        assert list(tpot.lines[0].get_ydata()) == pytest.approx([10, 12, 11])
        assert list(peak.lines[0].get_ydata()) == pytest.approx([1_040_000 / 1024] * 3)
        assert list(sessions.lines[0].get_ydata()) == [45, 45, 45], "see the factories"
        assert [label.get_text() for label in tpot.get_xticklabels()] == ["a", "b", "c"]
        assert drawing.caption == (
            "does-it-pay: small: the largest step is the TPOT of dynamic in releases/b, 1.20x of that in releases/a "
            "(emulated)."
        )

    def test_small_steps_are_none(self) -> None:
        (drawing,) = draw_history_trends(releases(0.0100, 0.0102))
        assert (
            drawing.caption
            == "does-it-pay: small: no figure shown is more than 5 % from that of the run before it (emulated)."
        )

    def test_a_line_joins_only_runs_that_compare(self) -> None:
        other = run("b", make_record(machine=make_machine(cpu="Other CPU")), day=2)
        (drawing,) = draw_history_trends(make_history([run("a", make_record()), other]))
        tpot = drawing.figure.axes[0]
        assert len(tpot.lines[0].get_ydata()) == 2
        assert len(tpot.lines) == 1, "points alone"
        assert drawing.caption.endswith(
            "no two runs compare, each was made on another kind of machine or rung (emulated)."
        )
        (joined,) = draw_history_trends(releases(0.010, 0.012))
        assert len(joined.figure.axes[0].lines) == 2

    def test_a_time_next_to_swap_is_left_out(self) -> None:
        swapped = make_record(trials=make_trials(0.5, swap_in_bytes=4096)[:1])
        (drawing,) = draw_history_trends(make_history([run("a", make_record()), run("b", swapped, day=2)]))
        assert "TPOT (ms)" not in [panel.get_ylabel() for panel in drawing.figure.axes]

    def test_a_run_after_one_with_swap_makes_no_step(self) -> None:
        swapped = make_record(trials=make_trials(0.5, swap_in_bytes=4096)[:1])
        runs = [run("a", make_record()), run("b", swapped, day=2), run("c", make_record(), day=3)]
        (drawing,) = draw_history_trends(make_history(runs))
        tpot = drawing.figure.axes[0]
        assert list(tpot.lines[0].get_xdata()) == [0, 2]
        assert len(tpot.lines) == 1
        assert "no figure shown is more than 5 %" in drawing.caption

    def test_sessions_under_another_budget_are_not_joined(self) -> None:
        larger = make_record(spec=make_spec(budget=make_budget(device_bytes=3_000_000)))
        (drawing,) = draw_history_trends(make_history([run("a", make_record()), run("b", larger, day=2)]))
        tpot, _, sessions = drawing.figure.axes
        assert (len(tpot.lines), len(sessions.lines)) == (2, 1)

    def test_one_run_has_no_trend(self) -> None:
        assert draw_history_trends(make_history([run("a", make_record(), make_streamed())])) == []
        assert draw_history_trends(()) == []

    def test_renamed_work_is_one_figure(self) -> None:
        renamed = make_record(spec=make_spec(workload=make_workload(name="other-name")))
        (drawing,) = draw_history_trends(make_history([run("a", make_record()), run("b", renamed, day=2)]))
        assert drawing.caption.startswith("does-it-pay: other-name: ")

    def test_of_many_workloads_those_with_the_largest_steps_are_drawn(self) -> None:
        loads = [make_workload(name=f"load-{place}", prompt_tokens=100 + place) for place in range(MOST_TRENDS + 3)]

        def cells(growth: float) -> list[RunRecord]:
            return [
                make_record(spec=make_spec(workload=load), trials=make_trials(0.010 * (1 + growth * place)))
                for place, load in enumerate(loads)
            ]

        drawings = draw_history_trends(make_history([run("a", *cells(0.0)), run("b", *cells(0.1), day=2)]))
        shown = [drawing.caption.split(": ")[1] for drawing in drawings]
        assert shown == [f"load-{place}" for place in (8, 7, 6, 5, 4, 3)]
        assert drawings[0].caption.endswith("6 of 9 workloads are drawn, those with the largest steps.")
        assert len({drawing.name for drawing in drawings}) == MOST_TRENDS

    def test_runs_are_named_so_that_they_differ(self) -> None:
        assert run_names(["2026/a", "2026/b"]) == ["a", "b"]
        assert run_names(["2025/a", "2026/a"]) == ["2025/a", "2026/a"]
        assert run_names(["a-run-with-a-long-name-1"]) == ["…h-a-long-name-1"]


class TestPage:
    @pytest.mark.parametrize("kind", ["compare", "history"])
    def test_it_says_what_the_markdown_says_and_stands_by_itself(self, kind: str) -> None:
        rows, comparison = releases(0.010, 0.012), slower()
        text = render_comparison(comparison) if kind == "compare" else render_history(rows, [])
        page = comparison_page(comparison) if kind == "compare" else history_page(rows)
        shown = MarkdownIt("commonmark").enable("table").render(text)
        without_figures = re.sub(r"<figure.*?</figure>", "", page[page.index("<main>") :], flags=re.DOTALL)
        assert words_of(without_figures) == words_of(shown)
        assert page.count("<figure") == 1
        assert page.index("<figure") < page.index("<section")
        read = Page(page)
        assert len(set(read.all("id"))) == len(read.all("id"))
        assert not {"script", "link", "img", "iframe", "object"} & set(read.tags)
        assert "://" not in page
        assert "default-src 'none'" in " ".join(filter(None, read.all("content")))

    def hostile_records(self, tpot_s: float) -> list[RunRecord]:
        load = make_workload(name=HOSTILE)
        strategies = (DYNAMIC, StreamedSpec(name=HOSTILE), STREAMED, QUANTIZED)
        changes = {"experiment": HOSTILE, "workload": load}
        machine = make_machine(cpu=HOSTILE)
        return [
            make_record(spec=make_spec(each, **changes), machine=machine, trials=make_trials(tpot_s, prefill=phase))
            for each, phase in ((each, make_phase(round(1e8 * tpot_s))) for each in strategies)
        ]

    def test_hostile_names_break_no_comparison(self) -> None:
        comparison = compare(self.hostile_records(0.010), self.hostile_records(0.013))
        named = msgspec.structs.replace(comparison, baseline=HOSTILE, candidate=HOSTILE)
        self.assert_tame(comparison_page(named), comparison_page(slower()))

    def test_hostile_names_break_no_history(self) -> None:
        runs = [run(f"{HOSTILE}{day}", *self.hostile_records(0.010 + 0.001 * day), day=day) for day in (1, 2)]
        self.assert_tame(history_page(make_history(runs)), history_page(releases(0.010, 0.012)))

    def assert_tame(self, text: str, clean: str) -> None:
        """Nothing but the elements and attributes of a page with plain names; what paths are drawn may differ."""
        page, tame = Page(text), Page(clean)
        drawn = {"use", "path", "g", "defs", "clippath", "rect", "li", "ul", "strong", "code", "p"}
        assert set(page.tags) <= set(tame.tags) | drawn
        assert {name for name, _ in page.attributes} <= {name for name, _ in tame.attributes}
        assert "<script" not in text
        assert len(page.words.split("alert(1)")) > 4

    def test_hundreds_of_cells_are_a_matter_of_seconds(self) -> None:
        loads = [make_workload(name=f"load-{place}", prompt_tokens=100 + place) for place in range(100)]

        def cells(tpot_s: float) -> list[RunRecord]:
            kinds = (DYNAMIC, STREAMED, QUANTIZED)
            specs = [make_spec(kind, workload=load) for load in loads for kind in kinds]
            return [make_record(spec=spec, trials=make_trials(tpot_s)) for spec in specs]

        comparison = compare(cells(0.010), cells(0.013))
        rows = make_history([run("a", *cells(0.010)), run("b", *cells(0.013), day=2)])
        start_s = time.process_time()
        pages = comparison_page(comparison), history_page(rows)
        assert time.process_time() - start_s < 10
        assert all(len(page) < 3_000_000 for page in pages)

    def test_the_same_runs_give_the_same_bytes(self) -> None:
        assert comparison_page(slower()) == comparison_page(slower())
        assert history_page(releases(0.010, 0.012)) == history_page(releases(0.010, 0.012))


class TestCommand:
    def test_both_commands_write_their_page(self, tmp_path: Path) -> None:
        for name, day in (("a", 1), ("b", 2)):
            with RunDirectory.create(tmp_path / "runs" / name, make_experiment(), make_machine()) as directory:
                directory.append(msgspec.structs.replace(make_record(), started_at_utc=on(day)))
        out, runs = str(tmp_path / "out"), tmp_path / "runs"
        pair = [str(runs / "a"), str(runs / "b")]
        assert CliRunner().invoke(app, ["compare", *pair, "--out", out]).exit_code == 0
        assert CliRunner().invoke(app, ["history", str(runs), "--out", out]).exit_code == 0
        pages = [(tmp_path / "out" / name).read_text() for name in ("compare.html", "history.html")]
        assert [re.findall("<title>(.*)</title>", page) for page in pages] == [["b against a"], ["History"]]
        assert "<figure" in pages[1]


def _marks(panel: Any) -> dict[int, float]:
    """Row to ratio, of every mark of a panel."""
    return {int(line.get_ydata()[0]): line.get_xdata()[0] for line in panel.lines if line.get_linestyle() == "None"}
