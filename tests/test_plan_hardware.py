"""`plan --hardware`: the link's least times by hand, whose memory is the budget, and what a profile has to state.

Llama-3.1-8B has 32 layers, 8 kv heads and head_dim 128: 131,072 bytes a token. 8,192 prompt tokens and 2 generated
ones leave 8,193 cached; the last step fetches 8,192 of them, 1,073,741,824 bytes. The link moves 55 GB/s one way and
41.7 GB/s each way at once.
"""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from plan_calls import BASE_MODEL, GIB, TOKEN_BYTES, Configure, cell, invoke, plan
from typer.testing import CliRunner

from offload_eval.cli.app import app
from offload_eval.core.hardware import HardwareProfile, LinkProfile, SourcedBytes, SourcedValue
from offload_eval.store.hardware_file import dump_hardware

LINK_FIELDS = ("link_h2d_s", "link_d2h_s", "link_bound_tpot_s")
AT_LIMIT_FIELDS = ("link_h2d_at_limit_s", "link_d2h_at_limit_s", "link_bound_tpot_at_limit_s")
LENGTHS = ("--model", BASE_MODEL, "--prompt-tokens", "8192", "--output-tokens", "2")
FETCHED, CACHED = 8192 * TOKEN_BYTES, 8193 * TOKEN_BYTES


def rate(bytes_per_s: float, date: str = "2026-11-29") -> SourcedValue:
    return SourcedValue(value=bytes_per_s, source="this test", date=date)


def make_link(**changes: Any) -> LinkProfile:
    base = {
        "name": "PCIe 5.0 x16",
        "h2d_bytes_per_s": rate(55e9),
        "d2h_bytes_per_s": rate(55e9, "2026-11-28"),
        "h2d_with_d2h_bytes_per_s": rate(41.7e9),
        "d2h_with_h2d_bytes_per_s": rate(41.7e9),
    }
    return LinkProfile(**base | changes)


@pytest.fixture
def write_profile(tmp_path: Path) -> Configure:
    """Writes a profile with 24 GiB of memory; keywords replace fields."""

    def write(name: str = "card.yaml", **changes: Any) -> Path:
        memory = SourcedBytes(value=24 * GIB, source="this test", date="2026-11-29")
        profile = HardwareProfile(**{"name": "card", "memory_bytes": memory, "link": make_link()} | changes)
        path = tmp_path / name
        path.write_text(dump_hardware(profile))
        return path

    return write


def times(found: Any, names: tuple[str, ...] = LINK_FIELDS) -> list[Any]:
    return [found[name] for name in names]


