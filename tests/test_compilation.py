"""Compiled static caches: really compiled, afresh for each cell, and with their first use in no trial."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import WriteExperiment, tiny_workload
from factories import make_conditions, make_fidelity, make_record, make_spec, make_traced, make_trials
from tiny_models import tiny_llama
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig
from typer.testing import CliRunner

from offload_eval.analysis.findings import find
from offload_eval.cli.app import app
from offload_eval.core.experiment import CompileMode, OffloadedStaticSpec, StaticSpec, StrategySpec, Workload
from offload_eval.core.plan import PagingSpec
from offload_eval.core.records import RunRecord
from offload_eval.execution.compilation import compiling_afresh, count_compilations, missing_compiler
from offload_eval.generation import TokenClock, generate
from offload_eval.reporting.warmup_table import first_use_s, render_warmups
from offload_eval.store.record_file import read_records
from offload_eval.store.strategy_text import parse_strategies
from offload_eval.strategies import compilation
from offload_eval.strategies.compilation import compile_refusal
from offload_eval.strategies.offloaded_static import OffloadedStatic
from offload_eval.strategies.registry import load_strategy

MODES: tuple[CompileMode, ...] = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
PROMPT, OUTPUT = 6, 5
COMPILED = StaticSpec(compile="default")
COMPILES_HERE = compile_refusal("default", "cpu", "llama") is None
needs_compiler = pytest.mark.skipif(not COMPILES_HERE, reason="torch.compile finds no C++ compiler here")


def tiny() -> Any:
    return tiny_llama(
        torch.float32,
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
    )


def run(model: Any, mode: CompileMode | None) -> torch.Tensor:
    cache = load_strategy(StaticSpec()).build_cache(model.config, None, PROMPT + OUTPUT - 1)  # type: ignore[arg-type]
    prompt_BN = torch.arange(2 * PROMPT).view(2, PROMPT)
    return generate(model, prompt_BN, cache, OUTPUT, TokenClock(), compile_mode=mode)


def compiled_regions(model: Any, mode: CompileMode | None) -> int:
    """Calls of compiled code in one generate(), as torch's profiler sees them."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run(model, mode)
    return sum(event.name.startswith("Torch-Compiled Region") for event in profiled.events())


@needs_compiler
def test_every_decode_step_is_compiled_code_that_no_other_cell_finds():
    model = tiny()
    expected = run(model, None)
    with compiling_afresh(model, "default"):
        assert torch.equal(run(model, "default"), expected)
        assert count_compilations() == 1
        assert compiled_regions(model, "default") == OUTPUT - 1
        assert count_compilations() == 1
        assert compiled_regions(model, None) == 0
    assert not hasattr(model, "_compiled_call")
    with compiling_afresh(model, "default"):
        assert count_compilations() == 0
        run(model, "default")
        assert count_compilations() == 1


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
def test_buffers_for_cuda_graphs_lie_still_from_the_start(mode: CompileMode | None, monkeypatch: pytest.MonkeyPatch):
    """A chunked prefill is compiled, and compiled code cannot mark what it allocates: generate() does it before that.

    The compiler itself is left out here. Chunks change no token.
    """
    model = tiny()
    prompt_BN = torch.arange(2 * PROMPT).view(2, PROMPT)
    cache = load_strategy(StaticSpec()).build_cache(model.config, None, PROMPT + OUTPUT - 1)  # type: ignore[arg-type]
    was_initialized = []
    original = model.generate

    def generate_as_it_is(*args: Any, generation_config: Any, **kwargs: Any) -> Any:
        was_initialized.append(cache.is_initialized)
        generation_config.disable_compile = True
        return original(*args, generation_config=generation_config, **kwargs)

    monkeypatch.setattr(model, "generate", generate_as_it_is)
    tokens_BN = generate(model, prompt_BN, cache, OUTPUT, TokenClock(), prefill_chunk_tokens=4, compile_mode=mode)
    assert was_initialized == [mode == "reduce-overhead"]
    assert torch.equal(tokens_BN, run(tiny(), None))
    assert hasattr(cache.layers[0].keys, "_dynamo_static_input_type")


def test_what_is_not_compiled_leaves_the_compiler_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.compiler, "reset", lambda: pytest.fail("nothing is compiled"))
    with compiling_afresh(tiny(), None):
        pass


