"""Figures of the report: what they draw, in which units, and the numbers of their captions, worked out by hand."""

import re
import subprocess
import sys

import pytest
from factories import (
    DYNAMIC,
    STREAMED,
    make_experiment,
    make_quantized,
    make_record,
    make_spec,
    make_streamed,
    make_traced,
    make_trials,
    make_workload,
)
from matplotlib.figure import Figure

from offload_eval.analysis.study import Study
from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.experiment import StreamedSpec
from offload_eval.core.limits import CapacityLimit, Lengths, TimedBatch
from offload_eval.reporting.figures.fidelity_by_size import draw_fidelity_by_size
from offload_eval.reporting.figures.memory_ledger import bars_of, draw_memory_ledger
from offload_eval.reporting.figures.plates import make_plates
from offload_eval.reporting.figures.price_of_sessions import draw_price_of_sessions, pareto_front
from offload_eval.reporting.figures.sessions_by_length import draw_sessions_by_length
from offload_eval.reporting.figures.style import house_style, looks_of, new_figure
from offload_eval.reporting.figures.svg import inline_svg
from offload_eval.reporting.figures.token_latencies import draw_token_latencies, flush_steps
from offload_eval.reporting.figures.transfers_hidden import draw_transfers_hidden


@pytest.fixture(autouse=True)
def style():
    with house_style():
        yield


def clean_records():
    return [make_record(), make_traced(), make_streamed(), make_quantized()]


def make_limit(label="streamed", prompt_tokens=64, **changes):
    strategy = DYNAMIC if label == "dynamic" else STREAMED
    base = {
        "lengths": Lengths(prompt_tokens=prompt_tokens, output_tokens=16),
        "strategy": strategy,
        "kind": strategy.kind,
        "label": label,
        "is_in_gpu": label == "dynamic",
        "evidence": "emulated",
        "analytic": 40,
        "traced": 38,
        "measured": 38,
        "failed_at": 39,
        "in_gpu": 19,
    }
    return CapacityLimit(**base | changes)


def make_timed(sessions, strategy=DYNAMIC, tpot_s=0.010):
    workload = make_workload(name=None, batch_size=sessions)
    spec = make_spec(strategy, workload=workload, role="time")
    return make_record(spec=spec, trials=make_trials(tpot_s), fidelity=None)


def searched(**changes):
    return make_experiment(strategies=(DYNAMIC, STREAMED), capacity=CapacitySpec(**changes))


def panels_of(drawing):
    assert isinstance(drawing.figure, Figure)
    return [panel for panel in drawing.figure.axes if panel.get_visible()]


class TestMemoryLedger:
    def test_parts_of_each_rung_add_up_to_its_peak(self):
        from offload_eval.analysis.memory import explain_memory

        memory = explain_memory([make_record(), make_traced()])[0]
        analytic, traced, run = bars_of(memory, make_record())
        rest = "runtime and reserve of the budget, or allocator and context of the run"
        assert analytic.parts == {"weights": 1_000_000, "KV": 12_800, rest: 100_000}
        assert traced.parts == {
            "weights": 1_000_000, "KV": 12_800, "cache transients": 1_000, "logits": 6_000, "activations": 17_688,
            rest: 100_000,
        }  # fmt: skip
        assert run.rung == "emulated"
        assert run.parts == {"weights": 1_000_000, "above the weights, not taken apart": 40_000}

    def test_prefill_and_decode_stand_apart_in_one_unit(self):
        drawing = draw_memory_ledger(clean_records())
        assert [panel.get_title().partition(";")[0] for panel in panels_of(drawing)] == ["prefill", "decode"]
        assert {panel.get_xlabel() for panel in panels_of(drawing)} == {"device memory (MiB)"}

    def test_the_caption_has_the_highest_peak_and_what_the_arithmetic_leaves_out(self):
        """1,040,000 / 1,012,800 = 1.027; 1,040,000 / 1,048,576 MiB; 17,688 / 1,024 KiB."""
        assert draw_memory_ledger([make_record(), make_traced()]).caption == (
            "small: dynamic peaks highest, at 1015.62 KiB in prefill (emulated), 1.03 times weights and KV by "
            "arithmetic; activations are 17.27 KiB of it."
        )

    def test_the_arithmetic_alone_is_not_drawn(self):
        assert draw_memory_ledger([make_record(trials=())]) is None


