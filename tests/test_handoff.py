"""A policy's settings for vLLM, SGLang and Kubernetes: every value by hand, and what is said beside it.

The policy: a card of 80 GiB; a budget of 24 GiB with 1 GiB runtime and 1 GiB reserve, so a cap of 22 GiB. The longest
class is 8,192 + 256 = 8,448 tokens, of which a session caches 8,447.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import typer
import yaml
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from offload_eval.analysis.handoff import derive_hand_off, derive_settings
from offload_eval.cli.policy_settings import settings_command
from offload_eval.core.experiment import BudgetSpec, DynamicSpec, ModelSpec, QuantizedSpec, StrategySpec, StreamedSpec
from offload_eval.core.handoff import TARGETS, HandOff, Setting, Target
from offload_eval.core.limits import Lengths
from offload_eval.core.policy import (
    AdmissionPolicy,
    Calibration,
    Fingerprint,
    PhaseFit,
    PolicyLimit,
    PolicyStrategy,
)
from offload_eval.core.records import Evidence
from offload_eval.errors import InputError
from offload_eval.reporting.handoff_blocks import render_blocks
from offload_eval.reporting.handoff_text import render_hand_off
from offload_eval.units import GIB, MIB

SHORT, LONG = (1024, 256), (8192, 256)
INT4 = QuantizedSpec(backend="quanto")


def limit(lengths: tuple[int, int], sessions: int, evidence: Evidence = "measured") -> PolicyLimit:
    prompt, output = lengths
    return PolicyLimit(
        lengths=Lengths(prompt_tokens=prompt, output_tokens=output), sessions=sessions, evidence=evidence
    )


def admitted(spec: StrategySpec, short: int, long: int, evidence: Evidence = "measured", **changes: Any):
    return PolicyStrategy(
        strategy=spec, limits=(limit(SHORT, short, evidence), limit(LONG, long, evidence)), **changes
    )


def fitted(bytes_per_prefill_token: float) -> Calibration:
    """A prefill fit; the ranges it was measured over play no part here."""
    fit = PhaseFit(
        phase="prefill",
        weights_bytes=15 * GIB,
        runtime_bytes=0.0,
        bytes_per_session_token=131_072.0,
        bytes_per_session=0.0,
        bytes_per_prefill_token=bytes_per_prefill_token,
        points=4,
        worst_residual_bytes=0.0,
        worst_above_bytes=0.0,
    )
    ranges = dict.fromkeys(Calibration.__struct_fields__, 1)
    return Calibration(**ranges | {"fits": (fit,), "run_ids": ()})


BASELINE = admitted(DynamicSpec(), 40, 6, peak_host_rss_bytes=4 * GIB)
STREAMED = admitted(
    StreamedSpec(),
    100,
    20,
    host_bytes_per_session_token=131_072.0,
    peak_host_rss_bytes=4 * GIB,
    pinned_allocated_bytes=21 * GIB,
)
QUANTIZED = admitted(INT4, 70, 11)


def make_policy(*strategies: PolicyStrategy, **changes: Any) -> AdmissionPolicy:
    fingerprint = Fingerprint(
        model=ModelSpec(source="org/model", revision="v1"),
        model_fingerprint="feed",
        device="cuda",
        accelerator="a card",
        accelerator_memory_bytes=80 * GIB,
    )
    base = {
        "name": "capacity",
        "created_at_utc": "2026-11-30T00:00:00Z",
        "fingerprint": fingerprint,
        "budget": BudgetSpec(
            device_bytes=24 * GIB, weights_bytes=15 * GIB, runtime_bytes=GIB, reserve_bytes=GIB, enforce=True
        ),
        "cap_bytes": 22 * GIB,
        "baseline": "dynamic",
        "strategies": strategies or (BASELINE, STREAMED, QUANTIZED),
    }
    return AdmissionPolicy(**base | changes)


def emulated() -> AdmissionPolicy:
    fingerprint = Fingerprint(model=ModelSpec(source="org/model"), model_fingerprint="feed", device="cpu", cpu="a CPU")
    return make_policy(
        admitted(DynamicSpec(), 40, 6, "emulated", peak_host_rss_bytes=4 * GIB),
        admitted(
            StreamedSpec(),
            100,
            20,
            "emulated",
            host_bytes_per_session_token=131_072.0,
            peak_host_rss_bytes=4 * GIB,
        ),
        fingerprint=fingerprint,
    )


def settings(policy: AdmissionPolicy, label: str | None, target: Target) -> dict[str, Setting]:
    return {each.name: each for each in derive_settings(policy, label) if each.target == target}


def values(policy: AdmissionPolicy, label: str | None, target: Target) -> dict[str, str | None]:
    return {name: each.value for name, each in settings(policy, label, target).items()}


class TestVllm:
    def test_the_baseline_by_hand(self):
        """(24 - 1) / 80 = 0.2875; the in-GPU limit; no host memory, so nothing is offloaded."""
        assert values(make_policy(), "dynamic", "vllm") == {
            "--dtype": "bfloat16",
            "--gpu-memory-utilization": "0.2875",
            "--max-model-len": "8448",
            "--max-num-seqs": "6",
            "--kv-cache-dtype": "auto",
        }

    def test_streamed_rows_are_the_offloading_size(self):
        """20 * 8,447 * 131,072 = 22,143,303,680 bytes = 20.622... GiB."""
        found = settings(make_policy(), "streamed", "vllm")
        assert found["--kv-offloading-size"].value == "20.63"
        assert "22,143,303,680 bytes" in found["--kv-offloading-size"].derivation
        assert '"cpu_bytes_to_use":22143303680' in found["--kv-offloading-size"].derivation
        assert found["--kv-offloading-size"].standing == "nearest"
        assert found["--kv-offloading-backend"].value == "native"

    def test_an_engine_runs_no_more_than_the_device_holds(self):
        """20 streamed sessions hold their KV on the host; running requests of an engine may not: 6, the baseline's."""
        running = settings(make_policy(), "streamed", "vllm")["--max-num-seqs"]
        assert (running.value, running.standing) == ("6", "carried")
        assert "Not 20: streamed keeps KV of running sessions on the host" in running.derivation

    def test_the_length_is_of_sessions_that_the_device_holds(self):
        only_short = PolicyStrategy(strategy=DynamicSpec(), limits=(limit(SHORT, 40), limit(LONG, 0)))
        found = settings(make_policy(only_short, STREAMED), "streamed", "vllm")
        assert (found["--max-model-len"].value, found["--max-num-seqs"].value) == ("1280", "40")
        assert "streamed admits p8192-o256 as well" in found["--max-model-len"].derivation

    def test_a_baseline_that_admits_nothing_leaves_no_room_for_an_engine(self):
        nothing = PolicyStrategy(strategy=DynamicSpec(), limits=(limit(SHORT, 0), limit(LONG, 0)))
        found = settings(make_policy(nothing, STREAMED), "streamed", "vllm")
        assert found["--max-num-seqs"].value is None
        assert found["--max-model-len"].value is None
        assert "no room for one" in found["--max-num-seqs"].derivation

    def test_the_share_is_rounded_down(self):
        """23 / 140 = 0.16428...; 0.1643 would ask for more than the budget."""
        policy = make_policy()
        fingerprint = msgspec.structs.replace(policy.fingerprint, accelerator_memory_bytes=140 * GIB)
        policy = msgspec.structs.replace(policy, fingerprint=fingerprint)
        assert values(policy, "dynamic", "vllm")["--gpu-memory-utilization"] == "0.1642"

    def test_a_budget_beyond_the_card_has_no_share(self):
        policy = make_policy()
        fingerprint = msgspec.structs.replace(policy.fingerprint, accelerator_memory_bytes=16 * GIB)
        found = settings(msgspec.structs.replace(policy, fingerprint=fingerprint), "dynamic", "vllm")
        assert found["--gpu-memory-utilization"].value is None
        assert "does not fit this card" in found["--gpu-memory-utilization"].derivation

    def test_without_a_card_the_share_is_of_the_budget_and_says_so(self):
        """(24 - 1) / 24 = 0.95833..."""
        found = settings(emulated(), "dynamic", "vllm")["--gpu-memory-utilization"]
        assert found.value is None
        assert "= 0.9583, rounded down" in found.derivation
        assert "RELATIVE TO budget.device_bytes" in str(found.caution)

    def test_a_place_on_this_machine_is_nobody_elses(self):
        policy = make_policy()
        model = msgspec.structs.replace(policy.fingerprint.model, source="/somewhere/of-mine/Tiny-8B")
        fingerprint = msgspec.structs.replace(policy.fingerprint, model=model)
        hand_off = derive_hand_off(msgspec.structs.replace(policy, fingerprint=fingerprint))
        text = render_hand_off(hand_off)
        assert "vllm serve MODEL" in text
        assert "MODEL stands for Tiny-8B" in text
        assert "of-mine" not in text

    def test_swap_space_is_gone(self):
        notes = " ".join(derive_hand_off(make_policy()).notes)
        assert "--swap-space is gone since 0.18.0" in notes