class TestRefusals:
    def test_cuda_graphs_need_cuda(self):
        refused = [mode for mode in MODES if "CUDA graphs" in str(compile_refusal(mode, "cpu", "llama"))]
        assert refused == ["reduce-overhead", "max-autotune"]

    def test_nothing_is_needed_where_nothing_is_compiled(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(shutil, "which", lambda _: None)
        assert compile_refusal(None, "cpu", "llama") is None

    def test_a_missing_compiler_is_named_with_its_remedy(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(shutil, "which", lambda _: None)
        assert "apt-get install g++" in str(compile_refusal("default", "cpu", "llama"))
        monkeypatch.setattr(compilation, "find_spec", lambda _: object())
        assert "apt-get install gcc" in str(compile_refusal("reduce-overhead", "cuda", "llama"))
        monkeypatch.setattr(compilation, "find_spec", lambda _: None)
        assert "pip install triton" in str(compile_refusal("reduce-overhead", "cuda", "llama"))

    def test_models_that_transformers_never_compiles(self):
        assert "never compiles llama4_text" in str(compile_refusal("default", "cpu", "llama4_text"))

    def test_static_offloading_is_not_compiled(self):
        workload = Workload(prompt_tokens=4, output_tokens=2)
        strategy = OffloadedStatic(OffloadedStaticSpec(compile="default"))
        config = AutoConfig.for_model("llama")
        assert "a compiled graph" in str(strategy.refusal("cuda", config, workload))
        assert OffloadedStatic(OffloadedStaticSpec()).refusal("cuda", config, workload) is None

    def test_a_compiler_that_turns_out_to_be_missing_is_found_in_what_torch_raises(self):
        from torch._inductor.exc import InductorError, InvalidCxxCompiler

        error = InductorError(InvalidCxxCompiler("no-such-compiler"), None)
        assert "no-such-compiler" in str(missing_compiler(error))
        assert missing_compiler(RuntimeError("shapes do not match")) is None


@pytest.mark.parametrize("spec", [StaticSpec, OffloadedStaticSpec])
@pytest.mark.parametrize("mode", [None, *MODES])
def test_labels_say_the_mode_and_are_understood_where_strategies_are_typed(
    spec: type[StaticSpec] | type[OffloadedStaticSpec], mode: CompileMode | None
):
    strategy: StrategySpec = spec(compile=mode)
    suffix = "" if mode is None else f"-compile-{mode}"
    assert strategy.label == strategy.kind + suffix
    option = strategy.kind if mode is None else f"{strategy.kind}:compile={mode}"
    for typed in (strategy.label, option):
        assert parse_strategies([typed], PagingSpec()) == [strategy]


@needs_compiler
class TestRun:
    """A compiled cell and its like that is not, on this CPU."""

    @pytest.fixture(scope="class")
    @staticmethod
    def records(tmp_path_factory: pytest.TempPathFactory, tiny_experiment: WriteExperiment) -> list[RunRecord]:
        folder = tmp_path_factory.mktemp("compiled")
        static = {"kind": "static"}
        experiment = tiny_experiment(
            folder,
            trace=True,
            strategies=[
                {"kind": "dynamic"},
                static,
                static | {"compile": "default"},
                static | {"compile": "reduce-overhead"},
            ],
            workloads=[tiny_workload("w")],
            measurement={"trials": 3, "warmups": 0},
        )
        result = CliRunner().invoke(app, ["run", str(experiment), "--out", str(folder / "run"), "--json"])
        assert result.exit_code == 0, result.output
        assert len(json.loads(result.stdout)["cells"]) == 4
        return list(read_records(folder / "run" / "records.jsonl"))

    def cell(self, records: list[RunRecord], mode: CompileMode | None, *, traced: bool = False) -> RunRecord:
        wanted = (record for record in records if record.spec.strategy == StaticSpec(compile=mode))
        return next(record for record in wanted if (record.evidence == "traced") == traced)

    def test_the_first_use_is_a_warm_up_and_in_no_trial(self, records: list[RunRecord]):
        """Compiling takes seconds; a pass of 5 tokens takes milliseconds."""
        compiled = self.cell(records, "default")
        assert compiled.status == "ok"
        (first_s,) = compiled.conditions.warmups_s
        assert first_s == first_use_s(compiled) > 1
        assert compiled.conditions.num_compilations == 1
        for trial in compiled.trials:
            assert trial.num_compilations == 0
            assert trial.e2e_latency_s is not None
            assert trial.e2e_latency_s < first_s / 10
        assert first_s < (compiled.conditions.generate_s or 0)

    def test_what_is_not_compiled_counts_nothing(self, records: list[RunRecord]):
        plain = self.cell(records, None)
        assert plain.conditions.warmups_s == ()
        assert plain.conditions.num_compilations is None
        assert {trial.num_compilations for trial in plain.trials} == {None}
        assert first_use_s(plain) is None

    def test_its_output_is_the_baselines_up_to_rounding(self, records: list[RunRecord]):
        fidelity = self.cell(records, "default").fidelity
        assert fidelity is not None
        assert fidelity.max_kl_nats < 1e-9
        assert fidelity.top1_agreement_ratio == 1.0

    def test_it_leaves_nothing_behind(self, records: list[RunRecord]):
        assert self.cell(records, "default").conditions.leaked_bytes == 0

    def test_graphs_are_unsupported_with_the_reason(self, records: list[RunRecord]):
        refused = self.cell(records, "reduce-overhead")
        assert refused.status == "unsupported"
        assert refused.failure is not None
        assert "CUDA graphs" in refused.failure.message

    def test_it_is_traced_as_the_code_before_it_and_says_so(self, records: list[RunRecord]):
        traced, plain = (self.cell(records, mode, traced=True).trace for mode in ("default", None))
        assert traced is not None
        assert plain is not None
        assert traced.strategy == COMPILED
        assert traced.prefill == plain.prefill
        assert set(traced.assumptions) - set(plain.assumptions) == {
            text for text in traced.assumptions if "before it is compiled" in text
        }
        (trial, *_) = self.cell(records, "default").trials
        given_bytes = 8 * 2 * 5  # forced tokens
        assert trial.decode.peak_allocated_bytes == traced.decode_peak_device_bytes + given_bytes

    def test_the_report_says_whose_memory_that_is(self, records: list[RunRecord]):
        (note,) = [finding for finding in find(records) if finding.code == "memory_not_compiled"]
        assert note.run_ids == (self.cell(records, "default").run_id,)
        assert not [finding for finding in find(records) if finding.code == "compiled_while_timed"]


@needs_compiler
def test_a_planned_warm_up_is_the_compiled_ones_first(tmp_path: Path, tiny_experiment: WriteExperiment):
    """Two are planned: two are taken, the first of which compiles; fidelity has none of them."""
    experiment = tiny_experiment(
        tmp_path,
        strategies=[{"kind": "dynamic"}, {"kind": "static", "compile": "max-autotune-no-cudagraphs"}],
        measurement={"trials": 1, "warmups": 2},
    )
    result = CliRunner().invoke(app, ["run", str(experiment), "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    dynamic, compiled = read_records(tmp_path / "run" / "records.jsonl")
    assert [len(each.conditions.warmups_s) for each in (dynamic, compiled)] == [2, 2]
    first_s, second_s = compiled.conditions.warmups_s
    assert second_s < first_s / 10
    assert compiled.fidelity is not None
    assert "static-compile-max-autotune-no-cudagraphs" in (tmp_path / "run" / "report.md").read_text()


def compiled_record(**changes: Any) -> RunRecord:
    trials = tuple(msgspec.structs.replace(trial, num_compilations=0) for trial in make_trials())
    conditions = make_conditions(warmups_s=(41.25, 1.5), num_compilations=2)
    base = {"spec": make_spec(COMPILED), "trials": trials, "conditions": conditions, "fidelity": make_fidelity(0.002)}
    return make_record(**base | changes)


class TestJudgement:
    def test_a_compilation_in_a_trial_is_an_error_that_names_it(self):
        clean = compiled_record()
        assert "compiled_while_timed" not in {finding.code for finding in find([clean])}
        first, second, third = clean.trials
        late = msgspec.structs.replace(second, num_compilations=3)
        (finding,) = [
            each for each in find([compiled_record(trials=(first, late, third))]) if each.severity == "error"
        ]
        assert finding.code == "compiled_while_timed"
        assert "3 graphs during the timing pass of trial 2" in finding.message

    def test_compiled_code_may_round_otherwise_and_plain_copies_may_not(self):
        """A KL of 0.002 over a floor of 0.001: an alarm for a static cache alone."""
        plain = make_record(StaticSpec(), fidelity=make_fidelity(0.002))
        codes = [{f.code for f in find([make_record(), each])} for each in (plain, compiled_record())]
        assert ["lossless_differs" in found for found in codes] == [True, False]

    def test_the_first_use_is_shown_beside_what_comes_after_it(self):
        """41.25 s, then 1.5 s; a trial takes 0.5 + 156 * 0.010 = 2.06 s."""
        row = render_warmups([make_record(), compiled_record(), make_traced(COMPILED)]).splitlines()[-1]
        assert [cell.strip() for cell in row.strip("|").split("|")] == [
            "small / static-compile-default", "41.25 s", "1.50 s", "2.06 s", "2", "0"
        ]  # fmt: skip
        assert render_warmups([make_record()]) == ""
