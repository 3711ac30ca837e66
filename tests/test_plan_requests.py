"""`plan`: populations, requests that are too long, the longest session, grids."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_calls import BASE, BASE_MODEL, CHAT, LONG, Configure, cell, invoke, plan

from offload_eval.bounds.plan_cells import plan_cells, plan_grids
from offload_eval.bounds.plan_request import columns
from offload_eval.cli.option_types import Typed
from offload_eval.cli.plan_inputs import plan_request


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

    def test_nothing_stops_a_state(self):
        document = plan("--model", "falcon-mamba-7b", "--prompt-tokens", "64", "--vram-gib", "80")
        assert (document["longest_sessions"][0]["tokens"], document["longest_sessions"][0]["limited_by"]) == (
            2**24,
            None,
        )

    def test_nothing_fits(self):
        assert self.longest(*BASE[:4], "--weights-gib", "25")["dynamic"] == (0, "device")

    def test_there_is_none_without_a_budget(self):
        assert self.longest("--model", BASE_MODEL) == {}


class TestPopulation:
    """Sessions of 512 bytes a token."""

    def sums(self, plan_experiment: Configure, strategy: str, *groups: Any, **section: Any) -> dict[str, Any]:
        document = plan(str(plan_experiment({"population": list(groups)} | section)))
        (found,) = [each for each in document["population"] if each["strategy"] == strategy]
        assert found["refusal"] is None
        return {each["at"]: each for each in found["sums"]}

    def test_a_paged_engine_sums_at_caps_and_at_a_percentile(self, plan_experiment: Configure):
        sums = self.sums(plan_experiment, "paged", CHAT, LONG, percentile="p95")
        assert sums["caps"]["device_bytes"] == (3 * 30 + 70) * 512
        assert sums["p95"]["device_bytes"] == (3 * 25 + 60) * 512
        assert (sums["caps"]["sessions"], sums["caps"]["padding_device_bytes"]) == (4, 0)
        assert sums["caps"]["mixes"] == 2_000_000 // (160 * 512)
        assert sums["caps"]["fits"]

    def test_a_batch_is_padded_to_its_longest_prompt_and_generation(self, plan_experiment: Configure):
        sums = self.sums(plan_experiment, "dynamic", CHAT, LONG)
        assert sums["caps"]["device_bytes"] == 4 * 70 * 512
        assert sums["caps"]["padding_device_bytes"] == 3 * 40 * 512

    def test_padding_is_counted_in_each_ledger(self, plan_experiment: Configure):
        """Streamed: 40 tokens of 3 rows, in 3 scratch layers of 128 bytes on the device and 4 layers on the host."""
        sums = self.sums(plan_experiment, "streamed", CHAT, LONG)
        assert sums["caps"]["padding_device_bytes"] == 3 * 40 * 3 * 128
        assert sums["caps"]["padding_host_bytes"] == 3 * 40 * 512

    def test_one_group_is_its_own_cell(self, plan_experiment: Configure, plan_config: Configure):
        """Windows that keep the last chunk of a prefill, and scales of fp8, are the same in both."""
        group = {"name": "only", "sessions": 2, "prompt_tokens": 100, "max_new_tokens": 5}
        paging = {"block_tokens": 1, "kv_cache_dtype": "fp8"}
        path = plan_experiment({"population": [group], "prefill_chunk_tokens": 30, "paging": paging})
        plan_config(model_type="mistral", sliding_window=16)
        document = plan(str(path), "--prompt-tokens", "100", "--output-tokens", "5", "--batch-size", "2")
        for each in document["population"]:
            if each["refusal"] is None:
                assert each["sums"][0]["device_bytes"] == cell(document, each["strategy"])["batch_device_bytes"]
        # 15 rows before the last chunk, whose 10 tokens are what 30 leave of 100; 512 bytes a row.
        assert cell(document, "dynamic")["batch_device_bytes"] == 2 * 25 * 512

    def test_a_population_that_no_machine_holds_is_refused(self, plan_experiment: Configure):
        huge = {"sessions": 1_000_000, "beams": 1024, "prompt_tokens": 2000}
        path = plan_experiment({"population": [CHAT | huge], "host": {"memory_bytes": 2**40}})
        result = invoke(str(path), "--model", "opt-66b", "--weights-gib", "1", "--vram-gib", "80")
        assert result.exit_code == 2
        assert "the population needs" in result.output

    def test_a_batch_for_each_group_pads_nothing(self, plan_experiment: Configure):
        """Streamed: buffers of 3 * 30 and of 70 tokens, 128 bytes each: 16,384 pinned for either, on 4 layers."""
        sums = self.sums(plan_experiment, "dynamic", CHAT, LONG, batching="group")
        assert (sums["caps"]["device_bytes"], sums["caps"]["padding_device_bytes"]) == (160 * 512, 0)
        streamed = self.sums(plan_experiment, "streamed", CHAT, LONG, batching="group")
        assert streamed["caps"]["pinned_bytes"] == 4 * (16_384 + 16_384)

    def test_a_shared_prefix_is_held_once_in_whole_blocks(self, plan_experiment: Configure):
        group = CHAT | {"shared_prefix_tokens": 19}
        sums = self.sums(plan_experiment, "paged", group, paging={"block_tokens": 8})
        # 30 cached tokens are 4 blocks of 8; two whole blocks of the prefix are shared by three sessions.
        assert sums["caps"]["device_bytes"] == (3 * 32 - 2 * 16) * 512
        assert sums["caps"]["shared_prefix_saved_bytes"] == 2 * 16 * 512

    def test_a_prefix_is_shared_by_all_mixes(self, plan_experiment: Configure):
        """19 of the prompt's 20 tokens are held once, and each mix adds 3 * (30 - 19) tokens."""
        group = CHAT | {"shared_prefix_tokens": 19}
        mixes = self.sums(plan_experiment, "paged", group)["caps"]["mixes"]
        assert mixes == (2_000_000 - 19 * 512) // (33 * 512)

    def test_the_prompts_last_token_is_each_sessions_own(self, plan_experiment: Configure):
        group = CHAT | {"shared_prefix_tokens": 20, "max_new_tokens": 6}
        assert self.sums(plan_experiment, "paged", group)["caps"]["device_bytes"] == (19 + 3 * 6) * 512

    def test_a_window_that_holds_a_session_shares_it_too(self, plan_experiment: Configure, plan_config: Configure):
        """Sessions of 30 tokens: a window of 30 shares 16 tokens, one of 29 shares none."""
        for window, shared in ((30, 16), (29, 0)):
            path = plan_experiment({"population": [CHAT | {"shared_prefix_tokens": 16}]})
            plan_config(model_type="mistral", sliding_window=window)
            (paged,) = [each for each in plan(str(path))["population"] if each["strategy"] == "paged"]
            assert paged["sums"][0]["shared_prefix_saved_bytes"] == 2 * shared * 512

    def test_transformers_shares_no_prefix(self, plan_experiment: Configure):
        sums = self.sums(plan_experiment, "dynamic", CHAT | {"shared_prefix_tokens": 19})
        assert sums["caps"]["device_bytes"] == 3 * 30 * 512

    def test_beams_share_their_prompt_in_an_engine_and_nothing_in_transformers(self, plan_experiment: Configure):
        group = CHAT | {"beams": 4}
        assert self.sums(plan_experiment, "paged", group)["caps"]["device_bytes"] == 3 * (20 + 4 * 10) * 512
        assert self.sums(plan_experiment, "dynamic", group)["caps"]["device_bytes"] == 3 * 4 * 30 * 512

    def test_streamed_refuses_beams(self, plan_experiment: Configure):
        document = plan(str(plan_experiment({"population": [CHAT | {"beams": 2}]})))
        (streamed,) = [each for each in document["population"] if each["strategy"] == "streamed"]
        assert "beams" in streamed["refusal"]

    def test_the_host_ledger_limits_the_mixes(self, plan_experiment: Configure):
        """Four rows of 70 tokens: 35,840 bytes a layer. 1 MiB of host are 4 buffers of 262,144: 7 mixes."""
        sums = self.sums(plan_experiment, "streamed", CHAT, LONG, host={"memory_bytes": 2**20})
        assert sums["caps"]["pinned_bytes"] == 4 * 65_536
        assert sums["caps"]["mixes"] == 7

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"generated_tokens": {"p95": 12}}, ["population[0].generated_tokens.p95: 12", "max_new_tokens = 11"]),
            ({"generated_tokens": {}}, ["population[0].generated_tokens.p95: required by plan.percentile"]),
            ({"shared_prefix_tokens": 21}, ["population[0].shared_prefix_tokens: 21", "prompt_tokens = 20"]),
            ({"sessions": 0}, ["population[0].sessions: 0", "integer from 1 to 1000000"]),
            ({"generated_tokens": {"p50": 8, "p95": 6}}, ["generated_tokens.p95: 6 is less than p50 = 8"]),
            ({"sessions": 10**12}, ["population[0].sessions", "from 1 to 1000000"]),
            ({"beams": 2000}, ["population[0].beams: 2000", "from 1 to 1024"]),
            ({"name": "a b"}, ["population[0].name"]),
            ({"generated_tokens": {"p42": 3}}, ["generated_tokens.p42: unknown key; allowed: p50, p90, p95, p99"]),
        ],
    )
    def test_a_wrong_group_is_refused(self, plan_experiment: Configure, changes: dict[str, Any], words: list[str]):
        result = invoke(str(plan_experiment({"population": [CHAT | changes], "percentile": "p95"})))
        assert result.exit_code == 2
        assert all(word in result.output for word in words), result.output

    def test_groups_need_names_of_their_own(self, plan_experiment: Configure):
        result = invoke(str(plan_experiment({"population": [CHAT, CHAT]})))
        assert (result.exit_code, "'chat' is used 2 times" in result.output) == (2, True)