class TestFormats:
    @pytest.mark.parametrize("target", ["vllm", "sglang"])
    def test_int4_has_a_nearest_format_that_was_not_measured(self, target: Target):
        stored = settings(make_policy(), INT4.label, target)["--kv-cache-dtype"]
        assert (stored.value, stored.standing) == ("fp8_e4m3", "nearest")
        assert "NOT WHAT WAS MEASURED" in stored.derivation
        assert "(2 times as many)" in stored.derivation

    def test_an_int4_limit_is_not_an_fp8_limit(self):
        running = settings(make_policy(), INT4.label, "vllm")["--max-num-seqs"]
        assert running.value == "6"
        assert "Not 11: quantized-quanto-int4 stores 4 bits" in running.derivation

    def test_an_fp8_limit_is_carried_over(self):
        policy = make_policy(BASELINE, admitted(QuantizedSpec(backend="fp8"), 70, 11))
        found = settings(policy, "quantized-fp8", "vllm")
        assert (found["--kv-cache-dtype"].value, found["--max-num-seqs"].value) == ("fp8_e4m3", "11")
        assert found["--kv-cache-dtype"].standing == "nearest"

    def test_rows_quantized_on_the_host_alone_leave_the_device_as_it_is(self):
        spec = StreamedSpec(host_dtype="int4")
        policy = make_policy(BASELINE, admitted(spec, 100, 20, host_bytes_per_session_token=40_000.0))
        stored = settings(policy, spec.label, "vllm")["--kv-cache-dtype"]
        assert (stored.value, stored.standing) == ("auto", "nearest")


