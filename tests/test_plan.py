"""`plan`: the two views of real configs, the base example, formats, pages, partitions, ledgers and strategies."""

import json
from pathlib import Path
from typing import Any

import pytest
from plan_calls import BASE, BASE_MODEL, GIB, ROOT, TOKEN_BYTES, Configure, cell, invoke, plan

MODELS = json.loads((ROOT / "tests" / "data" / "kv_models.json").read_text())["models"]


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

    def test_what_is_typed_holds_for_every_workload(self):
        document = plan(str(ROOT / "configs" / "base_example.yaml"), "--batch-size", "8", "--strategy", "paged")
        assert [(each["prompt_tokens"], each["batch_size"]) for each in document["cells"]] == [(3585, 8), (7681, 8)]

    def test_equal_combinations_are_planned_once(self):
        document = plan(*BASE, "--prompt-tokens", "64,64,32:96:32", "--strategy", "paged")
        assert [each["prompt_tokens"] for each in document["cells"]] == [64, 32, 96]

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
            ("fp8", 2048 * TOKEN_BYTES),
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

    @pytest.mark.parametrize("dtype", ["int4", "fp8", "float32"])
    def test_a_format_that_transformers_cannot_hold_has_no_view(self, dtype: str):
        document = plan("--model", "gemma-3-27b", "--prompt-tokens", "64", "--kv-cache-dtype", dtype)
        assert document["kv_cache_bytes"]["transformers"] is None
        assert {row["transformers_bytes"] for row in document["layers"]} == {None}

    def test_scales_of_fp8_are_the_models_and_no_sessions(self):
        """6 GiB less 256 bytes of scales hold 23 sessions of 256 MiB; the 24th has no room for the scales."""
        document = plan(*BASE, "--prompt-tokens", "4096", "--strategy", "paged-fp8")
        assert document["cells"][0]["kv_device_bytes_fixed"] == 32 * 8
        assert document["admission"]["limit"] == (6 * GIB - 256) // (256 * 2**20) == 23

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
        ("tokens", "rows"), [(7, 8), (10, 12), (12, 12), (13, 16), (16, 16), (17, 16), (1000, 16)]
    )
    def test_a_window_of_10_tokens_touches_four_blocks_of_4(self, plan_config: Configure, tokens: int, rows: int):
        """9 tokens before the newest one: three blocks and a bit on either side make four at the worst alignment."""
        path = plan_config(model_type="mistral", sliding_window=10)
        document = plan("--model", str(path), "--prompt-tokens", str(tokens), "--block-size", "4")
        assert cell(document, "paged")["kv_device_peak_bytes_per_session"] == rows * 512

    def test_a_chunk_of_whole_blocks_takes_no_block_more(self):
        """12 full layers of 100,000 tokens and 36 chunks of 8,192: 8 heads * 2 * 128 values * 2 bytes a row."""
        document = plan("--model", "llama-4-scout", "--prompt-tokens", "100000", "--block-size", "16")
        assert cell(document, "paged")["kv_device_peak_bytes_per_session"] == (12 * 100_000 + 36 * 8192) * 4096

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

    def test_layers_left_over_go_to_the_stages_before_the_last(self, plan_config: Configure):
        """Seven layers on three stages are 2, 3 and 2; the fullest holds 3 * 128 bytes a token."""
        document = plan("--model", str(plan_config(num_hidden_layers=7)), "--prompt-tokens", "16", "--pp", "3")
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
    def test_pinned_buffers_are_rounded_up_to_powers_of_two(self, plan_experiment: Configure):
        """100 cached tokens.

        Keys of a layer are 6,400 bytes, 8,192 pinned, 8 buffers; streamed rows 12,800, 16,384 pinned, 4 buffers.
        """
        document = plan(str(plan_experiment()))
        assert cell(document, "offloaded")["batch_pinned_bytes"] == 8 * 8192
        assert cell(document, "streamed")["batch_pinned_bytes"] == 4 * 16_384
        assert cell(document, "streamed")["kv_host_bytes_per_session"] == 51_200

    def test_a_batch_shares_its_buffers(self, plan_experiment: Configure):
        document = plan(str(plan_experiment()), "--batch-size", "3")
        assert cell(document, "streamed")["batch_pinned_bytes"] == 4 * 65_536
        assert cell(document, "streamed")["h2d_bytes_per_step"] == 3 * 99 * 512

    def test_the_smaller_ledger_decides(self, plan_experiment: Configure):
        """2,000,000 // 38,400 = 52 scratches of 3 layers * 100 * 128 bytes fit the device.

        1 MiB of host are 4 buffers of 262,144 bytes: 20 sessions of 12,800.
        """
        path = plan_experiment({"host": {"memory_bytes": 2**20}})
        admission = cell(plan(str(path)), "streamed")["admission"]
        assert admission == {"device_sessions": 52, "host_sessions": 20, "limit": 20, "limited_by": "host"}
        assert cell(plan(str(path)), "dynamic")["admission"]["host_sessions"] is None

    def test_the_control_groups_limit_and_the_reserve_count(self, plan_experiment: Configure):
        path = plan_experiment({"host": {"memory_bytes": 2**40, "limit_bytes": 2**20, "reserve_bytes": 2**19}})
        document = plan(str(path))
        assert document["host"]["kv_bytes"] == 2**19
        assert cell(document, "streamed")["admission"]["host_sessions"] == 10

    def test_swap_is_no_capacity(self, plan_experiment: Configure):
        assert any("Swap never counts" in each for each in plan(str(plan_experiment()))["assumptions"])

    def test_activations_are_taken_off_the_device(self):
        document = plan(*BASE, "--prompt-tokens", "4096", "--activations-gib", "0.5")
        assert (document["device"]["activations_bytes"], document["admission"]["limit"]) == (GIB // 2, 11)

    def test_estimated_activations_agree_with_a_trace_within_one_percent(self):
        """Llama-3.1-8B, prefilled without data, peaks 15.913 - 15.458 GiB above what is live afterwards."""
        for tokens, traced_gib in ((4096, 15.913 - 15.458), (32_768, 22.599 - 18.958)):
            document = plan("--model", "llama-3.1-8b", "--prompt-tokens", str(tokens))
            assert document["activations_estimate_bytes"] / GIB == pytest.approx(traced_gib, rel=0.01)

    def test_the_mlps_width_is_divided_over_ranks(self):
        """Llama-3.1-70B: 4 * 8,192 and 3 * 28,672 / 8 values of 16 bits for each of 131,072 tokens."""
        arguments = ("--model", "llama-3.1-70b", "--prompt-tokens", "131072", "--vram-gib", "80", "--tp", "8")
        document = plan(*arguments, "--estimate-activations")
        assert document["device"]["activations_bytes"] == 131_072 * (4 * 8192 + 3 * 28_672 // 8) * 2
        assert document["device"]["prefill_tokens"] == 131_072

    def test_the_estimate_is_used_when_asked_for(self):
        arguments = (*BASE, "--prompt-tokens", "4096", "--estimate-activations")
        estimate_bytes = 4096 * (4 * 4096 + 3 * 14_336) * 2
        assert plan(*arguments)["device"]["activations_bytes"] == estimate_bytes
        chunked = plan(*arguments, "--prefill-chunk-size", "512")
        assert chunked["device"]["activations_bytes"] == estimate_bytes // 8
        assert plan(*arguments)["admission"]["limit"] == (6 * GIB - estimate_bytes) // (GIB // 2)

    @pytest.mark.parametrize("model", ["mixtral-8x7b", "falcon-mamba-7b", "pythia-6.9b", "gpt2"])
    def test_no_estimate_for_what_is_not_a_dense_gated_mlp(self, model: str):
        assert plan("--model", model, "--prompt-tokens", "64")["activations_estimate_bytes"] is None

    def test_a_presets_weights_are_in_the_models_dtype(self):
        document = plan("--model", "gpt2", "--prompt-tokens", "64", "--vram-gib", "1", "--dtype", "float32")
        assert document["device"]["weights_bytes"] == 4 * 124_439_808

    def test_a_folder_with_weights_states_them(self, plan_config: Configure, tmp_path: Path):
        plan_config()
        (tmp_path / "model.safetensors").write_bytes(b"\0" * 1000)
        document = plan("--model", str(tmp_path), "--prompt-tokens", "10", "--vram-gib", "1")
        assert document["device"]["weights_bytes"] == 1000


class TestStrategies:
    def test_the_first_ones_admission_is_the_answer(self):
        document = plan(*BASE, "--prompt-tokens", "4096", "--host-gib", "16", "--strategy", "streamed,paged")
        assert [each["strategy"] for each in document["cells"]] == ["streamed", "paged"]
        assert document["admission"]["limited_by"] == "host"

    def test_a_model_without_the_first_strategy_is_answered_with_the_next(self):
        document = plan(
            *("--model", "gemma-3-27b", "--prompt-tokens", "64", "--vram-gib", "80"), "--strategy", "quantized,dynamic"
        )
        assert document["strategy"] == "dynamic"
        assert document["admission"] == cell(document, "dynamic")["admission"]

    def test_what_run_refuses_has_no_card(self):
        """Transformers' offloading and encoder-decoder models."""
        document = plan("--model", "t5-base", "--prompt-tokens", "64")
        assert "cross-attention" in cell(document, "offloaded")["refusal"]

    def test_a_stage_that_a_strategy_cannot_hold_is_named(self):
        document = plan("--model", "gemma-3-27b", "--prompt-tokens", "64", "--pp", "31", "--strategy", "streamed")
        assert document["cells"][0]["refusal"] == "stage 1 of 31: no layer of full attention to stream"

    def test_assumptions_are_the_whole_models(self):
        document = plan("--model", "gemma-3-27b", "--prompt-tokens", "64", "--pp", "2", "--strategy", "streamed")
        assert any("52 layers" in each for each in document["assumptions"])

    @pytest.mark.parametrize(
        ("typed", "label"),
        [
            ("quantized", "quantized-quanto-int4"),
            ("quantized-fp8", "quantized-fp8"),
            ("quantized:backend=hqq,nbits=2,residual_length=64", "quantized-hqq-int2-residuallength64"),
            ("streamed:prefetch_layers=3", "streamed-ahead3"),
            ("paged-fp8", "paged-fp8"),
            ("streamed-ahead4", "streamed-ahead4"),
            ("quantized-hqq-int2-residuallength64", "quantized-hqq-int2-residuallength64"),
            ("paged:kv_cache_dtype=int4,block_tokens=32", "paged-int4"),
        ],
    )
    def test_options_and_labels_are_understood(self, typed: str, label: str):
        document = plan(*BASE, "--prompt-tokens", "4096", "--strategy", typed)
        assert [each["strategy"] for each in document["cells"]] == [label]

    def test_a_strategy_without_a_closed_form_says_why(self):
        document = plan("--model", "gemma-3-27b", "--prompt-tokens", "64")
        assert "sliding" in cell(document, "quantized-fp8")["refusal"]
        assert "sliding" in invoke("--model", "gemma-3-27b", "--prompt-tokens", "64").stdout
