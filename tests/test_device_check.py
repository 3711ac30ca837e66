"""scripts/device_check.sh, end to end on the cpu device, and with steps that fail."""

import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from offload_eval.analysis.limits import find_limits
from offload_eval.store.experiment_file import load_experiment
from offload_eval.store.hardware_file import load_hardware
from offload_eval.store.run_directory import RunDirectory

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "device_check.sh"
STEPS = ["doctor", "contract", "link", "run", "run-small-budget", "capacity"]


def check(*options: str, python: str = sys.executable, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *options],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT.parent,
        env=os.environ | {"PYTHON": python} | environment,
        check=False,
    )


def outcomes(out: Path) -> dict[str, str]:
    """What the summary says of each step, without its seconds."""
    lines = (line.split(": ", 1) for line in (out / "summary.txt").read_text().splitlines())
    return {name: words.partition(",")[0] for name, words in lines}


def test_both_experiments_have_the_same_strategies_and_lengths_that_differ_by_eight():
    tiny, large = (load_experiment(ROOT / "configs" / f"{name}_offload.yaml") for name in ("tiny", "llama-3.1-8b"))
    assert tiny.strategies == large.strategies
    for experiment in (tiny, large):
        short, long = experiment.workloads
        assert (long.prompt_tokens, long.output_tokens) == (8 * short.prompt_tokens, short.output_tokens)


def test_every_step_runs_on_the_cpu_and_leaves_a_complete_run_directory(tmp_path: Path):
    out = tmp_path / "check"
    done = check("--device", "cpu", "--out", str(out), "--limit-s", "500")
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes(out) == dict.fromkeys(STEPS, "ok")
    profile = load_hardware(str(out / "link.yaml"))
    assert profile.calibrated
    assert json.loads((out / "link.json").read_text())["copies"]
    report = (out / "run" / "report.md").read_text()
    assert "\n## Transfers\n" in report
    assert (out / "run" / "hardware.yaml").is_file()
    with tarfile.open(out / "device_check.tar.gz") as archive:
        names = archive.getnames()
    assert {"./run/records.jsonl", "./run-small-budget/records.jsonl", "./link.yaml"} <= set(names)

    records = [record for record in RunDirectory.read(out / "run").records() if record.evidence == "emulated"]
    experiment = load_experiment(ROOT / "configs" / "tiny_offload.yaml")
    expected = {(load.label, each.label) for load in experiment.workloads for each in experiment.strategies}
    assert {(record.spec.workload.label, record.spec.strategy.label) for record in records} == expected
    for record in records:
        strategy = record.spec.strategy
        assert record.status == ("unsupported" if strategy.kind == "offloaded" else "ok"), record.failure
        if strategy.kind == "streamed":
            assert record.fidelity is not None
            assert record.fidelity.bit_equal == strategy.lossless
    small = RunDirectory.read(out / "run-small-budget").records()
    assert {(record.spec.workload.label, record.spec.strategy.label): record.status for record in small} == {
        ("tokens-64", "dynamic"): "ok",
        ("tokens-64", "streamed"): "ok",
        ("tokens-512", "dynamic"): "oom",
        ("tokens-512", "streamed"): "ok",
    }
    searched = RunDirectory.read(out / "capacity")
    limits = find_limits(searched.experiment, searched.records())
    assert {limit.label: limit.is_exact for limit in limits} == {"dynamic": True, "streamed": True}


@pytest.fixture
def planted_python(tmp_path: Path) -> str:
    """An interpreter whose commands do nothing, but for FAILING, which exits with 7, and HANGING, which hangs."""
    path = tmp_path / "python"
    path.write_text(
        """#!/usr/bin/env bash
case "$3" in
  "$FAILING") echo planted >&2; exit 7 ;;
  "$HANGING") exec sleep 60 ;;
esac
[[ $1 != -c ]] || echo cpu
"""
    )
    path.chmod(0o755)
    return str(path)


def test_what_is_there_is_not_overwritten(tmp_path: Path):
    """Nor is a folder made for a check that is refused."""
    archive = tmp_path / "kept.tar.gz"
    archive.write_text("kept")
    for there in (archive, tmp_path):
        done = check("--device", "cpu", "--out", str(tmp_path / "new"), "--archive", str(there))
        assert done.returncode == 2
        assert "nothing is overwritten" in done.stderr
    done = check("--device", "cpu", "--out", str(archive))
    assert (done.returncode, archive.read_text()) == (2, "kept")
    assert not (tmp_path / "new").exists()


def test_a_check_without_time_says_so_in_its_archive_too(tmp_path: Path):
    done = check("--device", "cpu", "--out", str(tmp_path / "out"), "--limit-s", "1")
    assert done.returncode == 1
    with tarfile.open(tmp_path / "out" / "device_check.tar.gz") as archive:
        summary = archive.extractfile("./summary.txt")
        assert summary is not None
        assert summary.read().decode().count("skipped") == len(STEPS)


@pytest.mark.parametrize(("failing", "step"), [("doctor", "doctor"), ("-q", "contract"), ("link", "link")])
def test_a_step_that_fails_costs_no_later_one(tmp_path: Path, planted_python: str, failing: str, step: str):
    done = check(
        "--device", "cpu", "--out", str(tmp_path / "out"), python=planted_python, FAILING=failing, HANGING="nothing"
    )
    assert done.returncode == 1
    assert outcomes(tmp_path / "out") == dict.fromkeys(STEPS, "ok") | {step: outcomes(tmp_path / "out")[step]}
    assert outcomes(tmp_path / "out")[step].startswith("failed: exit code 7 after")
    assert "planted" in done.stdout


def test_a_step_that_hangs_is_ended_and_the_others_are_skipped_with_their_reason(tmp_path: Path, planted_python: str):
    done = check(
        *("--device", "cpu", "--out", str(tmp_path / "out"), "--limit-s", "7"),
        python=planted_python,
        FAILING="nothing",
        HANGING="doctor",
    )
    said = outcomes(tmp_path / "out")
    assert done.returncode == 1
    assert said["doctor"].startswith("failed: not done after")
    assert Counter(words.partition(":")[0] for words in said.values()) == {"failed": 1, "skipped": len(STEPS) - 1}


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--device", "tpu"], 2, "allowed: auto, cuda, cpu"),
        (["--out"], 2, "--out needs a value"),
        (["--limit-s", "0"], 2, "allowed: whole seconds"),
        (["--site"], 2, "no such option"),
        (["--out", str(ROOT)], 2, "is not empty"),
        (["--wheels", str(ROOT)], 2, "holds no wheels"),
    ],
)
def test_a_wrong_option_is_refused_with_what_is_allowed(tmp_path: Path, options: list[str], code: int, words: str):
    out = [] if "--out" in options else ["--out", str(tmp_path)]
    done = check(*out, *options)
    assert done.returncode == code
    assert words in done.stderr