class TestSglang:
    def test_the_baseline_by_hand(self):
        """22 / 80 = 0.275."""
        found = settings(make_policy(), "dynamic", "sglang")
        assert {name: each.value for name, each in found.items()} == {
            "--dtype": "bfloat16",
            "--mem-fraction-static": "0.2750",
            "--context-length": "8448",
            "--max-running-requests": "6",
            "--kv-cache-dtype": "auto",
        }
        assert "upper bound" in found["--mem-fraction-static"].derivation

    def test_activations_of_one_prefill_are_left_free(self):
        """131,072 bytes * 8,192 tokens = 1 GiB; (22 - 1) / 80 = 0.2625."""
        policy = make_policy(msgspec.structs.replace(BASELINE, calibration=fitted(131_072.0)))
        found = settings(policy, "dynamic", "sglang")["--mem-fraction-static"]
        assert found.value == "0.2625"
        assert "1.00 GiB activations of one prefill" in found.derivation

    def test_activations_that_the_fit_cannot_tell_from_the_cache_are_not_taken_for_none(self):
        calibration = fitted(0.0)
        fit = msgspec.structs.replace(calibration.fits[0], not_told_apart=("bytes_per_prefill_token",))
        calibration = msgspec.structs.replace(calibration, fits=(fit,))
        policy = make_policy(msgspec.structs.replace(BASELINE, calibration=calibration))
        found = settings(policy, "dynamic", "sglang")["--mem-fraction-static"]
        assert found.value == "0.2750"  # 22 / 80, the whole cap
        assert "upper bound" in found.derivation

    def test_streamed_rows_are_the_hierarchical_cache(self):
        """22,143,303,680 bytes are 22.14 GB of 1e9 bytes: 23 whole ones."""
        found = settings(make_policy(), "streamed", "sglang")
        assert found["--enable-hierarchical-cache"].value == ""
        assert found["--hicache-size"].value == "23"
        assert "not for a larger running batch" in found["--enable-hierarchical-cache"].derivation


