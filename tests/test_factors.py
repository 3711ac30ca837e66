# ruff: noqa: E501 - one row a case
"""Factors: what they expand to, what is refused, and that a cell runs, and is traced, with what its label says."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import WriteExperiment, tiny_workload
from factories import make_experiment, make_facts, make_record, make_spec, make_workload
from tiny_models import tiny_llama
from transformers import AttentionInterface, AutoConfig
from typer.testing import CliRunner

from offload_eval.bounds.strategy_bound import cell_bound
from offload_eval.cli.app import app
from offload_eval.core.experiment import (
    DynamicSpec,
    Experiment,
    FactorsSpec,
    ModelSpec,
    OffloadedStaticSpec,
    QuantizedSpec,
    StaticSpec,
    StrategySpec,
    StreamedSpec,
    Workload,
)
from offload_eval.core.factors import asked_index, expand_workloads
from offload_eval.core.records import RunRecord, record_id
from offload_eval.core.run_spec import RunSpec
from offload_eval.core.shape import LayerGroup
from offload_eval.errors import CellUnsupportedError, InputError
from offload_eval.execution.attention import attention_refusal, using_attention
from offload_eval.execution.cell import _noise_floor_chunk
from offload_eval.store.experiment_file import load_experiment
from offload_eval.store.record_file import read_records

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def labels(**changes: Any) -> list[str]:
    return [workload.label for workload in expand_workloads(make_experiment(**changes))]


class TestExpansion:
    def test_every_workload_at_every_combination_in_order(self):
        unnamed = Workload(prompt_tokens=256, output_tokens=32)
        factors = FactorsSpec(
            batch_size=(1, 8), prefill_chunk_tokens=(None, 64), attn_implementation=("sdpa", "eager")
        )
        # sdpa is the model's own, which has no name of its own.
        assert labels(workloads=(unnamed,), factors=factors) == [
            "b1-p256-o32",
            "b1-p256-o32-eager",
            "b1-p256-o32-chunk64",
            "b1-p256-o32-chunk64-eager",
            "b8-p256-o32",
            "b8-p256-o32-eager",
            "b8-p256-o32-chunk64",
            "b8-p256-o32-chunk64-eager",
        ]

    def test_a_named_workload_keeps_its_name_for_its_own_values(self):
        named = make_workload(name="chat", batch_size=8, prefill_chunk_tokens=16)
        factors = FactorsSpec(batch_size=(1, 8), prefill_chunk_tokens=(None, 16))
        assert labels(workloads=(named,), factors=factors) == ["chat-b1-whole", "chat-b1", "chat-whole", "chat"]

    def test_without_factors_workloads_are_what_is_written(self):
        workloads = (make_workload(), Workload(prompt_tokens=9, output_tokens=2, prefill_chunk_tokens=4))
        assert expand_workloads(make_experiment(workloads=workloads)) == workloads

    def test_the_models_own_attention_is_one_cell_however_it_is_written(self):
        own, unsaid = (make_workload(attn_implementation=name) for name in ("eager", None))
        model = ModelSpec(source="x", attn_implementation="eager")
        expanded = [expand_workloads(make_experiment(workloads=(each,), model=model)) for each in (own, unsaid)]
        assert expanded[0] == expanded[1]

    def test_an_expanded_workload_knows_where_in_the_file_it_comes_from(self):
        workloads = tuple(make_workload(name=name) for name in ("a", "b", "c"))
        experiment = make_experiment(
            workloads=workloads, factors=FactorsSpec(batch_size=(1, 2), attn_implementation=(None, "eager"))
        )
        expanded = expand_workloads(experiment)
        assert [each.name[0] for each in expanded] == [workloads[asked_index(experiment, i)].name for i in range(12)]


MALFORMED_FACTORS = {
    "unknown factor": ("batch: [1]", ["factors.batch: unknown key", "batch_size"]),
    "unknown attention": ("attn_implementation: [sdpa, eagr]", ["factors.attn_implementation[1]: 'eagr'", "flash_attention_2", "did you mean 'eager'"]),
    "batch of zero": ("batch_size: [4, 0]", ["factors.batch_size[1]: 0", "integer from 1 to"]),
    "chunk of zero": ("prefill_chunk_tokens: [0]", ["factors.prefill_chunk_tokens[0]: 0", "integer from 1 to"]),
    "one value, no list": ("batch_size: 4", ["factors.batch_size: 4", "list"]),
    "value given twice": ("batch_size: [4, 1, 4]", ["factors.batch_size[2]: 4 is given twice"]),
    "chunk as long as a prompt": ("prefill_chunk_tokens: [null, 64]", ["factors.prefill_chunk_tokens[1]: 64 has no effect on workloads[0]", "64 tokens", "1 to 63"]),
    "the model's attention twice": ("attn_implementation: [null, sdpa]", ["factors: the label 'b2-p64-o8' comes up 2 times, from workloads[0]"]),
}  # fmt: skip
FILE = """\
name: demo
model: {source: org/model}
budget: {device_bytes: 1000}
workloads: [{batch_size: 2, prompt_tokens: 64, output_tokens: 8}, {name: long, prompt_tokens: 512, output_tokens: 8}]
strategies: [{kind: dynamic}]
"""


class TestRefusals:
    @pytest.mark.parametrize(("factors", "words"), MALFORMED_FACTORS.values(), ids=MALFORMED_FACTORS)
    def test_malformed_factors_are_named_by_file_path_and_value(self, tmp_path: Path, factors: str, words: list[str]):
        path = tmp_path / "demo.yaml"
        path.write_text(f"{FILE}factors: {{{factors}}}\n")
        result = CliRunner().invoke(app, ["run", str(path)])
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: {path}: {words[0]}")
        assert all(word in result.stderr for word in words)

    def test_a_workloads_own_chunk_must_be_one(self, tmp_path: Path):
        path = tmp_path / "demo.yaml"
        path.write_text(FILE.replace("prompt_tokens: 512", "prompt_tokens: 512, prefill_chunk_tokens: 512"))
        with pytest.raises(InputError, match=r"workloads\[1\]\.prefill_chunk_tokens: 512 has no effect.*1 to 511"):
            load_experiment(path)

    def test_two_workloads_that_factors_make_one(self, tmp_path: Path):
        path = tmp_path / "demo.yaml"
        file = FILE.replace("{name: long, prompt_tokens: 512", "{batch_size: 1, prompt_tokens: 64")
        path.write_text(f"{file}factors: {{batch_size: [4]}}\n")
        with pytest.raises(InputError, match=r"'b4-p64-o8' comes up 2 times, from workloads\[0\], workloads\[1\]"):
            load_experiment(path)

    def test_a_name_that_becomes_too_long(self, tmp_path: Path):
        path = tmp_path / "demo.yaml"
        path.write_text(FILE.replace("name: long", f"name: {'n' * 79}") + "factors: {batch_size: [4]}\n")
        with pytest.raises(InputError, match=r"factors: they make the name .* at most 80"):
            load_experiment(path)

    def test_an_expanded_workload_that_is_too_long_is_named_where_it_is_written(
        self, tmp_path: Path, tiny_experiment: WriteExperiment
    ):
        workloads = [tiny_workload("small"), tiny_workload("long", prompt_tokens=510)]
        path = tiny_experiment(tmp_path, workloads=workloads, factors={"batch_size": [1, 2]})
        result = CliRunner().invoke(app, ["run", str(path), "--dry-run"])
        assert result.exit_code == 2
        assert "workloads[1] (long-b1)" in result.stderr


class TestNames:
    """Run ids as they were before workloads had factors and static caches a mode of compilation."""

    @pytest.mark.parametrize(
        ("strategy", "run_id", "trace_id"),
        [
            (DynamicSpec(), "7613dee6a742422a", "4871b74031a23c24"),
            (StaticSpec(), "f3e6965ba6e53688", "1648f43b516b7605"),
            (OffloadedStaticSpec(), "bd26bf053a980d21", "25e1005650bd43f2"),
            (StreamedSpec(prefetch_layers=1), "cec6714d783d4cda", "69887337a121894b"),
            (QuantizedSpec(backend="hqq"), "42ab22481fb9cbad", "843bfc37bb7f0b9b"),
        ],
        ids=lambda value: getattr(value, "label", ""),
    )
    def test_cells_keep_them(self, strategy: StrategySpec, run_id: str, trace_id: str):
        spec = make_spec(strategy)
        assert record_id(spec, "emulated") == run_id
        assert record_id(spec, "traced") == trace_id
        assert spec.reference_key == "small-9554036bfc13d17f"

    def test_a_record_read_again_has_the_name_it_was_stored_under(self, tmp_path: Path):
        """Also one written before there were such fields: they are taken out of the stored line."""
        record = make_record(StaticSpec())
        content = msgspec.to_builtins(record)
        for field in ("prefill_chunk_tokens", "attn_implementation"):
            del content["spec"]["workload"][field]
        del content["spec"]["strategy"]["compile"]
        for stored in (record, content):
            (tmp_path / "records.jsonl").write_bytes(msgspec.json.encode(stored) + b"\n")
            (read,) = read_records(tmp_path / "records.jsonl")
            assert record_id(read.spec, "emulated") == read.run_id == "f3e6965ba6e53688"

    def test_every_factor_makes_another_cell_with_another_reference(self):
        changes = ({}, {"batch_size": 3}, {"prefill_chunk_tokens": 5}, {"attn_implementation": "eager"})
        specs = [make_spec(workload=make_workload(**change)) for change in changes]
        assert len({record_id(spec, "emulated") for spec in specs}) == len({s.reference_key for s in specs}) == 4

    def test_a_mode_of_compilation_is_another_cell_with_the_same_reference(self):
        specs = [make_spec(StaticSpec(compile=mode)) for mode in (None, "default", "reduce-overhead")]
        assert len({record_id(spec, "emulated") for spec in specs}) == 3
        assert len({spec.reference_key for spec in specs}) == 1


@pytest.mark.parametrize(
    ("chunk", "prompt", "planned", "expected"),
    [
        (None, 100, 255, 49),
        (None, 1000, 255, 255),
        (64, 1000, 255, 31),
        (64, 1000, 7, 7),
        (2, 100, 255, 1),
        (1, 100, 255, 2),
    ],
)
def test_a_noise_floor_is_never_taken_with_the_workloads_own_chunks(
    chunk: int | None, prompt: int, planned: int, expected: int
):
    spec = make_spec(workload=make_workload(prompt_tokens=prompt, prefill_chunk_tokens=chunk))
    plan = msgspec.structs.replace(spec.measurement, noise_floor_chunk_tokens=planned)
    assert _noise_floor_chunk(msgspec.structs.replace(spec, measurement=plan)) == expected != chunk


def test_the_bound_of_a_windowed_layer_knows_the_last_chunk():
    """Window 10, prompt 100: at the end of a prefill a layer has 100 rows, in chunks of 30 the last 10 and 9 before.

    The layer: 2 kv heads * (4 + 4) values * 2 bytes = 32 bytes a token.
    """
    group = LayerGroup(count=1, kv_heads=2, key_head_dim=4, value_head_dim=4, cache="sliding", window_tokens=10)
    shape = msgspec.structs.replace(make_facts().shape, layer_groups=(group,))
    model = make_facts(shape=shape)
    peaks = []
    for chunk in (None, 30):
        bound = cell_bound(make_spec(workload=make_workload(output_tokens=2, prefill_chunk_tokens=chunk)), model)
        assert bound is not None
        peaks.append(bound.kv_device_peak_bytes_per_session)
    assert peaks == [100 * 32, 19 * 32]


class TestAttention:
    @pytest.fixture
    @staticmethod
    def model() -> Any:
        return tiny_llama(torch.float32, **SIZES)

    @pytest.fixture
    @staticmethod
    def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Which attention function computes, of those that modules call."""
        from transformers.models.llama import modeling_llama

        seen: list[str] = []
        real = {"sdpa": AttentionInterface()["sdpa"], "eager": modeling_llama.eager_attention_forward}

        def spying(name: str) -> Any:
            def attend(*args: Any, **kwargs: Any) -> Any:
                seen.append(name)
                return real[name](*args, **kwargs)

            return attend

        monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", spying("sdpa"))
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", spying("eager"))
        return seen

    def test_the_model_computes_with_it_and_then_with_its_own_again(self, model: Any, calls: list[str]):
        tokens = torch.ones(1, 3, dtype=torch.long)
        for attention, expected in (("eager", "eager"), (None, "sdpa"), ("eager", "eager")):
            calls.clear()
            with using_attention(model, attention):
                model(tokens)
            assert calls == [expected] * SIZES["num_hidden_layers"]
        calls.clear()
        model(tokens)
        assert set(calls) == {"sdpa"}

    def test_it_is_put_back_after_a_failure(self, model: Any):
        with pytest.raises(ZeroDivisionError), using_attention(model, "eager"):
            _ = 1 / 0
        assert model.config._attn_implementation == "sdpa"

    def test_a_package_that_is_missing_is_the_reason(self, model: Any):
        with (
            pytest.raises(CellUnsupportedError, match="flash_attention_2"),
            using_attention(model, "flash_attention_2"),
        ):
            pytest.fail("the block must not run")
        assert model.config._attn_implementation == "sdpa"

    def test_a_model_that_keeps_its_attention_is_no_other_cell(self, model: Any, monkeypatch: pytest.MonkeyPatch):
        """Transformers warns, and leaves the model as it was."""
        monkeypatch.setattr(type(model), "_can_set_attn_implementation", lambda _: False)
        with pytest.raises(CellUnsupportedError, match="left it at sdpa"), using_attention(model, "eager"):
            pytest.fail("the block must not run")

    def test_it_is_refused_before_a_model_is_loaded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        config = AutoConfig.for_model("llama", **SIZES)
        spec = ModelSpec(config=str(tmp_path), weights="random", dtype="float32")
        assert attention_refusal(spec, config, "cpu", None) is None
        assert attention_refusal(spec, config, "cpu", "eager") is None
        assert "does not run on cpu" in str(attention_refusal(spec, config, "cpu", "flash_attention_2"))
        assert "seem to be installed" in str(attention_refusal(spec, config, "cuda", "flash_attention_2"))
        from transformers import LlamaForCausalLM

        monkeypatch.setattr(LlamaForCausalLM, "_can_set_attn_implementation", lambda _: False)
        assert "an experiment of its own" in str(attention_refusal(spec, config, "cpu", "eager"))


