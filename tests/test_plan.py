# ruff: noqa: E501 - one row a case
"""`plan`: the two views of real configs, the base example, partitions, ledgers, populations and long requests.

The base model has 32 layers, 8 kv heads and head_dim 128: 2 * 32 * 8 * 128 * 2 = 131,072 bytes a token in 16 bit.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import yaml
from malformed_configs import MALFORMED, write
from typer.testing import CliRunner

from offload_eval.bounds.plan_cells import plan_cells, plan_grids
from offload_eval.bounds.plan_request import columns
from offload_eval.cli.app import app
from offload_eval.cli.plan_inputs import plan_request

ROOT = Path(__file__).parents[1]
MODELS = json.loads((ROOT / "tests" / "data" / "kv_models.json").read_text())["models"]
GIB = 1024**3
TOKEN_BYTES = 131_072
BASE_MODEL = str(ROOT / "configs" / "base_example_model.json")
BASE = (
    "--model",
    BASE_MODEL,
    "--vram-gib",
    "24",
    "--weights-gib",
    "12",
    "--runtime-gib",
    "3",
    "--reserve-gib",
    "3",
)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def plan(*arguments: str) -> Any:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def cell(document: Any, strategy: str) -> Any:
    (found,) = [each for each in document["cells"] if each["strategy"] == strategy]
    return found


Configure = Callable[..., Path]


@pytest.fixture
def config(tmp_path: Path) -> Configure:
    """Writes a config.json of a Llama of 4 layers, 4 kv heads and head_dim 8; keywords replace fields."""

    def write(**changes: Any) -> Path:
        fields = {
            "model_type": "llama",
            "num_hidden_layers": 4,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "vocab_size": 100,
            "max_position_embeddings": 4096,
        }
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields | changes))
        return path

    return write


@pytest.fixture
def experiment(tmp_path: Path, config: Configure) -> Configure:
    """Writes an experiment on that model: 4 layers * 2 * 4 * 8 values * 2 bytes = 512 bytes a token."""

    def write(plan_section: Any = None, **changes: Any) -> Path:
        content = {
            "name": "mix",
            "model": {"config": str(config()), "weights": "random"},
            "budget": {"device_bytes": 3_000_000, "weights_bytes": 1_000_000},
            "workloads": [{"prompt_tokens": 97, "output_tokens": 4, "prompt": {"kind": "random"}}],
            "strategies": [{"kind": "dynamic"}, {"kind": "offloaded"}, {"kind": "streamed"}],
            "plan": {"paging": {"block_tokens": 1}} | (plan_section or {}),
        }
        path = tmp_path / "experiment.yaml"
        path.write_text(yaml.safe_dump(content | changes))
        return path

    return write


class TestContract:
    @pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
    def test_both_views_of_a_config_file(self, model: dict[str, Any], tmp_path: Path):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(model["config"]))
        for row in model["kv"]:
            arguments = ("--model", str(path), "--prompt-tokens", str(row["tokens"]))
            document = plan(*arguments, "--output-tokens", "0", "--batch-size", "1")
            sizes = document["kv_cache_bytes"]
            assert sizes["ideal"] == row["ideal_bytes"]
            assert sizes["transformers"] == row["transformers_5_24_dynamic_cache_bytes"]
            assert sizes["transformers_version"] == "5.24"
            assert document["parts"]["ideal"].items() >= {k: v for k, v in row["ideal_parts"].items() if v}.items()
            assert document["assumptions"]
            assert document["admission"] is None

    def test_admission_comes_with_a_budget(self):
        document = plan(*BASE, "--prompt-tokens", "4096", "--output-tokens", "0", "--batch-size", "1")
        assert document["admission"] == {
            "device_sessions": 12,
            "host_sessions": None,
            "limit": 12,
            "limited_by": "device",
        }
        assert "upper bound" in document["statement"]

    def test_layers_add_up_to_both_views(self):
        document = plan("--model", "gemma-3-27b", "--prompt-tokens", "5000")
        assert sum(row["ideal_bytes"] for row in document["layers"]) == document["kv_cache_bytes"]["ideal"]
        held = sum(row["transformers_bytes"] for row in document["layers"])
        assert held == document["kv_cache_bytes"]["transformers"]

    def test_a_static_cache_has_a_slot_more_in_each_window(self):
        """52 sliding layers of 16 kv heads and head_dim 128: one row is 2 * 16 * 128 * 2 = 8,192 bytes."""
        sizes = plan("--model", "gemma-3-27b", "--prompt-tokens", "5000")["kv_cache_bytes"]
        assert sizes["transformers_static"] - sizes["transformers"] == 52 * 8192


class TestBaseExample:
    def test_the_config_prints_12_and_6_sessions(self):
        result = invoke(str(ROOT / "configs" / "base_example.yaml"))
        assert result.exit_code == 0
        assert "at most 12 sessions of 4,096 cached tokens" in result.stdout
        assert "upper bound" in result.stdout
        document = plan(str(ROOT / "configs" / "base_example.yaml"))
        in_gpu = [each for each in document["cells"] if each["strategy"] in ("paged", "dynamic")]
        assert [each["admission"]["limit"] for each in in_gpu] == [12, 12, 6, 6]
        assert {each["kv_device_peak_bytes_per_session"] for each in in_gpu} == {GIB // 2, GIB}

    def test_twice_the_tokens_print_6_sessions(self):
        result = invoke(str(ROOT / "configs" / "base_example.yaml"), "--prompt-tokens", "8192", "--output-tokens", "0")
        assert "at most 6 sessions of 8,192 cached tokens" in result.stdout

    def test_the_last_token_is_never_cached(self):
        assert plan(*BASE, "--prompt-tokens", "3585", "--output-tokens", "512")["cached_tokens"] == 4096

    def test_options_replace_values_of_the_file(self):
        document = plan(str(ROOT / "configs" / "base_example.yaml"), "--vram-gib", "48", "--weights-gib", "24")
        assert document["device"]["kv_bytes"] == 18 * GIB
        assert document["admission"]["limit"] == 36

    def test_a_spent_budget_admits_none_and_says_so(self):
        result = invoke(*BASE[:3], "14", *BASE[4:], "--prompt-tokens", "4096")
        assert "no session fits" in result.stdout


class TestFormats:
    """4,096 tokens of the base model are 268,435,456 values."""

    @pytest.mark.parametrize(
        ("dtype", "expected_bytes"),
        [
            ("float32", 2 * 4096 * TOKEN_BYTES),
            ("float16", 4096 * TOKEN_BYTES),
            ("fp8", 2048 * TOKEN_BYTES + 32 * 8),
            # 3,968 tokens in 8 bits and 32 bits for 64 values, 128 tokens in 16 bits.
            ("int8", 3968 * 65_536 * 17 // 16 + 128 * TOKEN_BYTES),
            ("int4", 3968 * 65_536 * 9 // 16 + 128 * TOKEN_BYTES),
            ("int2", 3968 * 65_536 * 5 // 16 + 128 * TOKEN_BYTES),
        ],
    )
    def test_the_ideal_view_in_a_format(self, dtype: str, expected_bytes: int):
        document = plan("--model", BASE_MODEL, "--prompt-tokens", "4096", "--kv-cache-dtype", dtype)
        assert document["kv_cache_bytes"]["ideal"] == expected_bytes

    @pytest.mark.parametrize(("dtype", "bits"), [("fp8", 8), ("int8", 8.5), ("int4", 4.5), ("int2", 2.5)])
    def test_the_transformers_view_is_its_quantized_caches_payload(self, dtype: str, bits: float):
        """The prompt is quantized whole; fp8 adds two float32 scales a layer."""
        document = plan("--model", BASE_MODEL, "--prompt-tokens", "4096", "--kv-cache-dtype", dtype)
        scales = 32 * 8 if dtype == "fp8" else 0
        assert document["kv_cache_bytes"]["transformers"] == 4096 * 65_536 * bits / 8 + scales

    def test_a_format_that_transformers_cannot_hold_has_no_view(self):
        arguments = ("--model", "gemma-3-27b", "--prompt-tokens", "64", "--kv-cache-dtype", "int4")
        assert plan(*arguments)["kv_cache_bytes"]["transformers"] is None

    def test_group_size_and_residual_window_are_options(self):
        arguments = ("--model", BASE_MODEL, "--prompt-tokens", "4096", "--kv-cache-dtype", "int4")
        document = plan(*arguments, "--q-group-size", "32", "--residual-length", "0")
        assert document["kv_cache_bytes"]["ideal"] == 4096 * 65_536 * 5 // 8

    def test_states_are_never_quantized(self):
        sizes = [
            plan("--model", "falcon-mamba-7b", "--prompt-tokens", "64", "--kv-cache-dtype", dtype)
            for dtype in ("auto", "int4")
        ]
        assert sizes[0]["parts"]["ideal"] == sizes[1]["parts"]["ideal"]


class TestPages:
    def test_tokens_are_rounded_up_to_blocks(self):
        document = plan(*BASE, "--prompt-tokens", "4097", "--block-size", "16")
        assert cell(document, "paged")["kv_device_peak_bytes_per_session"] == 4112 * TOKEN_BYTES
        assert cell(document, "dynamic")["kv_device_peak_bytes_per_session"] == 4097 * TOKEN_BYTES

    @pytest.mark.parametrize(
        ("tokens", "rows"), [(7, 12), (10, 12), (12, 12), (13, 16), (16, 16), (17, 16), (1000, 16)]
    )
    def test_a_window_of_10_tokens_touches_at_most_four_blocks_of_4(self, config: Configure, tokens: int, rows: int):
        """9 tokens before the newest one: three blocks and a bit on either side make four at the worst alignment."""
        path = config(model_type="mistral", sliding_window=10)
        document = plan("--model", str(path), "--prompt-tokens", str(tokens), "--block-size", "4")
        rows = 8 if tokens == 7 else rows
        assert cell(document, "paged")["kv_device_peak_bytes_per_session"] == rows * 512

    def test_a_chunk_is_counted_whole(self):
        """Llama 4 Scout: at the first token of its second chunk a session has held the whole first one."""
        arguments = ("--model", "llama-4-scout", "--prompt-tokens")
        sizes = [
            cell(plan(*arguments, str(tokens), "--block-size", "1"), "paged")["kv_device_peak_bytes_per_session"]
            for tokens in (8192, 8193)
        ]
        full_layers = 12
        assert sizes[1] - sizes[0] == full_layers * 2 * 8 * 128 * 2


class TestPartitions:
    @pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (3, 3)])
    def test_kv_heads_are_divided_and_then_replicated(self, tp: int, heads: int):
        document = plan("--model", BASE_MODEL, "--prompt-tokens", "4096", "--tp", str(tp))
        assert cell(document, "paged")["kv_device_peak_bytes_per_session"] == 4096 * TOKEN_BYTES * heads // 8

    def test_latents_are_replicated(self):
        """DeepSeek-V3 holds 70,272 bytes a token on every rank."""
        document = plan("--model", "deepseek-v3", "--prompt-tokens", "4096", "--tp", "8")
        assert cell(document, "paged")["kv_device_peak_bytes_per_session"] == 4096 * 70_272

    def test_weights_are_divided_and_the_budget_is_one_ranks(self):
        document = plan(*BASE, "--prompt-tokens", "4096", "--tp", "2")
        assert document["device"]["weights_bytes"] == 6 * GIB
        assert document["admission"]["limit"] == 12 * GIB // (GIB // 4) == 48

    def test_the_fullest_stage_decides(self):
        """Gemma 3 27B: 62 layers, every sixth one full.

        Of 31 layers each, both stages have five full ones; of 21, 21 and 20, the first has 3, the second 4 (layers 24,
        30, 36 and 42) and the third 3.
        """
        for stages, full, sliding in ((2, 5, 26), (3, 4, 17)):
            document = plan(
                "--model", "gemma-3-27b", "--prompt-tokens", "131072", "--pp", str(stages), "--block-size", "1"
            )
            expected = (full * 131_072 + sliding * 1024) * 8192
            assert cell(document, "paged")["kv_device_peak_bytes_per_session"] == expected

    def test_layers_left_over_go_to_the_stages_before_the_last(self, config: Configure):
        """Seven layers on three stages are 2, 3 and 2; the fullest holds 3 * 128 bytes a token."""
        document = plan("--model", str(config(num_hidden_layers=7)), "--prompt-tokens", "16", "--pp", "3")
        assert cell(document, "paged")["kv_device_peak_bytes_per_session"] == 16 * 3 * 128

    def test_both_caches_of_a_layer_stay_together(self):
        """T5-base: 12 decoder layers with self and cross attention; 5 and 7 tokens of 12 * 64 values."""
        arguments = ("--model", "t5-base", "--prompt-tokens", "5", "--encoder-tokens", "7", "--block-size", "1")
        whole, half = (plan(*arguments, "--pp", pp) for pp in ("1", "2"))
        assert cell(whole, "paged")["kv_device_peak_bytes_per_session"] == (5 + 7) * 12 * 2 * 768 * 2
        assert cell(half, "paged")["kv_device_peak_bytes_per_session"] == (5 + 7) * 6 * 2 * 768 * 2

    def test_replicas_multiply_the_limit_and_share_the_host(self):
        arguments = (*BASE, "--prompt-tokens", "4096", "--host-gib", "64", "--strategy", "offloaded")
        one, two = plan(*arguments), plan(*arguments, "--dp", "2")
        assert one["admission"]["device_sessions"] * 2 == two["admission"]["device_sessions"]
        assert one["admission"]["host_sessions"] == two["admission"]["host_sessions"] == 128

    def test_more_stages_than_layers_are_refused(self):
        result = invoke(*BASE, "--prompt-tokens", "4096", "--pp", "33")
        assert result.exit_code == 2
        assert "33; allowed: 1 to 32" in result.output


class TestLedgers:
    def test_pinned_buffers_are_rounded_up_to_powers_of_two(self, experiment: Configure):
        """100 cached tokens.

        Keys of a layer are 6,400 bytes, 8,192 pinned, 8 buffers; streamed rows 12,800, 16,384 pinned, 4 buffers.
        """
        document = plan(str(experiment()))
        assert cell(document, "offloaded")["batch_pinned_bytes"] == 8 * 8192
        assert cell(document, "streamed")["batch_pinned_bytes"] == 4 * 16_384
        assert cell(document, "streamed")["kv_host_bytes_per_session"] == 51_200

    def test_a_batch_shares_its_buffers(self, experiment: Configure):
        document = plan(str(experiment()), "--batch-size", "3")
        assert cell(document, "streamed")["batch_pinned_bytes"] == 4 * 65_536
        assert cell(document, "streamed")["h2d_bytes_per_step"] == 3 * 99 * 512

    def test_the_smaller_ledger_decides(self, experiment: Configure):
        """2,000,000 // 25,600 = 78 scratches of 2 layers * 100 * 128 bytes fit the device.

        1 MiB of host are 4 buffers of 262,144 bytes: 20 sessions of 12,800.
        """
        path = experiment({"host": {"memory_bytes": 2**20}})
        admission = cell(plan(str(path)), "streamed")["admission"]
        assert admission == {"device_sessions": 78, "host_sessions": 20, "limit": 20, "limited_by": "host"}
        assert cell(plan(str(path)), "dynamic")["admission"]["host_sessions"] is None

    def test_the_control_groups_limit_and_the_reserve_count(self, experiment: Configure):
        path = experiment({"host": {"memory_bytes": 2**40, "limit_bytes": 2**20, "reserve_bytes": 2**19}})
        document = plan(str(path))
        assert document["host"]["kv_bytes"] == 2**19
        assert cell(document, "streamed")["admission"]["host_sessions"] == 10

    def test_swap_is_no_capacity(self, experiment: Configure):
        assert any("Swap never counts" in each for each in plan(str(experiment()))["assumptions"])

    def test_activations_are_taken_off_the_device(self):
        document = plan(*BASE, "--prompt-tokens", "4096", "--activations-gib", "0.5")
        assert (document["device"]["activations_bytes"], document["admission"]["limit"]) == (GIB // 2, 11)

    def test_estimated_activations_agree_with_a_trace_within_one_percent(self):
        """Llama-3.1-8B, prefilled without data, peaks 15.913 - 15.458 GiB above what is live afterwards."""
        for tokens, traced_gib in ((4096, 15.913 - 15.458), (32_768, 22.599 - 18.958)):
            document = plan("--model", "llama-3.1-8b", "--prompt-tokens", str(tokens))
            assert document["activations_estimate_bytes"] / GIB == pytest.approx(traced_gib, rel=0.01)

    def test_the_estimate_is_used_when_asked_for(self):
        arguments = (*BASE, "--prompt-tokens", "4096", "--estimate-activations")
        estimate_bytes = 4096 * (4 * 4096 + 3 * 14_336) * 2
        assert plan(*arguments)["device"]["activations_bytes"] == estimate_bytes
        chunked = plan(*arguments, "--prefill-chunk-size", "512")
        assert chunked["device"]["activations_bytes"] == estimate_bytes // 8
        assert plan(*arguments)["admission"]["limit"] == (6 * GIB - estimate_bytes) // (GIB // 2)

    def test_no_estimate_for_experts(self):
        assert plan("--model", "mixtral-8x7b", "--prompt-tokens", "64")["activations_estimate_bytes"] is None

    def test_a_folder_with_weights_states_them(self, config: Configure, tmp_path: Path):
        config()
        (tmp_path / "model.safetensors").write_bytes(b"\0" * 1000)
        document = plan("--model", str(tmp_path), "--prompt-tokens", "10", "--vram-gib", "1")
        assert document["device"]["weights_bytes"] == 1000


class TestLongestSession:
    def longest(self, *arguments: str) -> dict[str, Any]:
        document = plan(*arguments, "--prompt-tokens", "64")
        return {each["strategy"]: (each["tokens"], each["limited_by"]) for each in document["longest_sessions"]}

    def test_the_device_stops_it(self):
        """6 GiB are 49,152 tokens of 131,072 bytes; in blocks of 10,000 tokens, 40,000."""
        assert self.longest(*BASE)["dynamic"] == (49_152, "device")
        assert self.longest(*BASE, "--block-size", "10000")["paged"] == (40_000, "device")

    def test_the_host_stops_it(self):
        """64 buffers of keys or values in 1 GiB: 16 MiB each, 8,192 tokens of 2,048 bytes."""
        assert self.longest(*BASE, "--host-gib", "1")["offloaded"] == (8192, "host")

    def test_the_context_or_the_cap_stops_it(self):
        assert self.longest(*BASE)["streamed"] == (131_072, "context")
        assert self.longest(*BASE, "--max-request-tokens", "999")["streamed"] == (999, "max_request_tokens")

    def test_nothing_fits(self):
        assert self.longest(*BASE[:4], "--weights-gib", "25")["dynamic"] == (0, "device")

    def test_there_is_none_without_a_budget(self):
        assert self.longest("--model", BASE_MODEL) == {}


class TestPopulation:
    """Sessions of 512 bytes a token."""

    CHAT: ClassVar[dict[str, Any]] = {
        "name": "chat",
        "sessions": 3,
        "prompt_tokens": 20,
        "max_new_tokens": 11,
        "generated_tokens": {"p95": 6},
    }
    LONG: ClassVar[dict[str, Any]] = {
        "name": "long",
        "sessions": 1,
        "prompt_tokens": 50,
        "max_new_tokens": 21,
        "generated_tokens": {"p95": 11},
    }

    def sums(self, experiment: Configure, strategy: str, *groups: Any, **section: Any) -> dict[str, Any]:
        document = plan(str(experiment({"population": list(groups)} | section)))
        (found,) = [each for each in document["population"] if each["strategy"] == strategy]
        assert found["refusal"] is None
        return {each["at"]: each for each in found["sums"]}

    def test_a_paged_engine_sums_at_caps_and_at_a_percentile(self, experiment: Configure):
        sums = self.sums(experiment, "paged", self.CHAT, self.LONG, percentile="p95")
        assert sums["caps"]["device_bytes"] == (3 * 30 + 70) * 512
        assert sums["p95"]["device_bytes"] == (3 * 25 + 60) * 512
        assert (sums["caps"]["sessions"], sums["caps"]["padding_bytes"]) == (4, 0)
        assert sums["caps"]["mixes"] == 2_000_000 // (160 * 512)
        assert sums["caps"]["fits"]

    def test_a_batch_is_padded_to_its_longest_prompt_and_generation(self, experiment: Configure):
        sums = self.sums(experiment, "dynamic", self.CHAT, self.LONG)
        assert sums["caps"]["device_bytes"] == 4 * 70 * 512
        assert sums["caps"]["padding_bytes"] == 3 * 40 * 512

    def test_a_batch_for_each_group_pads_nothing(self, experiment: Configure):
        """Streamed: buffers of 3 * 30 and of 70 tokens, 128 bytes each: 16,384 pinned for either, on 4 layers."""
        sums = self.sums(experiment, "dynamic", self.CHAT, self.LONG, batching="group")
        assert (sums["caps"]["device_bytes"], sums["caps"]["padding_bytes"]) == (160 * 512, 0)
        streamed = self.sums(experiment, "streamed", self.CHAT, self.LONG, batching="group")
        assert streamed["caps"]["pinned_bytes"] == 4 * (16_384 + 16_384)

    def test_a_shared_prefix_is_held_once_in_whole_blocks(self, experiment: Configure):
        group = self.CHAT | {"shared_prefix_tokens": 19}
        sums = self.sums(experiment, "paged", group, paging={"block_tokens": 8})
        # 30 cached tokens are 4 blocks of 8; two whole blocks of the prefix are shared by three sessions.
        assert sums["caps"]["device_bytes"] == (3 * 32 - 2 * 16) * 512
        assert sums["caps"]["shared_prefix_saved_bytes"] == 2 * 16 * 512

    def test_a_prefix_is_shared_by_all_mixes(self, experiment: Configure):
        """19 tokens are held once, and each mix adds 3 * (30 - 19) tokens."""
        group = self.CHAT | {"shared_prefix_tokens": 19}
        mixes = self.sums(experiment, "paged", group)["caps"]["mixes"]
        assert mixes == (2_000_000 - 19 * 512) // (33 * 512)

    def test_transformers_shares_no_prefix(self, experiment: Configure):
        sums = self.sums(experiment, "dynamic", self.CHAT | {"shared_prefix_tokens": 19})
        assert sums["caps"]["device_bytes"] == 3 * 30 * 512

    def test_beams_share_their_prompt_in_an_engine_and_nothing_in_transformers(self, experiment: Configure):
        group = self.CHAT | {"beams": 4}
        assert self.sums(experiment, "paged", group)["caps"]["device_bytes"] == 3 * (20 + 4 * 10) * 512
        assert self.sums(experiment, "dynamic", group)["caps"]["device_bytes"] == 3 * 4 * 30 * 512

    def test_streamed_refuses_beams(self, experiment: Configure):
        document = plan(str(experiment({"population": [self.CHAT | {"beams": 2}]})))
        (streamed,) = [each for each in document["population"] if each["strategy"] == "streamed"]
        assert "beams" in streamed["refusal"]

    def test_the_host_ledger_limits_the_mixes(self, experiment: Configure):
        """Four rows of 70 tokens: 35,840 bytes a layer. 1 MiB of host are 4 buffers of 262,144: 7 mixes."""
        sums = self.sums(experiment, "streamed", self.CHAT, self.LONG, host={"memory_bytes": 2**20})
        assert sums["caps"]["pinned_bytes"] == 4 * 65_536
        assert sums["caps"]["mixes"] == 7

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"generated_tokens": {"p95": 12}}, ["population[0].generated_tokens.p95: 12", "max_new_tokens = 11"]),
            ({"generated_tokens": {}}, ["population[0].generated_tokens.p95: required by plan.percentile"]),
            ({"shared_prefix_tokens": 21}, ["population[0].shared_prefix_tokens: 21", "prompt_tokens = 20"]),
            ({"sessions": 0}, ["population[0].sessions: 0", "integer >= 1"]),
            ({"beams": 2000}, ["population[0].beams: 2000", "from 1 to 1024"]),
            ({"name": "a b"}, ["population[0].name"]),
            ({"generated_tokens": {"p42": 3}}, ["generated_tokens.p42: unknown key; allowed: p50, p90, p95, p99"]),
        ],
    )
    def test_a_wrong_group_is_refused(self, experiment: Configure, changes: dict[str, Any], words: list[str]):
        result = invoke(str(experiment({"population": [self.CHAT | changes], "percentile": "p95"})))
        assert result.exit_code == 2
        assert all(word in result.output for word in words), result.output

    def test_groups_need_names_of_their_own(self, experiment: Configure):
        result = invoke(str(experiment({"population": [self.CHAT, self.CHAT]})))
        assert (result.exit_code, "'chat' is used 2 times" in result.output) == (2, True)


class TestLongRequests:
    """The model's context is 4,096 tokens."""

    def long(self, experiment: Configure, *arguments: str, **policy: Any) -> Any:
        return plan(str(experiment({"long_requests": policy})), "--output-tokens", "97", *arguments)

    def test_a_request_that_fills_the_context_is_admitted(self, experiment: Configure):
        document = self.long(experiment, "--prompt-tokens", "3999")
        assert document["long_requests"] == []
        assert document["admission"]["limited_by"] == "device"

    @pytest.mark.parametrize(
        ("action", "outcome", "fitting"),
        [("refuse", "refused", None), ("queue", "queued", None), ("suggest", "suggested", 3999)],
    )
    def test_one_over_the_context_follows_the_policy(
        self, experiment: Configure, action: str, outcome: str, fitting: int | None
    ):
        document = self.long(experiment, "--prompt-tokens", "4000", action=action)
        (request,) = document["long_requests"]
        assert (request["outcome"], request["fitting_prompt_tokens"]) == (outcome, fitting)
        assert (request["request_tokens"], request["limit_tokens"], request["limited_by"]) == (4097, 4096, "context")
        assert document["admission"]["limit"] == 0
        assert document["admission"]["limited_by"] == "context"
        assert document["kv_cache_bytes"]["ideal"] == (4000 + 96) * 512, "never truncated"

    def test_the_cap_goes_before_the_context(self, experiment: Configure):
        document = self.long(experiment, "--prompt-tokens", "100", action="suggest", max_request_tokens=150)
        (request,) = document["long_requests"]
        assert (request["limited_by"], request["fitting_prompt_tokens"]) == ("max_request_tokens", 53)

    def test_no_prompt_is_short_enough(self, experiment: Configure):
        document = self.long(experiment, "--prompt-tokens", "100", action="suggest", max_request_tokens=97)
        assert document["long_requests"][0]["fitting_prompt_tokens"] is None

    def test_a_long_group_is_left_out_of_the_population(self, experiment: Configure):
        groups = [TestPopulation.CHAT, TestPopulation.LONG | {"prompt_tokens": 5000}]
        document = plan(str(experiment({"population": groups})))
        assert [each["name"] for each in document["long_requests"]] == ["long"]
        assert document["population"][0]["sums"][0]["device_bytes"] == 3 * 30 * 512

    def test_the_outcome_is_said_in_words(self, experiment: Configure):
        path = experiment({"long_requests": {"action": "suggest"}})
        result = invoke(str(path), "--prompt-tokens", "5000")
        assert "a prompt of 4,092 tokens would fit" in result.stdout


