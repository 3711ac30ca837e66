"""`offload_eval.figures`: what is drawn is what the records hold, in named units, or an error says what is missing."""

import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import msgspec
import pytest
from factories import (
    DYNAMIC,
    STREAMED,
    make_experiment,
    make_machine,
    make_quantized,
    make_record,
    make_spec,
    make_streamed,
    make_traced,
    make_trials,
    make_workload,
)
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from test_capacity import LIMIT_PLAN
from test_history import on

import offload_eval
from offload_eval import figures
from offload_eval.analysis.study import Study
from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.experiment import StrategySpec
from offload_eval.core.records import Conditions, Failure, PhaseSample, RunRecord, TrialSample
from offload_eval.errors import InputError
from offload_eval.loaded_run import Run
from offload_eval.reporting.figures.plates import make_plates
from offload_eval.store.run_directory import RunDirectory

LONG = make_workload(name="long", prompt_tokens=200)


def written(path: Path, *records: RunRecord, **changes: Any) -> Run:
    with RunDirectory.create(path, make_experiment(**changes), make_machine()) as directory:
        for record in records:
            directory.append(record)
    return offload_eval.load_run(path)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Three strategies on `small`, two on `long`, which has more tokens; the baseline was traced."""
    long = make_spec(workload=LONG), make_spec(STREAMED, workload=LONG)
    records = [make_traced(), make_record(), make_streamed(), make_quantized()]
    return written(
        tmp_path / "run",
        *records,
        make_record(spec=long[0], trials=make_trials(0.020)),
        make_record(spec=long[1], trials=make_trials(0.030)),
        workloads=(make_workload(), LONG),
    )


@pytest.fixture
def searched(tmp_path: Path) -> Run:
    """Limits of two strategies at two lengths: 20 and 40 sessions of 257 tokens, 10 and 30 of 357."""
    limits: dict[tuple[StrategySpec, int], int] = {
        (DYNAMIC, 100): 20, (STREAMED, 100): 40, (DYNAMIC, 200): 10, (STREAMED, 200): 30,
    }  # fmt: skip
    records = [
        record
        for (strategy, prompt_tokens), sessions in limits.items()
        for record in (
            probe(strategy, prompt_tokens, sessions),
            probe(strategy, prompt_tokens, sessions + 1, failed=True),
            probe(strategy, prompt_tokens, sessions, role="verify"),
            probe(strategy, prompt_tokens, sessions, role="time", tpot_s=0.001 * sessions),
        )
    ]
    return written(tmp_path / "searched", *records, capacity=CapacitySpec(), workloads=(make_workload(), LONG))


def probe(
    strategy: StrategySpec,
    prompt_tokens: int,
    sessions: int,
    *,
    role: Any = "fit",
    failed: bool = False,
    tpot_s: float | None = None,
) -> RunRecord:
    plan = msgspec.structs.replace(LIMIT_PLAN, memory_trials=2 if role == "verify" else 1)
    workload = make_workload(name=None, batch_size=sessions, prompt_tokens=prompt_tokens)
    spec = make_spec(strategy, workload=workload, role=role, measurement=plan)
    phase = PhaseSample(peak_allocated_bytes=1_500_000)
    trials = (TrialSample(prefill=phase, decode=phase),) * plan.memory_trials
    if tpot_s is not None:
        times = {"ttft_s": 0.5, "inter_token_latencies_s": (tpot_s,) * 156, "e2e_latency_s": 0.5 + 156 * tpot_s}
        trials = (TrialSample(**times, output_tokens=157),) * 3
    changes: dict[str, Any] = {"trials": trials}
    if failed:
        failure = Failure(type="OutOfMemoryError", message="", stage="memory", phase="decode", ledger="device")
        changes = {"trials": (), "status": "oom", "failure": failure}
    conditions = Conditions(cap_bytes=1_900_000)
    return make_record(strategy, spec=spec, conditions=conditions, fidelity=None, **changes)


def labels_of(figure: Figure) -> list[tuple[str, str]]:
    return [(panel.get_xlabel(), panel.get_ylabel()) for panel in figure.axes if panel.get_visible()]


class TestOfOneWorkload:
    def test_memory_ends_at_each_peak(self, run: Run) -> None:
        figure = figures.memory_ledger(run, "small")
        assert labels_of(figure) == [("device memory (MiB)", "")] * 2
        for panel, phase in zip(figure.axes, ("prefill", "decode"), strict=True):
            ends = {
                label.get_text(): max(
                    patch.get_x() + patch.get_width() for patch in panel.patches if _is_at(patch, row)
                )
                for row, label in enumerate(panel.get_yticklabels())
            }
            for record in run.cells[:3]:
                peaks = [getattr(trial, phase).peak_allocated_bytes for trial in record.trials]
                highest = max(peak for peak in peaks if peak is not None)
                assert ends[f"{record.spec.strategy.label}, emulated"] == pytest.approx(highest / 1024**2)

    def test_fidelity_is_kl_over_bytes_of_a_session(self, run: Run) -> None:
        """11,792 / 2 bytes at 0.02 nats; the baseline's 32,768 / 2 bytes at 0."""
        figure = figures.fidelity_by_size(run, "small")
        assert labels_of(figure) == [
            ("KV cache on the device for one session (KiB)", "mean KL to the baseline (nats)")
        ]
        points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in figure.axes[0].lines[:3]]
        assert points == [
            (32_768 / 2 / 1024, 0.0),
            (32_768 / 2 / 1024, 0.0),
            (pytest.approx(11_792 / 2 / 1024), pytest.approx(0.02)),
        ]

    def test_latencies_are_medians_of_the_trials(self, run: Run) -> None:
        figure = figures.token_latencies(run)
        assert labels_of(figure) == [
            ("decode step (tokens after the first)", "inter-token latency, median of trials (ms)")
        ]
        for line, record in zip(figure.axes[0].lines[:2], run.cells[3:], strict=True):
            steps = zip(*(trial.inter_token_latencies_s for trial in record.trials), strict=True)
            assert list(line.get_ydata()) == pytest.approx([1000 * median(step) for step in steps])
            assert list(line.get_xdata()) == list(range(1, 157))

    def test_copies_are_what_is_waited_for_and_what_is_not(self, run: Run) -> None:
        """0.78 s of waiting over 156 steps, of 1.0 s in which the link is busy."""
        figure = figures.transfers_hidden(run, "small")
        assert labels_of(figure) == [("link busy in a decode step, both directions (ms)", "")]
        widths = [patch.get_width() for patch in figure.axes[0].patches]
        assert widths == pytest.approx([780 / 156, 220 / 156])

    def test_without_a_label_it_is_the_reports_workload(self, run: Run) -> None:
        plates = make_plates(Study(run.experiment, run.records))
        assert plates["Spread"][0].caption.startswith("long ")
        shown = figures.token_latencies(run).axes[0].lines[0].get_ydata()[0]
        assert shown == pytest.approx(20.0), "of `long`"

    @pytest.mark.parametrize(
        "draw", [figures.memory_ledger, figures.fidelity_by_size, figures.token_latencies, figures.transfers_hidden]
    )
    def test_an_unknown_workload_is_named_with_those_allowed(self, run: Run, draw: Any) -> None:
        with pytest.raises(InputError, match=r"workload: 'big' is not in .*; allowed: small, long"):
            draw(run, "big")

    @pytest.mark.parametrize(
        ("draw", "said"),
        [
            (figures.memory_ledger, "no memory: no cell of this workload was traced, and none had its peak looked at"),
            (figures.fidelity_by_size, "no fidelity: no strategy of this workload was held against a baseline"),
            (figures.token_latencies, "no latencies: no cell of this workload was timed"),
            (figures.transfers_hidden, "no transfers: no strategy of this workload copied over the link"),
        ],
    )
    def test_what_is_missing_is_said(self, tmp_path: Path, draw: Any, said: str) -> None:
        with pytest.raises(InputError, match=said):
            draw(written(tmp_path / "bare", make_record(trials=(), fidelity=None)))

    def test_a_run_without_a_cell(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no cell was traced or ran"):
            figures.memory_ledger(written(tmp_path / "empty"))


class TestOfASearch:
    def test_sessions_are_the_limits_that_ran(self, searched: Run) -> None:
        figure = figures.sessions_by_length(searched)
        assert labels_of(figure) == [("context of a session, prompt and output (tokens)", "sessions (count)")]
        ran = [line for line in figure.axes[0].lines if line.get_linestyle() == "-"]
        assert [(list(line.get_xdata()), list(line.get_ydata())) for line in ran] == [
            ([257, 357], [20, 10]),
            ([257, 357], [40, 30]),
        ]

    def test_the_price_is_each_timed_batch(self, searched: Run) -> None:
        figure = figures.price_of_sessions(searched)
        assert labels_of(figure) == [("sessions (count)", "TPOT (ms)")] * 2
        drawn = {
            (panel.get_title(), line.get_xdata()[0]): line.get_ydata()[0]
            for panel in figure.axes
            for line in panel.lines[:2]
        }
        assert drawn == pytest.approx(
            {
                ("100 + 157 tokens", 20): 20,
                ("100 + 157 tokens", 40): 40,
                ("200 + 157 tokens", 10): 10,
                ("200 + 157 tokens", 30): 30,
            }
        )

    def test_without_a_search_it_is_said(self, run: Run) -> None:
        with pytest.raises(InputError, match="run: no capacity search: nothing was timed"):
            figures.price_of_sessions(run)
        with pytest.raises(InputError, match="run: no capacity search: limits of at least two lengths make a line"):
            figures.sessions_by_length(run)


class TestOfMoreThanOneRun:
    def test_ratios_are_of_the_medians(self, tmp_path: Path) -> None:
        before = written(tmp_path / "before", make_record())
        after = written(tmp_path / "after", make_record(trials=make_trials(0.013)))
        panel = figures.compare_ratios(before, after).axes[0]
        assert panel.get_title() == "TPOT\nlower is better"
        assert panel.get_xlabel() == "ratio to baseline"
        assert [line.get_xdata()[0] for line in panel.lines if line.get_linestyle() == "None"] == pytest.approx([1.3])

    def test_runs_that_are_not_alike_are_refused(self, tmp_path: Path) -> None:
        before = written(tmp_path / "before", make_record())
        after = written(tmp_path / "after", make_record(machine=make_machine(cpu="Other CPU")))
        with pytest.raises(InputError, match="are not alike"):
            figures.compare_ratios(before, after)
        assert figures.compare_ratios(before, after, allow_mismatch=True).axes

    def test_trends_are_by_start(self, tmp_path: Path) -> None:
        made = {
            name: msgspec.structs.replace(make_record(trials=make_trials(tpot_s)), started_at_utc=on(day))
            for name, tpot_s, day in (("new", 0.012, 2), ("old", 0.010, 1))
        }
        runs = [written(tmp_path / name, record) for name, record in made.items()]
        (figure,) = figures.history_trends(runs)
        assert [panel.get_ylabel() for panel in figure.axes][:2] == ["TPOT (ms)", "device peak (KiB)"]
        assert list(figure.axes[0].lines[0].get_ydata()) == pytest.approx([10, 12])
        assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["old", "new"]

    def test_one_run_is_no_history(self, run: Run) -> None:
        with pytest.raises(InputError, match="no history: no cell is in two of the runs"):
            figures.history_trends([run])


class TestLooks:
    def test_colours_are_real_ones_on_white(self, run: Run) -> None:
        figure = figures.token_latencies(run)
        assert to_hex(figure.get_facecolor()) == "#ffffff"
        (panel,) = figure.axes
        assert to_hex(panel.xaxis.label.get_color()) == "#1c2127"
        assert to_hex(panel.get_xgridlines()[0].get_color()) == "#d0d7de"
        placeholders = {"#010203", "#040506"}
        for artist in figure.findobj():
            for name in ("get_color", "get_facecolor", "get_edgecolor"):
                colour = getattr(artist, name, lambda: "none")()
                if isinstance(colour, str | tuple) and colour not in ("none", "auto"):
                    assert to_hex(colour) not in placeholders

    def test_it_is_a_plain_figure_that_can_be_saved(self, run: Run, tmp_path: Path) -> None:
        figure = figures.memory_ledger(run)
        assert type(figure) is Figure
        for ending in ("png", "svg", "pdf"):
            figure.savefig(tmp_path / f"figure.{ending}")
            assert (tmp_path / f"figure.{ending}").stat().st_size > 1000

    def test_settings_of_the_notebook_are_left_alone(self, run: Run) -> None:
        before = dict(mpl.rcParams)
        figures.memory_ledger(run)
        assert dict(mpl.rcParams) == before

    def test_matplotlib_waits_for_the_first_figure(self) -> None:
        code = (
            "import sys; from offload_eval import figures\n"
            "assert not {'matplotlib', 'matplotlib.figure', 'torch', 'transformers'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

    def test_all_of_them_are_listed(self) -> None:
        assert all(callable(getattr(figures, name)) for name in figures.__all__)
        assert len(figures.__all__) == 8


def _is_at(patch: Any, row: int) -> bool:
    return bool(abs(patch.get_y() + patch.get_height() / 2 - row) < 0.01)