class TestLongRequests:
    """The model's context is 4,096 tokens."""

    def long(self, plan_experiment: Configure, *arguments: str, **policy: Any) -> Any:
        return plan(str(plan_experiment({"long_requests": policy})), "--output-tokens", "97", *arguments)

    def test_a_request_that_fills_the_context_is_admitted(self, plan_experiment: Configure):
        document = self.long(plan_experiment, "--prompt-tokens", "3999")
        assert document["long_requests"] == []
        assert document["admission"]["limited_by"] == "device"

    @pytest.mark.parametrize(
        ("action", "outcome", "fitting"),
        [("refuse", "refused", None), ("queue", "queued", None), ("suggest", "suggested", 3810)],
    )
    def test_one_over_the_context_follows_the_policy(
        self, plan_experiment: Configure, action: str, outcome: str, fitting: int | None
    ):
        document = self.long(plan_experiment, "--prompt-tokens", "4000", action=action)
        (request,) = document["long_requests"]
        assert (request["outcome"], request["fitting_prompt_tokens"]) == (outcome, fitting), (
            "3,906 tokens fit, less 96"
        )
        assert (request["request_tokens"], request["limit_tokens"], request["limited_by"]) == (4097, 4096, "context")
        assert document["admission"]["limit"] == 0
        assert document["admission"]["limited_by"] == "context"
        assert document["kv_cache_bytes"]["ideal"] == (4000 + 96) * 512, "never truncated"

    def test_the_cap_goes_before_the_context(self, plan_experiment: Configure):
        document = self.long(plan_experiment, "--prompt-tokens", "100", action="suggest", max_request_tokens=150)
        (request,) = document["long_requests"]
        assert (request["limited_by"], request["fitting_prompt_tokens"]) == ("max_request_tokens", 53)

    def test_the_strategy_that_answers_suggests(self):
        """Mistral 7B has no layer to stream; dynamic holds its 32,768 tokens on 80 GiB."""
        arguments = ("--model", "mistral-7b-v0.1", "--prompt-tokens", "100000", "--vram-gib", "80")
        document = plan(*arguments, "--strategy", "streamed,dynamic", "--long-requests", "suggest")
        (request,) = document["long_requests"]
        assert document["strategy"] == "dynamic"
        assert request["fitting_prompt_tokens"] == 32_768

    def test_positions_that_are_relative_have_no_end(self):
        assert plan("--model", "t5-base", "--prompt-tokens", "9000")["long_requests"] == []

    def test_yarn_stretches_the_context(self, plan_config: Configure):
        path = plan_config(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096})
        assert plan("--model", str(path), "--prompt-tokens", "16384")["long_requests"] == []
        assert plan("--model", str(path), "--prompt-tokens", "16385")["long_requests"] != []

    def test_no_prompt_is_short_enough(self, plan_experiment: Configure):
        document = self.long(plan_experiment, "--prompt-tokens", "100", action="suggest", max_request_tokens=97)
        assert document["long_requests"][0]["fitting_prompt_tokens"] is None

    def test_a_long_group_is_left_out_of_the_population(self, plan_experiment: Configure):
        groups = [CHAT, LONG | {"prompt_tokens": 5000}]
        document = plan(str(plan_experiment({"population": groups})))
        assert [each["name"] for each in document["long_requests"]] == ["long"]
        assert document["population"][0]["sums"][0]["device_bytes"] == 3 * 30 * 512

    def test_the_outcome_is_said_in_words(self, plan_experiment: Configure):
        path = plan_experiment({"long_requests": {"action": "suggest"}})
        result = invoke(str(path), "--prompt-tokens", "5000")
        assert "a prompt of 3,903 tokens would fit" in result.stdout