class TestLinkTimes:
    def test_a_step_of_streamed_takes_as_long_as_its_fetches(self, write_profile: Configure):
        """1.074 GB at 55 GB/s are 19.52 ms; 131,072 bytes back slow 131,072 of them down to 41.7 GB/s."""
        document = plan(*LENGTHS, "--strategy", "streamed", "--hardware", str(write_profile()), "--weights-gib", "12")
        back_s = TOKEN_BYTES / 41.7e9
        expected = [FETCHED / 55e9, TOKEN_BYTES / 55e9, back_s + (FETCHED - TOKEN_BYTES) / 55e9]
        assert times(cell(document, "streamed")) == pytest.approx(expected, rel=1e-12)
        assert document["evidence"] == "analytic"

    def test_a_step_of_transformers_offloading_contends_both_ways(self, write_profile: Configure):
        """It brings 8,192 tokens and takes 8,193 back, at 41.7 GB/s but for the last one: 25.75 ms."""
        options = ("--strategy", "offloaded", "--hardware", str(write_profile()), "--weights-gib", "12")
        both_s = FETCHED / 41.7e9 + TOKEN_BYTES / 55e9
        found = cell(plan(*LENGTHS, *options), "offloaded")
        assert times(found) == pytest.approx([FETCHED / 55e9, CACHED / 55e9, both_s], rel=1e-12)
        four = cell(plan(*LENGTHS, *options, "--batch-size", "4"), "offloaded")
        assert times(four) == pytest.approx([4 * time for time in times(found)])
        assert times(four, AT_LIMIT_FIELDS) == times(found, AT_LIMIT_FIELDS)
        limit = found["admission"]["limit"]
        assert limit > 10
        assert times(found, AT_LIMIT_FIELDS) == pytest.approx([limit * time for time in times(found)])

    def test_ranks_have_links_of_their_own_and_replicas_sessions_of_their_own(self, write_profile: Configure):
        """A stage has 16 of 32 layers, a rank 4 of 8 kv heads: a quarter. Two replicas: half the limit each."""
        options = ("--strategy", "offloaded", "--hardware", str(write_profile()), "--weights-gib", "12")
        whole = cell(plan(*LENGTHS, *options), "offloaded")
        found = cell(plan(*LENGTHS, *options, "--tp", "2", "--pp", "2", "--dp", "2"), "offloaded")
        assert times(found) == pytest.approx([time / 4 for time in times(whole)])
        sessions = found["admission"]["limit"] // 2
        assert times(found, AT_LIMIT_FIELDS) == pytest.approx([sessions * time for time in times(found)])

    def test_in_gpu_strategies_have_none_rather_than_0(self, write_profile: Configure):
        strategies = "paged,dynamic,static,streamed:resident_share=1.0,name=all"
        document = plan(*LENGTHS, "--hardware", str(write_profile()), "--weights-gib", "12", *_each(strategies))
        assert len(document["cells"]) == 4
        for found in document["cells"]:
            assert times(found, LINK_FIELDS + AT_LIMIT_FIELDS) == [None] * 6, found["strategy"]

    def test_without_a_decode_step_there_is_no_tpot(self, write_profile: Configure):
        options = ("--strategy", "streamed", "--hardware", str(write_profile()), "--weights-gib", "12")
        document = plan(*LENGTHS[:4], "--output-tokens", "1,2", *options)
        assert [each["link_bound_tpot_s"] is None for each in document["cells"]] == [True, False]

    @pytest.mark.parametrize("option", ["resident_bytes=1073741824", "resident_share=auto"])
    def test_what_may_move_less_has_no_least_time(self, write_profile: Configure, option: str):
        """How many layers are resident depends on the batch: the card's bytes are then no lower bound."""
        options = (
            "--hardware",
            str(write_profile()),
            "--weights-gib",
            "12",
            "--strategy",
            f"streamed:{option},name=s",
        )
        document = plan(*LENGTHS, *options)
        assert cell(document, "s")["h2d_bytes_per_step"] == FETCHED
        assert times(cell(document, "s")) == [None] * 3
        assert any(each.startswith("s: the batch decides") for each in document["assumptions"])

    def test_a_limit_of_no_session_has_no_time(self, write_profile: Configure):
        options = ("--strategy", "streamed", "--hardware", str(write_profile()), "--weights-gib", "23.99")
        found = cell(plan(*LENGTHS, *options), "streamed")
        assert found["admission"]["limit"] == 0
        assert times(found, AT_LIMIT_FIELDS) == [None] * 3
        assert found["link_bound_tpot_s"] > 0

    def test_a_request_that_is_too_long_has_no_limit_to_time(self, write_profile: Configure):
        options = ("--strategy", "streamed", "--hardware", str(write_profile()), "--weights-gib", "12")
        found = cell(plan(*LENGTHS, *options, "--max-request-tokens", "100"), "streamed")
        assert found["admission"]["device_sessions"] > 0
        assert times(found, AT_LIMIT_FIELDS) == [None] * 3

    def test_without_a_profile_nothing_is_timed(self):
        document = plan(*LENGTHS, "--strategy", "streamed")
        assert document["hardware"] is None
        assert times(cell(document, "streamed")) == [None] * 3

    def test_csv_has_the_times_and_whose_they_are(self, write_profile: Configure):
        options = ("--hardware", str(write_profile()), "--weights-gib", "12", "--strategy", "dynamic,streamed")
        rows = {
            row["strategy"]: row
            for row in csv.DictReader(io.StringIO(invoke(*LENGTHS, *options, "--csv", "-").stdout))
        }
        assert float(rows["streamed"]["link_h2d_s"]) == pytest.approx(FETCHED / 55e9)
        assert rows["dynamic"]["link_h2d_s"] == ""
        assert rows["streamed"]["hardware"] == "card, from documents, 2026-11-28"


