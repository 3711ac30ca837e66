"""`trace` on the command line, the search for the largest batch, and the bounds that rest on a trace.

The tiny Llama has 3 layers, hidden size 64, 4 heads, 2 kv heads, head_dim 16 and a vocabulary of 128; in float32:
2 * 128 * 64 weights in embeddings and head, 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) in layers, 7 * 64 in norms.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload_eval.bounds.limit_search import MOST_SESSIONS, largest_that_fits
from offload_eval.cli.app import app

PARAMETERS = 2 * 128 * 64 + 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + 7 * 64
TOKEN_BYTES = 3 * 2 * 2 * 16 * 4


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["trace", *arguments])


@pytest.fixture
def tiny(tiny_config_dir: Path) -> tuple[str, ...]:
    return ("--model", str(tiny_config_dir), "--dtype", "float32", "--prompt-tokens", "40", "--output-tokens", "3")


def trace(*arguments: str) -> Any:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


class TestContract:
    def test_both_phases_of_every_strategy(self, tiny: tuple[str, ...]):
        document = trace(*tiny, "--device", "cpu", "--strategy", "dynamic,streamed,quantized-fp8", "--batch-size", "2")
        assert document["weights_bytes"] == 4 * PARAMETERS + 2 * 4 * 8, (
            "rotary frequencies are two buffers of 8 values"
        )
        assert [each["kind"] for each in document["strategies"]] == ["dynamic", "streamed", "quantized"]
        for each in document["strategies"]:
            for phase in (each["prefill"], each["decode"]):
                assert phase["peak_device_bytes"] >= phase["live_device_bytes"] > document["weights_bytes"]
                assert sum(part["bytes"] for part in phase["contributors"]) == phase["peak_device_bytes"]
                assert phase["live_host_bytes"] >= 0
        dynamic, streamed, _ = document["strategies"]
        assert (dynamic["decode"]["h2d_bytes"], dynamic["decode"]["d2h_bytes"]) == (0, 0)
        assert streamed["decode"]["d2h_bytes"] == 2 * TOKEN_BYTES, "one token of each of two sessions"
        assert streamed["decode"]["live_host_bytes"] >= 2 * 42 * TOKEN_BYTES

    def test_offloaded_moves_every_layer_whole_both_ways(self, tiny: tuple[str, ...]):
        """42 tokens are cached at the last step; the first layer comes again, one token longer, for the next."""
        (offloaded,) = trace(*tiny, "--strategy", "offloaded")["strategies"]
        assert offloaded["decode"]["d2h_bytes"] == 42 * TOKEN_BYTES
        assert offloaded["decode"]["h2d_bytes"] == 41 * TOKEN_BYTES + TOKEN_BYTES // 3

    def test_what_cannot_be_traced_says_why_and_the_others_are_traced(self, tmp_path: Path):
        path = tmp_path / "config.json"
        fields = {"model_type": "gemma2", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64}
        path.write_text(json.dumps(fields | heads | {"sliding_window": 8}))
        document = trace(
            "--model", str(path), "--attn", "eager", "--prompt-tokens", "20", "--strategy", "dynamic,quantized-fp8"
        )
        dynamic, quantized = document["strategies"]
        assert dynamic["refusal"] is None
        assert "full attention" in quantized["refusal"]
        assert quantized["prefill"] is None

    def test_the_ratio_of_bytes_moved(self, tiny: tuple[str, ...], tiny_config_dir: Path, tmp_path: Path):
        """Streamed fetches 41 tokens and writes one; offloaded moves all both ways. Six layers, three slots."""
        fields = json.loads((tiny_config_dir / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 6, "layer_types": None}))
        arguments = ("--model", str(tmp_path), *tiny[2:])
        offloaded, streamed = trace(*arguments, "--strategy", "offloaded,streamed")["strategies"]
        assert offloaded["moved_ratio"] == 1
        moved = [each["decode"]["h2d_bytes"] + each["decode"]["d2h_bytes"] for each in (streamed, offloaded)]
        assert streamed["moved_ratio"] == pytest.approx(moved[0] / moved[1])
        assert 0.4 < streamed["moved_ratio"] < 0.6

    def test_auto_takes_the_layers_that_a_budget_leaves(self, tiny: tuple[str, ...], tmp_path: Path):
        """Of the peak without and with all layers resident, a budget in between lets some of them be, and no more."""
        fields = json.loads((Path(tiny[1]) / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 6, "layer_types": None}))
        arguments = ("--model", str(tmp_path), *tiny[2:], "--batch-size", "64")

        def peak_bytes(share: float) -> int:
            (cell,) = trace(*arguments, "--strategy", f"streamed:prefetch_layers=1,resident_share={share}")[
                "strategies"
            ]
            return max(cell["prefill"]["peak_device_bytes"], cell["decode"]["peak_device_bytes"])

        budget_bytes = (peak_bytes(2 / 6) + peak_bytes(3 / 6)) // 2
        options = ("--vram-gib", str(budget_bytes / 2**30), "--runtime-gib", "0", "--reserve-gib", "0")
        (cell,) = trace(*arguments, *options, "--strategy", "streamed:prefetch_layers=1,resident_share=auto")[
            "strategies"
        ]
        assert cell["strategy"] == "streamed-ahead1-residentauto"
        assert max(cell["prefill"]["peak_device_bytes"], cell["decode"]["peak_device_bytes"]) == peak_bytes(2 / 6)
        assert cell["admission"]["limit"] > 64, "the most sessions fit where none is resident"

    def test_auto_needs_a_budget(self, tiny: tuple[str, ...]):
        result = invoke(*tiny, "--strategy", "streamed:resident_share=auto")
        assert result.exit_code == 2
        assert "resident_share: 'auto'" in result.stderr
        assert "--vram-gib" in result.stderr

    def test_decodes_peak_is_that_of_the_flush(self, tiny: tuple[str, ...]):
        """130 steps: the 128th quantizes everything anew, and the last does not."""
        arguments = (*tiny[:4], "--prompt-tokens", "40", "--output-tokens", "131", "--device", "cpu")
        (quantized,) = trace(*arguments, "--strategy", "quantized:q_group_size=32")["strategies"]
        peaks = {step["step"]: step["peak_device_bytes"] for step in quantized["steps"]}
        assert quantized["decode"]["peak_device_bytes"] == max(peaks.values()) == peaks[128] > peaks[130]
        assert quantized["decode"]["peak_step"] == 128

    def test_a_batch_that_cannot_be_traced_costs_no_answer(self):
        arguments = ("--model", "gpt2", "--prompt-tokens", "20", "--batch-size", "16", "--vram-gib", "1")
        strategies = "dynamic,quantized:axis_key=-1,axis_value=-1"
        dynamic, quantized = trace(*arguments, "--strategy", strategies)["strategies"]
        assert dynamic["admission"]["limit"] > 0
        assert (quantized["prefill"] is None) is False
        assert "do not divide" in quantized["admission_refusal"]

    def test_a_model_without_sdpa_is_traced_with_eager_attention(self):
        document = trace("--model", "gpt-neo-1.3b", "--prompt-tokens", "16", "--strategy", "dynamic")
        assert document["attn_implementation"] == "eager"
        assert "no sdpa attention" in document["notes"][0]

    def test_an_attention_that_the_model_lacks_costs_its_own_cells_alone(self, tmp_path: Path):
        """Bloom has eager attention and no other; 2 layers of hidden size 32 in bfloat16 cache 256 bytes a token."""
        fields = {"model_type": "bloom", "n_layer": 2, "hidden_size": 32, "n_head": 2, "vocab_size": 64}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        path = tmp_path / "x.yaml"
        path.write_text(
            f"model: {{config: {tmp_path}, weights: random, attn_implementation: eager}}\n"
            "workloads: [{prompt_tokens: 16, output_tokens: 3}]\n"
            "factors: {attn_implementation: [sdpa, null]}\nstrategies: [{kind: dynamic}, {kind: static}]\n"
        )
        lacking, static, own, _ = trace(str(path), "--device", "cpu")["strategies"]
        assert [each["workload"] for each in (lacking, own)] == ["b1-p16-o3-sdpa", "b1-p16-o3"]
        assert lacking["refusal"] == static["refusal"]
        assert lacking["refusal"].startswith("sdpa: ")
        assert lacking["prefill"] is None
        assert own["refusal"] is None
        assert own["prefill"]["kv_device_bytes"] == 16 * 256

    def test_a_vision_language_model_is_given_text_alone(self, tmp_path: Path):
        """Qwen3-VL is no causal language model; 2 layers of 2 kv heads and head_dim 16 cache 256 bytes a token."""
        sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
        text = sizes | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "model_type": "qwen3_vl_text"}
        vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
        config = {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision}
        (tmp_path / "config.json").write_text(json.dumps(config))
        document = trace("--model", str(tmp_path), "--prompt-tokens", "16", "--strategy", "dynamic,streamed")
        assert "Text alone" in document["notes"][0]
        assert document["strategies"][1]["decode"]["d2h_bytes"] == 256

    def test_a_population_is_traced_at_its_own_lengths(self, tmp_path: Path):
        path = tmp_path / "mix.yaml"
        group = "{name: chat, sessions: 2, prompt_tokens: 30, max_new_tokens: 5}"
        path.write_text(
            f"model: {{source: gpt2}}\nplan: {{population: [{group}], partition: {{tensor_parallel: 2}}}}\n"
        )
        document = trace(str(path), "--strategy", "dynamic")
        assert document["strategies"][0]["steps"][-1]["step"] == 4
        assert "plan.partition is not applied" in document["notes"][0]

    def test_code_that_fails_without_data_costs_no_other_answer(self):
        arguments = ("--model", "minimax-text-01", "--prompt-tokens", "16", "--strategy", "dynamic,static")
        assert all("cannot be traced" in each["refusal"] for each in trace(*arguments)["strategies"])

    def test_an_experiment_file(self, tiny_experiment: Any, tmp_path: Path):
        document = trace(str(tiny_experiment(tmp_path)), "--device", "cpu")
        assert [each["workload"] for each in document["strategies"]] == ["small"] * 3
        assert document["available_bytes"] == 8 * 2**20
        assert document["strategies"][0]["admission"]["limit"] >= 1


class TestText:
    def test_peaks_contributors_and_chart(self, tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("COLUMNS", "80")
        long_label = "quantized:nbits=4,residual_length=256,q_group_size=32"
        arguments = (*tiny, "--hardware", "h100-sxm", "--vram-gib", "0.01")
        text = invoke(*arguments, "--strategy", f"{long_label},dynamic,offloaded,offloaded_static").stdout
        for words in (
            "a decode step",
            "the largest at the peak of prefill",
            "weights",
            "|",
            "TTFT",
            "bounds, not predictions",
        ):
            assert words in text
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= 80


class TestAdmission:
    @pytest.mark.parametrize("available", [0, 10, 11, 999, 1000, 1001, 10**6, 10**9])
    @pytest.mark.parametrize("start", [1, 7, 64])
    def test_the_largest_count_of_a_bent_line(self, available: int, start: int):
        """Flat at first, then steep: as a peak that an activation sets until the cache does."""
        asked: list[int] = []

        def peak(count: int) -> int:
            asked.append(count)
            return max(10 + count, 20 * count - 300)

        found = largest_that_fits(peak, available, start)
        expected = max(n for n in range(MOST_SESSIONS + 1) if n == 0 or max(10 + n, 20 * n - 300) <= available)
        assert found == expected
        assert len(asked) == len(set(asked)) <= 8

    def test_the_limit_fits_and_the_next_batch_does_not(self, tiny: tuple[str, ...]):
        arguments = (*tiny, "--strategy", "dynamic", "--device", "cpu", "--vram-gib", "0.002")
        (dynamic,) = trace(*arguments)["strategies"]
        admission = dynamic["admission"]
        available_bytes = round(0.002 * 2**30)
        assert admission["available_bytes"] == available_bytes
        limit = admission["limit"]
        assert limit == min(admission["prefill_sessions"], admission["decode_sessions"]) > 1
        for batch, fits in ((limit, True), (limit + 1, False)):
            (at,) = trace(*arguments, "--batch-size", str(batch))["strategies"]
            peak_bytes = max(at["prefill"]["peak_device_bytes"], at["decode"]["peak_device_bytes"])
            assert (peak_bytes <= available_bytes) is fits


class TestLatency:
    def test_bounds_come_from_the_trace_and_the_profile(self, tmp_path: Path, tiny: tuple[str, ...]):
        """Two FLOPs for each weight but embedding and norms, and 4 * 4 heads * 42 * 16 * 3 layers of attention."""
        card = tmp_path / "card.yaml"
        figure = "{value: %s, source: this test, date: 2026-11-29}"
        card.write_text(
            f"name: card\nmemory_bytes_per_s: {figure % '1.0e9'}\npeak_flops_per_s: {{float32: {figure % '1.0e9'}}}\n"
        )
        (dynamic,) = trace(*tiny, "--strategy", "dynamic", "--device", "cpu", "--hardware", str(card))["strategies"]
        tpot = dynamic["latency"]["tpot"]
        products = PARAMETERS - 128 * 64 - 7 * 64
        assert tpot["compute_s"] == pytest.approx((2 * products + 4 * 4 * 42 * 16 * 3) / 1e9)
        cache_bytes = 42 * TOKEN_BYTES
        read_bytes = 4 * (PARAMETERS - 128 * 64) + 4 * 64 + 4 * 8
        assert tpot["ideal"]["seconds"] == pytest.approx((read_bytes + cache_bytes) / 1e9)
        assert tpot["ideal"]["limited_by"] == "memory"
        assert dynamic["latency"]["evidence"] == "traced"


SDPA = ["--model", "gpt2", "--prompt-tokens", "4"]
BAD_ARGUMENTS = {
    "nothing": ([], "give an experiment file, or --model and --prompt-tokens"),
    "no lengths": (["--model", "gpt2"], "--model and --prompt-tokens"),
    "nothing for a model": (["--model", " ", "--prompt-tokens", "4"], "--model: ''"),
    "one output token": (["--model", "gpt2", "--prompt-tokens", "4", "--output-tokens", "1"], "allowed: at least 2"),
    "too long": (["--model", "gpt2", "--prompt-tokens", "1023", "--output-tokens", "2"], "at most 1,024"),
    "an engine": (["--model", "gpt2", "--prompt-tokens", "4", "--strategy", "paged"], "cannot be traced"),
    "another device": (["--model", "gpt2", "--prompt-tokens", "4", "--device", "tpu"], "allowed: cuda, cpu"),
    "another card": (["--model", "gpt2", "--prompt-tokens", "4", "--hardware", "h1000"], "h1000"),
    "another dtype": (["--model", "gpt2", "--prompt-tokens", "4", "--dtype", "fp8"], "--dtype fp8"),
    "another attention": ([*SDPA, "--attn", "magic"], "--attn: 'magic'"),
    "a reserve of nothing": ([*SDPA, "--reserve-gib", "2"], "needs --vram-gib"),
    "a card without the peak": ([*SDPA, "--hardware", "rtx-3090"], "peak_flops_per_s.bfloat16 is needed"),
    "too many": (["--model", "gpt2", "--prompt-tokens", "1:900:1"], "at most 500"),
    "override without a file": (["--model", "gpt2", "--prompt-tokens", "4", "--set", "a=1"], "needs an experiment"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments_end_with_2_and_one_line(arguments: list[str], words: str):
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split()), result.output