class TestPod:
    def test_memory_by_hand(self):
        """4 GiB resident + 21 GiB pinned = 25,600 MiB; a tenth more is 28,160 MiB."""
        assert values(make_policy(), "streamed", "kubernetes") == {
            "resources.requests.memory": "28160Mi",
            "resources.limits.memory": "28160Mi",
            "nvidia.com/gpu": "1",
        }

    def test_memory_is_rounded_up(self):
        """1,000 MiB and 1 byte, and a tenth: 1,100 MiB and 2 bytes."""
        strategy = msgspec.structs.replace(BASELINE, peak_host_rss_bytes=1000 * MIB + 1)
        assert values(make_policy(strategy), "dynamic", "kubernetes")["resources.limits.memory"] == "1101Mi"

    def test_rows_stand_in_for_pinned_memory_that_was_not_counted(self):
        """4 GiB + 22,143,303,680 bytes, and a tenth: 29,082,098,074 bytes = 27,734.9 MiB."""
        strategy = msgspec.structs.replace(STREAMED, pinned_allocated_bytes=None)
        assert (
            values(make_policy(BASELINE, strategy), "streamed", "kubernetes")["resources.limits.memory"] == "27735Mi"
        )

    def test_what_was_not_measured_is_not_stated(self):
        policy = make_policy(msgspec.structs.replace(BASELINE, peak_host_rss_bytes=None))
        assert values(policy, "dynamic", "kubernetes")["resources.requests.memory"] is None
        assert "memory: not measured" in render_blocks(derive_hand_off(policy))["kubernetes"]


class TestEmulated:
    def test_every_number_of_memory_or_limit_is_labelled(self):
        without = {
            each.name for each in derive_settings(emulated(), "streamed") if "EMULATED" not in str(each.caution)
        }
        formats = {"--dtype", "--kv-cache-dtype"}
        assert without == formats | {"--kv-offloading-backend", "--enable-hierarchical-cache", "nvidia.com/gpu"}

    def test_memory_may_be_carried_over_and_limits_may_not(self):
        found = settings(emulated(), "dynamic", "vllm")
        assert "may be carried over" in str(found["--gpu-memory-utilization"].caution)
        assert "do not carry this limit over" in str(found["--max-num-seqs"].caution)

    @pytest.mark.parametrize("target", TARGETS)
    def test_what_is_pasted_begins_with_the_label(self, target: Target):
        lines = render_blocks(derive_hand_off(emulated()))[target].splitlines()
        assert lines[1].startswith("# EMULATED ON A CPU.")

    def test_an_emulated_host_tier_is_counted_once(self):
        """4 GiB and a tenth: 4,505.6 MiB."""
        assert values(emulated(), "streamed", "kubernetes")["resources.limits.memory"] == "4506Mi"

    def test_a_measured_policy_carries_no_such_label(self):
        hand_off = derive_hand_off(make_policy())
        assert "EMULATED" not in json.dumps(msgspec.to_builtins(hand_off))