def _each(strategies: str) -> list[str]:
    plain, _, last = strategies.rpartition(",streamed:")
    return ["--strategy", plain, "--strategy", f"streamed:{last}"]


class TestBudget:
    def test_the_profiles_memory_is_the_budget_where_none_is_stated(self, write_profile: Configure):
        """24 GiB - 12 - 3 - 3 hold 5 sessions of 1.0001 GiB."""
        taken = ("--weights-gib", "12", "--runtime-gib", "3", "--reserve-gib", "3", "--strategy", "dynamic")
        document = plan(*LENGTHS, *taken, "--hardware", str(write_profile()))
        assert (document["device"]["budget_bytes"], document["device"]["budget_from"]) == (24 * GIB, "card")
        assert document["admission"]["limit"] == 5
        assert any("it is the memory of card as sold" in each for each in document["assumptions"])
        text = " ".join(invoke(*LENGTHS, *taken, "--hardware", str(write_profile())).stdout.split())
        assert "24.00 GiB (memory of card, no budget stated) - 12.00 GiB weights" in text

    def test_a_stated_budget_wins(self, write_profile: Configure):
        document = plan(*LENGTHS, "--weights-gib", "12", "--vram-gib", "40", "--hardware", str(write_profile()))
        assert (document["device"]["budget_bytes"], document["device"]["budget_from"]) == (40 * GIB, None)
        assert not any("memory of card" in each for each in document["assumptions"])

    def test_an_experiments_budget_wins_too(self, write_profile: Configure, plan_experiment: Configure):
        document = plan(str(plan_experiment()), "--hardware", str(write_profile()))
        assert (document["device"]["budget_bytes"], document["device"]["budget_from"]) == (3_000_000, None)

    def test_a_value_of_a_budget_that_is_set_alone_goes_with_the_profiles_memory_or_with_none(
        self, write_profile: Configure, tmp_path: Path
    ):
        """24 GiB - 12 - 6 hold 5 sessions of 1.0001 GiB; without the profile there is no memory to take 6 GiB from."""
        path = tmp_path / "x.yaml"
        path.write_text(f"{{model: {{config: {BASE_MODEL}}}, workloads: [{{prompt_tokens: 8192, output_tokens: 2}}]}}")
        options = (str(path), "--strategy", "dynamic", "--set", "budget.runtime_bytes=6 GiB")
        profile = ("--hardware", str(write_profile()), "--weights-gib", "12")
        assert plan(*options, *profile)["admission"]["limit"] == 5
        assert plan(*options, "--weights-gib", "12", "--vram-gib", "24")["admission"]["limit"] == 5
        for command in ("plan", "trace"):
            refused = CliRunner().invoke(app, [command, *options])
            assert (refused.exit_code, refused.stdout) == (2, "")
            assert f"{path}: budget.device_bytes: required" in " ".join(refused.stderr.split())

    def test_a_profile_without_memory_admits_nothing(self, write_profile: Configure):
        document = plan(*LENGTHS, "--hardware", str(write_profile(memory_bytes=None)))
        assert (document["device"], document["admission"]) == (None, None)
        assert cell(document, "streamed")["link_bound_tpot_s"] > 0
        assert cell(document, "streamed")["link_bound_tpot_at_limit_s"] is None