class TestGrids:
    def request(self, *strategies: str, **options: Any) -> Any:
        counts = {"prompt_tokens": "1,100:5000:700", "output_tokens": "0,1,300", "batch_size": "1,7"}
        budget = {"vram_gib": 24.0, "weights_gib": 12.0, "host_gib": 32.0}
        return plan_request(None, options.pop("model", BASE_MODEL), counts, strategies, budget | options, [])

    @pytest.mark.parametrize(
        "model", [BASE_MODEL, "gemma-3-27b", "deepseek-v3", "llama-4-scout", "qwen3-next-80b-a3b"]
    )
    def test_a_grid_equals_its_cells_one_by_one(self, model: str):
        request = self.request(model=model, weights_gib=1.0, tp=2, pp=3)
        together = list(plan_cells(request))
        assert len(together) == len(request.strategies) * 9 * 3 * 2
        for workload in request.workloads[::5]:
            alone = plan_cells(type(request)(**{**vars(request), "workloads": [workload]}))
            assert list(alone) == [each for each in together if each.workload == workload.name]

    def test_lengths_and_batches_broadcast(self):
        request = self.request("dynamic", "offloaded", "streamed")
        lengths, batches = columns(request.workloads)
        by_cell = plan_grids(request, lengths, batches)
        by_axes = plan_grids(
            request,
            type(lengths)(
                prompt_tokens=lengths.prompt_tokens[::2, None], output_tokens=lengths.output_tokens[::2, None]
            ),
            batches[None, :2],
        )
        for (_, flat), (_, square) in zip(by_cell, by_axes, strict=True):
            assert np.array_equal(square.batch_pinned_bytes.ravel(), flat.batch_pinned_bytes)
            assert np.array_equal(square.batch_device_bytes.ravel(), flat.batch_device_bytes)
            assert np.array_equal(square.batch_fits.ravel(), flat.batch_fits)

    def test_csv_has_a_row_a_cell(self, tmp_path: Path):
        path = tmp_path / "grid.csv"
        arguments = (*BASE, "--prompt-tokens", "1024:4096:1024", "--batch-size", "1,12,13")
        assert invoke(*arguments, "--csv", str(path)).exit_code == 0
        rows = list(csv.DictReader(path.open()))
        assert len(rows) == 4 * 3 * 6
        paged = [row for row in rows if row["strategy"] == "paged" and row["prompt_tokens"] == "4096"]
        assert [(row["limit"], row["batch_fits"]) for row in paged] == [
            ("12", "True"),
            ("12", "True"),
            ("12", "False"),
        ]

    def test_csv_on_standard_output(self):
        result = invoke(*BASE, "--prompt-tokens", "4096", "--csv", "-", "--strategy", "dynamic")
        (row,) = csv.DictReader(result.stdout.splitlines())
        assert (row["limit"], row["host_sessions"]) == ("12", "")

    def test_a_batch_that_does_not_fit_is_named(self):
        assert "a batch of 13 does not fit" in invoke(*BASE, "--prompt-tokens", "4096", "--batch-size", "13").stdout