class TestRun:
    """A run over batch, chunks and attention, traces included."""

    @pytest.fixture(scope="class")
    @staticmethod
    def records(tmp_path_factory: pytest.TempPathFactory, tiny_experiment: WriteExperiment) -> list[RunRecord]:
        folder = tmp_path_factory.mktemp("factors")
        experiment = tiny_experiment(
            folder,
            trace=True,
            factors={
                "batch_size": [2, 3],
                "prefill_chunk_tokens": [None, 5],
                "attn_implementation": [None, "eager", "flash_attention_2"],
            },
            strategies=[{"kind": "dynamic"}, {"kind": "streamed"}],
            workloads=[tiny_workload("w")],
        )
        result = CliRunner().invoke(app, ["run", str(experiment), "--out", str(folder / "run"), "--json"])
        assert result.exit_code == 0, result.output
        return list(read_records(folder / "run" / "records.jsonl"))

    def cells(self, records: list[RunRecord]) -> dict[str, tuple[RunRecord, RunRecord]]:
        """Trace and run by label."""
        traces = {record.spec.label: record for record in records if record.evidence == "traced"}
        return {r.spec.label: (traces[r.spec.label], r) for r in records if r.evidence != "traced"}

    def test_there_is_a_cell_for_every_combination(self, records: list[RunRecord]):
        assert len(self.cells(records)) == 2 * 2 * 3 * 2
        assert len({record.run_id for record in records}) == len(records) == 48

    def test_what_the_device_lacks_is_unsupported_with_its_reason(self, records: list[RunRecord]):
        for label, (traced, run) in self.cells(records).items():
            expected = "unsupported" if "flash" in label else "ok"
            assert (traced.status, run.status) == (expected, expected), label
            if run.failure is not None:
                assert run.failure.message.startswith("flash_attention_2 does not run on cpu")

    def test_a_trace_is_its_run_to_the_byte(self, records: list[RunRecord]):
        """8 bytes for each forced token, which a trace is not given."""
        peaks = set()
        for traced, run in self.cells(records).values():
            if traced.trace is None:
                continue
            assert traced.trace.attn_implementation == run.spec.attn_implementation
            workload = run.spec.workload
            given_bytes = 8 * workload.batch_size * workload.output_tokens
            (trial,) = run.trials
            assert trial.prefill.peak_allocated_bytes == traced.trace.prefill.peak_device_bytes + given_bytes
            assert trial.decode.peak_allocated_bytes == traced.trace.decode_peak_device_bytes + given_bytes
            peaks.add((run.spec.workload.label, run.spec.strategy.label, trial.prefill.peak_allocated_bytes))
        # Batch, chunks and attention each change what a prefill holds.
        assert len({peak for _, strategy, peak in peaks if strategy == "dynamic"}) == 8

    def test_chunks_and_attention_change_no_token(self, records: list[RunRecord]):
        """Each workload has a baseline of its own; strategies match it to the bit where they only move bytes."""
        for label, (_, run) in self.cells(records).items():
            if run.fidelity is None:
                continue
            assert run.fidelity.max_kl_nats < 1e-9, label
            assert run.fidelity.top1_agreement_ratio == 1.0
            assert run.fidelity.bit_equal == (run.spec.strategy.kind == "streamed")
            own = run.spec.workload.prefill_chunk_tokens
            if run.spec.is_baseline:
                # 12 tokens: 5 is the odd number below half of them; chunks of 5 are held against chunks of 3.
                assert run.conditions.noise_floor_chunk_tokens == (5 if own is None else 3)

    def test_the_strategy_table_has_columns_for_the_factors(self, records: list[RunRecord]):
        from offload_eval.reporting.tables import strategy_frame

        frame = strategy_frame(records)
        row = frame[(frame["workload"] == "w-b3-chunk5-eager") & (frame["strategy"] == "streamed")].iloc[0]
        assert (row["batch_size"], row["prefill_chunk_tokens"], row["attn_implementation"]) == (3, 5, "eager")
        assert set(frame["attn_implementation"]) == {"sdpa", "eager", "flash_attention_2"}