class TestProfile:
    def test_what_it_is_comes_with_the_answer(self, write_profile: Configure):
        """The date is the oldest of the link's figures."""
        path = write_profile(calibrated=True, machine="this one", link=make_link(name="memory copies", emulated=True))
        document = plan(*LENGTHS, "--weights-gib", "12", "--hardware", str(path))
        assert document["hardware"] == {
            "name": "card",
            "calibrated": True,
            "link": "memory copies",
            "emulated": True,
            "date": "2026-11-28",
        }
        text = " ".join(invoke(*LENGTHS, "--weights-gib", "12", "--hardware", str(path)).stdout.split())
        assert "memory copies of card, calibrated, emulated, 2026-11-28: lower bounds on the last step's TPOT" in text
        assert "emulated, not measured on a device: memory copies" in text

    def test_text_has_a_line_a_strategy_in_ms(self, write_profile: Configure):
        """19.522 ms to the device and 0.002 back; no budget, so no limit."""
        options = ("--strategy", "dynamic,streamed", "--hardware", str(write_profile(memory_bytes=None)))
        lines = [" ".join(line.split()) for line in invoke(*LENGTHS, *options).stdout.splitlines()]
        assert "streamed 19.523 0.002 19.523 -" in lines
        assert not any("TPOT" in line for line in invoke(*LENGTHS).stdout.splitlines())

    def test_the_experiments_own_is_beside_its_file_and_the_option_replaces_it(
        self, write_profile: Configure, plan_experiment: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ):
        write_profile(name="other.yaml", link=make_link(name="other link"))
        (tmp_path / "elsewhere").mkdir()
        experiment = plan_experiment(hardware="other.yaml")
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert plan(str(experiment))["hardware"]["link"] == "other link"
        assert plan(str(experiment), "--hardware", "../other.yaml")["hardware"]["link"] == "other link"
        assert plan(str(experiment), "--hardware", "h100-sxm")["hardware"]["name"] == "h100-sxm"

    def test_an_experiment_without_a_model_finds_it_too(
        self, write_profile: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ):
        write_profile()
        (tmp_path / "plan.yaml").write_text("{hardware: card.yaml, workloads: [{prompt_tokens: 9, output_tokens: 2}]}")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert plan("../plan.yaml", "--model", "gpt2")["hardware"]["name"] == "card"

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"link": None}, "hardware card: has no link"),
            (
                {"link": make_link(d2h_bytes_per_s=None)},
                "hardware card: link.d2h_bytes_per_s is needed and not stated",
            ),
            (
                {"link": make_link(h2d_bytes_per_s=None)},
                "hardware card: link.h2d_bytes_per_s is needed and not stated",
            ),
            (
                {"memory_bytes": SourcedBytes(value=5, source="this test", date="2026-11-29")},
                "hardware card: memory_bytes, the device budget where none is stated: 5 leaves nothing",
            ),
        ],
    )
    def test_what_is_missing_is_named(self, write_profile: Configure, changes: dict[str, Any], words: str):
        options = ("--weights-gib", "12", "--runtime-gib", "1", "--hardware", str(write_profile(**changes)))
        result = invoke(*LENGTHS, *options)
        assert (result.exit_code, result.stdout) == (2, "")
        assert words in " ".join(result.stderr.split())

    def test_in_gpu_strategies_need_no_link(self, write_profile: Configure):
        options = ("--strategy", "dynamic", "--weights-gib", "12", "--hardware", str(write_profile(link=None)))
        assert plan(*LENGTHS, *options)["hardware"]["link"] is None

    def test_a_profile_that_is_none_is_refused(self, plan_experiment: Configure):
        for arguments in ((*LENGTHS, "--hardware", "h100-sxn"), (str(plan_experiment(hardware="h100-sxn")),)):
            result = invoke(*arguments)
            assert result.exit_code == 2
            assert "h100-sxn: no such file, and no profile of that name; near: h100-sxm" in " ".join(
                result.stderr.split()
            )
        assert "hardware: h100-sxn" in " ".join(result.stderr.split()), "the file's field is named"