class TestText:
    def test_what_a_strategy_gains_and_what_it_costs(self):
        """153 sessions of offloaded against 12: 12.75; each moves 4,095 tokens in and 4,096 out."""
        lines = [" ".join(line.split()) for line in invoke(*BASE, "--prompt-tokens", "4096").stdout.splitlines()]
        assert "offloaded 40.00 MiB 512.00 MiB 511.88 MiB 512.00 MiB 153 device 12.75x" in lines
        assert "offloaded at 153 sessions: 76.48 GiB to the device and 76.50 GiB back for each decode step." in lines

    def test_presets_are_listed(self):
        listed = json.loads(invoke("--list-presets", "--json").stdout)
        assert {"preset": "gpt2", "name": "openai-community/gpt2"}.items() <= listed_of(listed, "gpt2").items()
        assert "llama-3.1-8b" in invoke("--list-presets").stdout


def listed_of(listed: list[dict[str, Any]], preset: str) -> dict[str, Any]:
    (found,) = [each for each in listed if each["preset"] == preset]
    return found


class TestStrategies:
    def test_the_first_ones_admission_is_the_answer(self):
        document = plan(*BASE, "--prompt-tokens", "4096", "--host-gib", "64", "--strategy", "streamed,paged")
        assert [each["strategy"] for each in document["cells"]] == ["streamed", "paged"]
        assert document["admission"]["limited_by"] == "host"

    @pytest.mark.parametrize(
        ("typed", "label"),
        [
            ("quantized", "quantized-quanto-int4"),
            ("quantized-fp8", "quantized-fp8"),
            ("quantized:backend=hqq,nbits=2,residual_length=64", "quantized-hqq-int2-residuallength64"),
            ("streamed:prefetch_layers=3", "streamed-ahead3"),
        ],
    )
    def test_options_and_labels_are_understood(self, typed: str, label: str):
        document = plan(*BASE, "--prompt-tokens", "4096", "--strategy", typed)
        assert [each["strategy"] for each in document["cells"]] == [label]

    def test_a_strategy_without_a_closed_form_says_why(self):
        document = plan("--model", "gemma-3-27b", "--prompt-tokens", "64")
        assert "sliding" in cell(document, "quantized-fp8")["refusal"]
        assert "sliding" in invoke("--model", "gemma-3-27b", "--prompt-tokens", "64").stdout