def test_chunked_tokens_are_those_of_a_whole_prefill(tmp_path: Path, tiny_experiment: WriteExperiment):
    """The model's greedy tokens, recorded by the baseline of each: the same prompt, whole and in chunks."""
    import numpy as np

    experiment = tiny_experiment(
        tmp_path,
        factors={"prefill_chunk_tokens": [None, 1, 5]},
        strategies=[{"kind": "dynamic"}],
        workloads=[tiny_workload("w", output_tokens=9)],
    )
    result = CliRunner().invoke(app, ["run", str(experiment), "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    tokens = [np.load(path) for path in (tmp_path / "run" / "reference").glob("*.tokens.npy")]
    prompts = [np.load(path) for path in (tmp_path / "run" / "reference").glob("*.prompt.npy")]
    assert len(tokens) == len(prompts) == 3
    assert all(np.array_equal(each, tokens[0]) for each in tokens)
    assert all(np.array_equal(each, prompts[0]) for each in prompts)


def test_a_dry_run_lists_the_cells_that_a_run_has(tmp_path: Path, tiny_experiment: WriteExperiment):
    path = tiny_experiment(tmp_path, factors={"batch_size": [1, 2, 4]}, strategies=[{"kind": "dynamic"}])
    result = CliRunner().invoke(app, ["run", str(path), "--dry-run", "--json"])
    cells = json.loads(result.stdout)["cells"]
    assert [cell["spec"]["workload"]["batch_size"] for cell in cells] == [1, 2, 4]
    assert [cell["spec"]["workload"]["name"] for cell in cells] == ["small-b1", "small", "small-b4"]


def test_trace_follows_every_factor_with_a_model_of_its_attention(tmp_path: Path, tiny_experiment: WriteExperiment):
    path = tiny_experiment(
        tmp_path,
        factors={"prefill_chunk_tokens": [None, 4], "attn_implementation": [None, "eager"]},
        strategies=[{"kind": "dynamic"}],
    )
    result = CliRunner().invoke(app, ["trace", str(path), "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    traced = json.loads(result.stdout)["strategies"]
    names = ["small", "small-eager", "small-chunk4", "small-chunk4-eager"]
    assert [each["workload"] for each in traced] == names
    peaks = {each["workload"]: each["prefill"]["peak_device_bytes"] for each in traced}
    assert len(set(peaks.values())) == 4
    assert peaks["small-chunk4"] < peaks["small"]
    typed = CliRunner().invoke(app, ["trace", str(path), "--device", "cpu", "--batch-size", "2", "--json"])
    again = json.loads(typed.stdout)["strategies"]
    assert [each["prefill"]["peak_device_bytes"] for each in again] == list(peaks.values())


def test_plan_takes_batches_alone(tmp_path: Path, tiny_experiment: WriteExperiment):
    factors = {"batch_size": [1, 2], "prefill_chunk_tokens": [None, 4], "attn_implementation": [None, "eager"]}
    path = tiny_experiment(tmp_path, factors=factors, strategies=[{"kind": "dynamic"}])
    result = CliRunner().invoke(app, ["plan", str(path), "--strategy", "dynamic", "--weights-gib", "0.001", "--json"])
    assert result.exit_code == 0, result.output
    assert [cell["workload"] for cell in json.loads(result.stdout)["cells"]] == ["small-b1", "small"]


def test_an_experiment_written_to_a_run_directory_loads_back_equal(tmp_path: Path):
    from offload_eval.store.experiment_file import dump_experiment, load_resolved_experiment

    factors = FactorsSpec(batch_size=(1, 2), prefill_chunk_tokens=(None, 4))
    experiment: Experiment = make_experiment(factors=factors)
    path = tmp_path / "experiment.yaml"
    path.write_text(dump_experiment(experiment))
    assert load_resolved_experiment(path) == experiment
    spec: RunSpec = make_spec(workload=make_workload(prefill_chunk_tokens=7))
    assert msgspec.json.decode(msgspec.json.encode(spec), type=RunSpec) == spec