class TestChoice:
    def chosen(self, *strategies: PolicyStrategy) -> str:
        return derive_hand_off(make_policy(*strategies)).strategy

    def test_the_lossless_one_that_admits_most_at_the_longest_lengths(self):
        hand_off = derive_hand_off(make_policy())
        assert hand_off.strategy == "streamed"
        assert "20 at p8192-o256, measured" in hand_off.chosen
        assert "the baseline dynamic: 6" in hand_off.chosen

    def test_the_baseline_wins_ties(self):
        assert self.chosen(admitted(StreamedSpec(), 100, 6), BASELINE) == "dynamic"

    def test_more_by_trace_is_not_more(self):
        assert self.chosen(BASELINE, admitted(StreamedSpec(), 100, 20, "traced")) == "dynamic"

    def test_a_longer_class_that_is_traced_does_not_stand_in_for_a_measured_one(self):
        limits = (limit(SHORT, 40), limit(LONG, 6, "traced"))
        hand_off = derive_hand_off(make_policy(PolicyStrategy(strategy=DynamicSpec(), limits=limits)))
        assert (hand_off.lengths.prompt_tokens, hand_off.evidence) == (1024, "measured")

    def test_a_lossy_one_only_where_nothing_else_admits(self):
        nothing = PolicyStrategy(strategy=DynamicSpec(), limits=(limit(LONG, 0),))
        hand_off = derive_hand_off(make_policy(nothing, QUANTIZED))
        assert hand_off.strategy == INT4.label
        assert "No lossless strategy" in hand_off.chosen

    def test_an_unknown_label_names_the_allowed_ones(self):
        with pytest.raises(InputError, match=r"'nothing'.*allowed: dynamic, streamed, quantized-quanto-int4"):
            derive_settings(make_policy(), "nothing")

    def test_a_refused_strategy_says_why_and_names_the_others(self):
        refused = PolicyStrategy(strategy=StreamedSpec(), limits=(), refusal="no link")
        with pytest.raises(InputError, match=r"admits no session.*\(no link\); allowed: dynamic"):
            derive_settings(make_policy(BASELINE, refused), "streamed")

    def test_only_the_targets_that_were_asked_for(self):
        hand_off = derive_hand_off(make_policy(), None, ["kubernetes"])
        assert {setting.target for setting in hand_off.settings} == {"kubernetes"}
        assert "vLLM" not in " ".join(hand_off.notes)


HOSTILE = "a`b|c\n# d <script> $(touch x) 'q' \\ &"


def hostile() -> HandOff:
    """Labels are held to a pattern when a file is read; what holds here are the renderers."""
    policy = make_policy(msgspec.structs.replace(STREAMED, strategy=StreamedSpec(name=HOSTILE)), BASELINE)
    model = ModelSpec(source=HOSTILE, revision=HOSTILE)
    policy = msgspec.structs.replace(
        policy, name=HOSTILE, fingerprint=msgspec.structs.replace(policy.fingerprint, model=model)
    )
    return derive_hand_off(policy)


def typed(block: str, folder: Path | None = None) -> list[str]:
    """The words that a shell calls a command with, which here only prints them."""
    stand_ins = "".join(f"{name}() {{ printf '%s\\0' {name} \"$@\"; }}\n" for name in ("vllm", "python"))
    result = subprocess.run(["bash", "-c", stand_ins + block], capture_output=True, text=True, check=True, cwd=folder)
    assert result.stderr == ""
    return result.stdout.removesuffix("\0").split("\0")