class TestSessionsByLength:
    def test_the_caption_has_the_highest_gain(self):
        limits = [
            make_limit("dynamic", measured=19, failed_at=20),
            make_limit(),
            make_limit("dynamic", 256, measured=8, failed_at=9, in_gpu=8),
            make_limit(prompt_tokens=256, measured=12, failed_at=13, in_gpu=8),
        ]
        drawing = draw_sessions_by_length(limits)
        assert drawing.caption == (
            "streamed admits 38 sessions at 64 + 16 tokens (emulated), 2.00x of the in-GPU cache, the most of any "
            "strategy and length shown."
        )
        (panel,) = panels_of(drawing)
        assert (panel.get_xlabel(), panel.get_ylabel()) == (
            "context of a session, prompt and output (tokens)",
            "sessions (count)",
        )
        assert len(panel.lines) == 6
        assert list(panel.lines[5].get_ydata()) == [38, 12]

    def test_without_an_in_gpu_cache_the_longest_length_is_told(self):
        limits = [make_limit(in_gpu=None), make_limit(prompt_tokens=256, in_gpu=None, measured=9, failed_at=10)]
        assert draw_sessions_by_length(limits).caption == (
            "streamed admits 9 sessions at 256 + 16 tokens (emulated), the most at this length."
        )

    def test_one_length_is_no_line(self):
        assert draw_sessions_by_length([make_limit(), make_limit("dynamic")]) is None
        assert draw_sessions_by_length([]) is None


class TestPriceOfSessions:
    def test_the_caption_has_the_most_sessions_and_the_lowest_tpot(self):
        records = [make_timed(4), make_timed(8, STREAMED, 0.020), make_timed(4, STREAMED, 0.012)]
        drawing = draw_price_of_sessions(searched(tpot_limit_s=0.015), records)
        assert drawing.caption == (
            "100 + 157 tokens: most sessions under streamed, 8 at a TPOT of 20.0 ms; lowest TPOT under dynamic, "
            "4 at a TPOT of 10.0 ms. Times: emulated."
        )
        (panel,) = panels_of(drawing)
        assert (panel.get_xlabel(), panel.get_ylabel()) == ("sessions (count)", "TPOT (ms)")
        assert panel.lines[-1].get_ydata()[0] == 15, "the TPOT limit"
        assert sorted(panel.lines[-2].get_xdata()) == [4, 8], "the front"

    def test_a_batch_that_another_beats_is_not_on_the_front(self):
        def batch(sessions, tpot_s):
            return TimedBatch(sessions=sessions, trials=3, ttft_s=1.0, tpot_s=tpot_s, tokens_per_s=1.0, run_id="r")

        front = pareto_front([batch(4, 0.010), batch(4, 0.012), batch(8, 0.020), batch(2, 0.011), batch(2, 0.005)])
        assert [(each.sessions, each.tpot_s) for each in front] == [(8, 0.020), (4, 0.010), (2, 0.005)]

    def test_without_a_timed_batch_there_is_nothing_to_draw(self):
        assert draw_price_of_sessions(searched(), clean_records()) is None


class TestTransfersHidden:
    def test_the_caption_has_waits_and_shares(self):
        """(0.9 + 0.1) s / 156 = 6.41 ms busy and 0.78 s / 156 = 5 ms exposed, so that 22 % are hidden."""
        drawing = draw_transfers_hidden(clean_records(), None)
        assert drawing.caption == (
            "small (emulated): streamed waits longest, 5.00 ms a decode step, with the link busy for 6.41 ms; "
            "streamed hides the largest share of its copies, 22 %."
        )
        (panel,) = panels_of(drawing)
        assert panel.get_xlabel() == "link busy in a decode step, both directions (ms)"
        assert [patch.get_width() for patch in panel.patches] == pytest.approx([5.0, 1000 / 156 - 5])

    def test_without_a_link_there_is_nothing_to_draw(self):
        assert draw_transfers_hidden([make_record()], None) is None