BAD_ARGUMENTS = {
    "nothing": ([], ["give an experiment file, or --model"]),
    "no lengths": (["--model", "gpt2"], ["--model needs --prompt-tokens"]),
    "unknown model": (["--model", "llama-9", "--prompt-tokens", "4"], ["llama-9", "near presets", "Nothing is downloaded"]),
    "missing file": (["nowhere.yaml"], ["nowhere.yaml: cannot be read"]),
    "no tokens": (["--model", "gpt2", "--prompt-tokens", "0"], ["--prompt-tokens 0", "from 1 to 16,777,216"]),
    "text for tokens": (["--model", "gpt2", "--prompt-tokens", "4k"], ["--prompt-tokens 4k", "START:STOP:STEP"]),
    "range backwards": (["--model", "gpt2", "--prompt-tokens", "9:1:1"], ["9:1:1"]),
    "range without a step": (["--model", "gpt2", "--prompt-tokens", "1:9:0"], ["1:9:0"]),
    "huge batch": (["--model", "gpt2", "--prompt-tokens", "4", "--batch-size", "70000"], ["from 1 to 65,536"]),
    "budget without a card": (["--model", "gpt2", "--prompt-tokens", "4", "--weights-gib", "1"], ["needs --vram-gib"]),
    "weights not known": (["--model", BASE_MODEL, "--prompt-tokens", "4", "--vram-gib", "1"], ["--weights-gib"]),
    "negative card": (["--model", "gpt2", "--prompt-tokens", "4", "--vram-gib", "-3"], ["--vram-gib -3"]),
    "no number": (["--model", "gpt2", "--prompt-tokens", "4", "--vram-gib", "nan"], ["--vram-gib nan"]),
    "infinite card": (["--model", "gpt2", "--prompt-tokens", "4", "--vram-gib", "inf"], ["--vram-gib inf"]),
    "no ranks": (["--model", "gpt2", "--prompt-tokens", "4", "--tp", "0"], ["--tp 0", "integer >= 1"]),
    "near-miss strategy": (["--model", "gpt2", "--prompt-tokens", "4", "--strategy", "quantised"], ["paged, dynamic", "did you mean 'quantized'"]),
    "bits of another backend": (["--model", "gpt2", "--prompt-tokens", "4", "--strategy", "quantized:nbits=3"], ["nbits: 3", "quanto takes 2, 4"]),
    "option without a value": (["--model", "gpt2", "--prompt-tokens", "4", "--strategy", "streamed:x"], ["'x' is not key=value"]),
    "strategy twice": (["--model", "gpt2", "--prompt-tokens", "4", "--strategy", "paged,dynamic,paged"], ["paged is named twice"]),
    "near-miss dtype": (["--model", "gpt2", "--prompt-tokens", "4", "--kv-cache-dtype", "fp4"], ["'fp4'", "int4"]),
    "policy": (["--model", "gpt2", "--prompt-tokens", "4", "--long-requests", "truncate"], ["'truncate'", "queue, refuse, suggest"]),
    "two forms": (["--model", "gpt2", "--prompt-tokens", "4", "--json", "--csv", "x"], ["--csv and --json"]),
    "no folder for csv": (["--model", "gpt2", "--prompt-tokens", "4", "--csv", "no/where/x.csv"], ["no/where/x.csv"]),
    "override without a file": (["--model", "gpt2", "--prompt-tokens", "4", "--set", "a=1"], ["needs an experiment file"]),
    "too many to show": (["--model", "gpt2", "--prompt-tokens", "1:16000:1"], ["cells are too many", "--csv FILE"]),
    "no estimate": (["--model", "mixtral-8x7b", "--prompt-tokens", "4", "--vram-gib", "99", "--estimate-activations"], ["no dense MLP", "--activations-gib"]),
    "runtime takes all": (["--model", "gpt2", "--prompt-tokens", "4", "--vram-gib", "1", "--runtime-gib", "1"], ["--vram-gib 1", "runtime_bytes + reserve_bytes"]),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments_end_with_2_and_one_line(arguments: list[str], words: list[str]):
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert all(word in " ".join(result.output.split()) for word in words), result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("case", sorted(MALFORMED))
def test_a_malformed_config_ends_with_its_exit_code_and_one_line(case: str, tmp_path: Path):
    file, exit_code, words = MALFORMED[case]
    path = write(file, tmp_path)
    result = invoke("--model", str(path), "--prompt-tokens", "64", "--json")
    assert (result.exit_code, result.stdout) == (exit_code, ""), result.output
    assert isinstance(result.exception, SystemExit), "no traceback"
    message = " ".join(result.stderr.split())
    assert message.startswith(f"error: {path}: ")
    assert all(word in message for word in words), message