class TestRendering:
    def test_the_command_is_what_a_shell_takes(self):
        block = render_blocks(derive_hand_off(make_policy(), "dynamic"))["vllm"]
        assert typed(block) == [
            *("vllm", "serve", "org/model", "--revision", "v1", "--dtype", "bfloat16"),
            *("--gpu-memory-utilization", "0.2875", "--max-model-len", "8448", "--max-num-seqs", "6"),
            *("--kv-cache-dtype", "auto"),
        ]

    def test_a_flag_is_typed_without_a_value(self):
        block = render_blocks(derive_hand_off(make_policy(), "streamed"))["sglang"]
        words = typed(block)
        assert words[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "org/model"]
        assert words[-3:] == ["--enable-hierarchical-cache", "--hicache-size", "23"]

    def test_the_fragment_is_yaml(self):
        fragment = yaml.safe_load(render_blocks(derive_hand_off(make_policy(), "streamed"))["kubernetes"])
        same = {"memory": "28160Mi", "nvidia.com/gpu": 1}
        assert fragment == {"resources": {"requests": same, "limits": same}}

    @pytest.mark.parametrize("target", ["vllm", "sglang"])
    def test_hostile_names_are_words_of_a_command(self, target: Target, tmp_path: Path):
        words = typed(render_blocks(hostile())[target], tmp_path)
        assert words.count(" ".join(HOSTILE.split())) == 2
        assert list(tmp_path.iterdir()) == []

    def test_hostile_names_leave_the_fragment_as_it_is(self):
        assert set(yaml.safe_load(render_blocks(hostile())["kubernetes"])["resources"]) == {"requests", "limits"}

    def test_a_model_that_looks_like_an_option_is_none(self):
        policy = make_policy()
        model = ModelSpec(source="--trust-remote-code")
        policy = msgspec.structs.replace(policy, fingerprint=msgspec.structs.replace(policy.fingerprint, model=model))
        assert "vllm serve ./--trust-remote-code" in render_blocks(derive_hand_off(policy))["vllm"]

    def test_hostile_names_break_no_markdown(self):
        """The same tokens as of a tame policy, one for one, and no HTML."""
        tokens = {
            name: [token.type for token in MarkdownIt("commonmark").enable("table").parse(render_hand_off(hand_off))]
            for name, hand_off in {
                "hostile": hostile(),
                "tame": derive_hand_off(make_policy(STREAMED, BASELINE)),
            }.items()
        }
        assert tokens["hostile"] == tokens["tame"]
        html = MarkdownIt("commonmark").enable("table").render(render_hand_off(hostile()))
        assert "<script>" not in html

    def test_markdown_has_every_setting_with_its_standing(self):
        hand_off = derive_hand_off(make_policy())
        text = render_hand_off(hand_off)
        for setting in hand_off.settings:
            row = next(line for line in text.splitlines() if line.startswith(f"| `{setting.name}`"))
            assert setting.standing in row


class TestCommand:
    def invoke(self, monkeypatch: pytest.MonkeyPatch, *arguments: str):
        module = ModuleType("offload_eval.store.policy_file")
        module.load_policy = lambda _path: make_policy()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        app = typer.Typer()
        app.command()(settings_command)
        return CliRunner().invoke(app, ["policy.json", *arguments], env={"COLUMNS": "60"})

    def test_the_terminal_wraps_no_command(self, monkeypatch: pytest.MonkeyPatch):
        result = self.invoke(monkeypatch)
        assert result.exit_code == 0
        for block in render_blocks(derive_hand_off(make_policy())).values():
            assert block in result.stdout

    def test_json_has_settings_and_blocks(self, monkeypatch: pytest.MonkeyPatch):
        result = self.invoke(monkeypatch, "--strategy", "dynamic", "--target", "kubernetes", "--json")
        document = json.loads(result.stdout)
        assert document["strategy"] == "dynamic"
        assert [each["target"] for each in document["settings"]] == ["kubernetes"] * 3
        assert list(document["blocks"]) == ["kubernetes"]

    def test_an_unknown_strategy_is_bad_input(self, monkeypatch: pytest.MonkeyPatch):
        result = self.invoke(monkeypatch, "--strategy", "nothing")
        assert result.exit_code == 2
        assert "allowed: dynamic, streamed" in result.stderr

    def test_importing_the_command_imports_no_framework(self):
        code = "import sys, offload_eval.cli.policy_settings; print('torch' in sys.modules or 'pandas' in sys.modules)"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout.strip() == "False"


def test_a_policy_file_of_a_path_is_what_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from offload_eval.cli.policy_settings import show_settings

    seen: list[Path] = []
    module = ModuleType("offload_eval.store.policy_file")
    module.load_policy = lambda path: seen.append(path) or make_policy()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert show_settings(tmp_path / "p.json", None, "vllm", json_output=True) == 0
    assert seen == [tmp_path / "p.json"]