class TestTokenLatencies:
    def flushing(self):
        """156 steps of 10 ms, but for the 128th, in which the residual is quantized."""
        latencies_s = (0.010,) * 127 + (0.030,) + (0.010,) * 28
        return make_quantized(trials=make_trials(inter_token_latencies_s=latencies_s)[:1])

    def test_the_caption_has_the_medians_and_the_flush(self):
        drawing = draw_token_latencies([make_streamed(), self.flushing()])
        assert flush_steps(self.flushing()) == [128]
        assert drawing.caption == (
            "small (emulated): quantized-hqq-int4 has the lowest median latency, 10.0 ms a token, streamed the "
            "highest, 15.0 ms; a step in which quantized-hqq-int4 flushes takes 3.00 times its median."
        )
        (panel,) = panels_of(drawing)
        assert panel.get_xlabel() == "decode step (tokens after the first)"
        assert panel.get_ylabel() == "inter-token latency, median of trials (ms)"
        assert list(panel.lines[1].get_ydata()).index(30) == 127

    def test_of_many_tokens_the_slowest_of_each_few_is_drawn(self):
        latencies_s = (0.010,) * 899 + (0.5,)
        drawing = draw_token_latencies([make_record(trials=make_trials(inter_token_latencies_s=latencies_s)[:1])])
        assert drawing.caption.endswith("Each point is the slowest of 3 tokens.")
        line = panels_of(drawing)[0].lines[0]
        assert (len(line.get_ydata()), max(line.get_ydata())) == (300, 500)

    def test_without_times_there_is_nothing_to_draw(self):
        assert draw_token_latencies([make_record(trials=())]) is None


class TestFidelityBySize:
    def test_the_caption_has_the_smallest_cache_and_its_price(self):
        """11,792 / 2 = 5,896 bytes against 32,768 / 2: 0.18; 0.02 nats over 0.001."""
        drawing = draw_fidelity_by_size(clean_records())
        assert drawing.caption == (
            "small (emulated): quantized-hqq-int4 has the smallest cache, 5.76 KiB a session, 0.36 times dynamic's, "
            "at a mean KL of 0.0200 nats, 20.0 times the noise floor."
        )
        (panel,) = panels_of(drawing)
        assert panel.get_xlabel() == "KV cache on the device for one session (KiB)"
        assert panel.get_ylabel() == "mean KL to the baseline (nats)"

    def test_the_baseline_alone_is_not_drawn(self):
        assert draw_fidelity_by_size([make_record()]) is None


class TestPlates:
    def test_every_figure_of_a_run_stands_under_its_section(self):
        plates = make_plates(Study(make_experiment(), clean_records()))
        assert {section: [plate.name for plate in own] for section, own in plates.items()} == {
            "Strategies": ["fidelity"],
            "Memory: analytic, traced, and of the run": ["memory"],
            "Transfers": ["transfers"],
            "Spread": ["latencies"],
        }

    def test_the_workload_with_most_tokens_is_drawn(self):
        long = make_workload(name="long", prompt_tokens=200)
        records = [*clean_records(), make_streamed(spec=make_spec(STREAMED, workload=long))]
        plates = make_plates(Study(make_experiment(), records))
        assert all(plate.caption.startswith("long") for own in plates.values() for plate in own)

    def test_without_records_there_are_none(self):
        assert make_plates(Study(make_experiment(), [])) == {}


class TestSvg:
    def test_text_is_text_and_colours_are_the_pages(self):
        figure, (panel,) = new_figure(1, 1, 2.0)
        panel.set(xlabel="memory (MiB)")
        text = inline_svg(figure, "one", 'a "title" <b>')
        assert ">memory (MiB)</text>" in text
        assert "currentColor" in text
        assert "#010203" not in text
        assert "://" not in text
        assert '<title id="one.title">a &quot;title&quot; &lt;b&gt;</title>' in text
        assert all(name.startswith("one.") for name in re.findall(r' id="([^"]*)"', text))
        assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', text)) <= set(re.findall(r' id="([^"]*)"', text))

    def test_the_same_figure_is_the_same_bytes(self):
        first, second = (inline_svg(draw_memory_ledger(clean_records()).figure, "a", "b") for _ in range(2))
        assert first == second

    @pytest.mark.parametrize("name", ["$x^$", "_hidden", '</text><script>x</script> id="y" #010203', "\u4e2d\u6587"])
    def test_any_name_is_a_label(self, name):
        record = make_streamed(spec=make_spec(StreamedSpec(name=name)))
        text = inline_svg(draw_token_latencies([record]).figure, "a", name)
        assert "<script" not in text
        assert looks_of([name])[name].name.strip() in re.sub(
            "&lt;", "<", re.sub("&gt;", ">", re.sub("&quot;", '"', text))
        )

    def test_settings_of_others_are_left_alone(self):
        program = (
            "import matplotlib; before = dict(matplotlib.rcParams);"
            "from offload_eval.reporting.figures.style import house_style\n"
            "with house_style(): pass\n"
            "assert dict(matplotlib.rcParams) == before"
        )
        subprocess.run([sys.executable, "-c", program], check=True)

    def test_matplotlib_waits_until_a_figure_is_drawn(self):
        program = (
            "import sys, offload_eval.reporting.report;"
            "assert 'matplotlib' not in sys.modules and 'matplotlib.figure' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", program], check=True)