class TestGrids:
    def request(self, *strategies: str, **options: Any) -> Any:
        counts = {"prompt_tokens": "1,100:5000:700", "output_tokens": "0,1,300", "batch_size": "1,7"}
        budget = {"vram_gib": 24.0, "weights_gib": 12.0, "host_gib": 32.0}
        model = options.pop("model", BASE_MODEL)
        return plan_request(
            Typed(experiment=None, model=model, counts=counts, strategies=strategies, options=budget | options)
        )

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

    def test_a_refusal_costs_no_file(self, tmp_path: Path):
        path = tmp_path / "precious.csv"
        path.write_text("precious")
        assert invoke(*BASE, "--prompt-tokens", "4096", "--pp", "33", "--csv", str(path)).exit_code == 2
        assert path.read_text() == "precious"

    def test_an_experiment_is_not_overwritten(self, plan_experiment: Configure):
        path = plan_experiment()
        result = invoke(str(path), "--csv", str(path))
        assert (result.exit_code, "is the experiment itself" in result.output) == (2, True)
        assert path.read_text().startswith("budget:")

    def test_csv_on_standard_output(self):
        result = invoke(*BASE, "--prompt-tokens", "4096", "--csv", "-", "--strategy", "dynamic")
        (row,) = csv.DictReader(result.stdout.splitlines())
        assert (row["limit"], row["host_sessions"]) == ("12", "")

    def test_a_batch_that_does_not_fit_is_named(self):
        assert "a batch of 13 does not fit" in invoke(*BASE, "--prompt-tokens", "4096", "--batch-size", "13").stdout
