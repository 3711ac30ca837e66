"""How a worker comes back from failures: what it computes, what stays on the device, and what is said of that.

Shapes by hand: the tiny model has 3 layers, 2 kv_heads and head_dim 16. A prompt of 12 tokens in 2 sessions is
2 * 2 * 12 * 16 * 4 = 3,072 bytes of float32 for the keys of a layer, and as many for its values: 18,432 in all.
"""

import gc
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_CONFIG
from factories import DYNAMIC, make_conditions, make_experiment, make_facts, make_workload
from transformers import AutoConfig, AutoModelForCausalLM

from offload_eval.core.experiment import (
    BudgetSpec,
    CpuSpec,
    DynamicSpec,
    MeasurementPlan,
    ModelSpec,
    QuantizedSpec,
    RandomPrompt,
    StaticSpec,
    StrategySpec,
    StreamedSpec,
    Workload,
)
from offload_eval.core.run_spec import Role, RunSpec
from offload_eval.errors import InputError
from offload_eval.execution.cell import measure_cell
from offload_eval.execution.launcher import Died, TimedOut, Worker
from offload_eval.execution.messages import (
    CellResult,
    CellTask,
    CheckDone,
    CheckTask,
    ReferenceDone,
    ReferenceTask,
    WorkerSetup,
)
from offload_eval.execution.prompts import prepare_prompts
from offload_eval.execution.recovery_check import check_generation, check_workload
from offload_eval.execution.reference import ReferenceFiles
from offload_eval.instruments.cpu import CpuDevice
from offload_eval.instruments.leaks import MOST_NAMED, LiveBefore
from offload_eval.instruments.live_storage import LiveStorageTracker
from offload_eval.strategies.dynamic import Dynamic

SLIDING_CONFIG = TINY_CONFIG | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
ON_ANY = (
    DynamicSpec(),
    StaticSpec(),
    StreamedSpec(prefetch_layers=1),
    StreamedSpec(prefetch_layers=1, host_dtype="int8"),
)
ON_FULL = (*ON_ANY, QuantizedSpec(backend="fp8"))
PROMPT, OUTPUT = 40, 9
LOAD_TIMEOUT_S = 120.0
KEPT: list[Any] = []
"""What a planted leak keeps."""


def make_cell(
    strategy: StrategySpec = DYNAMIC, role: Role = "cell", config: object = "unused", **changes: Any
) -> RunSpec:
    """Two sessions of 40 prompt tokens; a cell that is no drill measures memory alone."""
    base = {
        "experiment": "recovery",
        "model": ModelSpec(config=str(config), weights="random", dtype="float32"),
        "model_fingerprint": "0",
        "prompt_fingerprint": "0",
        "device": "cpu",
        "cpu": CpuSpec(compute_threads=1),
        "budget": BudgetSpec(device_bytes=2**30),
        "workload": Workload(batch_size=2, prompt_tokens=PROMPT, output_tokens=OUTPUT, prompt=RandomPrompt()),
        "strategy": strategy,
        "baseline": DynamicSpec(),
        "measurement": MeasurementPlan(trials=1, transfer_trials=0, fidelity=False),
        "role": role,
    }
    return RunSpec(**base | changes)


def save_prompt(folder: Path, spec: RunSpec) -> None:
    shape = (spec.workload.batch_size, spec.workload.prompt_tokens)
    prompt = torch.randint(128, shape, generator=torch.Generator().manual_seed(1))
    ReferenceFiles(folder, spec.reference_key).save_prompt(prompt.numpy())


# In worker processes.


class Bench:
    """A folder with a model's config, and workers that load it."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder = folder
        self._workers: list[Worker] = []
        (folder / "config.json").write_text(json.dumps(config))
        save_prompt(folder, self.spec())

    def spec(self, strategy: StrategySpec = DYNAMIC, role: Role = "cell", **changes: Any) -> RunSpec:
        return make_cell(strategy, role, self.folder, **changes)

    def start(self) -> Worker:
        spec = self.spec()
        setup = WorkerSetup(spec.model, "cpu", spec.cpu, 1, self.folder, self.folder / "log")
        self._workers.append(Worker(setup, LOAD_TIMEOUT_S))
        return self._workers[-1]

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()


StartBench = Callable[[dict[str, Any]], Bench]


@pytest.fixture
def start_bench(tmp_path: Path) -> Iterator[StartBench]:
    benches: list[Bench] = []

    def start(config: dict[str, Any]) -> Bench:
        benches.append(Bench(tmp_path, config))
        return benches[-1]

    yield start
    for bench in benches:
        bench.close()


def ask(worker: Worker, task: Any) -> Any:
    return worker.ask(task, lambda _: None)


def digests(worker: Worker, spec: RunSpec) -> tuple[str, str]:
    done = ask(worker, CheckTask(spec))
    assert isinstance(done, CheckDone), done
    assert done.message == ""
    assert done.tokens_digest is not None
    assert done.logits_digest is not None
    assert done.seconds > 0
    return done.tokens_digest, done.logits_digest


def failing_specs(bench: Bench, strategy: StrategySpec, peak_bytes: int) -> list[tuple[RunSpec, str]]:
    """Two drills, and a cell whose enforced budget is one byte short; each with the phase in which memory runs out."""
    short = BudgetSpec(device_bytes=peak_bytes - 1, enforce=True)
    return [
        (bench.spec(strategy, "oom_prefill"), "prefill"),
        (bench.spec(strategy, "oom_decode"), "decode"),
        (bench.spec(strategy, budget=short), "prefill"),
    ]


@pytest.mark.parametrize(
    ("config", "strategies", "rounds"),
    [(TINY_CONFIG, ON_FULL, 4), (SLIDING_CONFIG, ON_ANY, 2)],
    ids=["full attention", "sliding windows"],
)
def test_one_worker_survives_sixty_times_out_of_memory_bit_by_bit(
    start_bench: StartBench, config: dict[str, Any], strategies: tuple[StrategySpec, ...], rounds: int
) -> None:
    """Five strategies, three failures each, four times over; of the model with windows 24 failures."""
    bench = start_bench(config)
    worker = bench.start()
    judged = bench.spec(ON_ANY[2], measurement=MeasurementPlan(trials=1))
    assert isinstance(ask(worker, ReferenceTask(judged)), ReferenceDone)
    before = {strategy: digests(worker, bench.spec(strategy)) for strategy in strategies}
    whole = {strategy: ask(worker, CellTask(bench.spec(strategy))) for strategy in strategies}
    peaks = {strategy: result.trials[0].prefill.peak_allocated_bytes for strategy, result in whole.items()}
    baselines = {result.conditions.baseline_bytes for result in whole.values()}
    assert len(baselines) == 1
    failures = 0
    for _ in range(rounds):
        for strategy in strategies:
            for spec, phase in failing_specs(bench, strategy, peaks[strategy]):
                result = ask(worker, CellTask(spec))
                assert isinstance(result, CellResult), result
                assert (result.status, result.failure.ledger) == ("oom", "device"), result.failure
                assert (result.failure.stage, result.failure.phase) == ("memory", phase), (spec.label, spec.role)
                recovery = result.conditions.recovery
                assert (recovery.in_new_worker, recovery.leaked_bytes, recovery.leaked) == (False, 0, ())
                assert 0 < recovery.recovery_s < 60
                assert result.conditions.baseline_bytes in baselines
                assert digests(worker, spec) == before[strategy], spec.label
                failures += 1
    assert failures == rounds * len(strategies) * 3
    after = ask(worker, CellTask(judged))
    assert (after.status, after.conditions.recovery) == ("ok", None), after.failure
    assert after.fidelity.bit_equal, "the reference is from before the failures"
    again = ask(worker, CellTask(bench.spec(DYNAMIC)))
    assert again.trials[0].decode == whole[DYNAMIC].trials[0].decode
    assert again.conditions.baseline_bytes in baselines


def test_a_worker_that_is_killed_or_hangs_is_followed_by_one_that_computes_the_same(
    start_bench: StartBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = start_bench(TINY_CONFIG)
    strategy = StreamedSpec(prefetch_layers=1)
    spec = bench.spec(strategy)
    worker = bench.start()
    before = digests(worker, spec)
    died = ask(worker, CellTask(bench.spec(strategy, "killed")))
    assert isinstance(died, Died)
    assert died.exit_code == -9
    assert "SIGKILL" in died.message

    worker = bench.start()
    assert digests(worker, spec) == before
    monkeypatch.setattr(worker, "_timeout_s", 1.0)
    hung = ask(worker, CellTask(bench.spec(strategy, "hung")))
    assert isinstance(hung, TimedOut)
    assert not Path(f"/proc/{worker._process.pid}/fd").exists(), "it was killed, and waited for"

    assert digests(bench.start(), spec) == before


def test_a_check_that_cannot_run_says_why_and_the_worker_goes_on(start_bench: StartBench) -> None:
    bench = start_bench(SLIDING_CONFIG)
    worker = bench.start()
    refused = ask(worker, CheckTask(bench.spec(QuantizedSpec(backend="fp8"))))
    assert (refused.tokens_digest, refused.logits_digest) == (None, None)
    assert "full attention in every layer" in refused.message
    assert refused.seconds >= 0
    elsewhere = bench.spec(workload=make_workload(prompt=RandomPrompt()))
    assert "FileNotFoundError" in ask(worker, CheckTask(elsewhere)).message
    digests(worker, bench.spec())


# In this process.


class Cells:
    """A loaded model on a device of its own, and its cells."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.device = CpuDevice()
        self.folder = folder
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_CONFIG), dtype=torch.float32).eval()
        self.device.adopt((*self.model.parameters(), *self.model.buffers()))
        self.weights_bytes = self.device.live_bytes()
        self.short = Workload(batch_size=2, prompt_tokens=12, output_tokens=3, prompt=RandomPrompt())

    def measure(self, strategy: StrategySpec = DYNAMIC, role: Role = "cell", **changes: Any) -> CellResult:
        spec = make_cell(strategy, role, **{"workload": self.short} | changes)
        save_prompt(self.folder, spec)
        return measure_cell(spec, self.model, self.device, self.folder, make_conditions(), lambda *_: None)

    def check(self, spec: RunSpec) -> CheckDone:
        save_prompt(self.folder, spec)
        return check_generation(spec, self.model, self.device, self.folder)


@contextmanager
def frozen() -> Iterator[None]:
    """As in a worker whose model is loaded."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@pytest.fixture
def cells(tmp_path: Path) -> Iterator[Cells]:
    loaded = Cells(tmp_path)
    with frozen():
        yield loaded


class TestDrills:
    @pytest.mark.parametrize("host_dtype", ["native", "int8"])
    def test_a_host_that_refuses_is_out_of_host_memory(self, cells: Cells, host_dtype: Any) -> None:
        result = cells.measure(StreamedSpec(prefetch_layers=1, host_dtype=host_dtype), "host_refused")
        failure = result.failure
        assert failure is not None
        assert (result.status, failure.type, failure.ledger) == ("oom", "HostCapError", "host")
        assert (failure.stage, failure.phase) == ("memory", "prefill")
        assert "and the cap is 0 B" in failure.message
        assert (cells.device.memory.host.live_bytes, cells.device.live_bytes()) == (0, cells.weights_bytes)
        assert cells.measure(StreamedSpec(prefetch_layers=1)).status == "ok", "the next link allocates"

    @pytest.mark.parametrize("strategy", [DynamicSpec(), StaticSpec(), StreamedSpec(resident_share=1.0)])
    def test_what_allocates_nothing_on_the_host_cannot_be_refused_there(
        self, cells: Cells, strategy: StrategySpec
    ) -> None:
        result = cells.measure(strategy, "host_refused")
        assert result.failure is not None
        assert (result.status, result.conditions.recovery) == ("unsupported", None)
        assert result.failure.message == f"{strategy.label} allocates nothing on the host"

    def test_a_drill_takes_one_memory_pass_and_keeps_no_cap_of_the_budget(self, cells: Cells) -> None:
        seen: list[tuple[str, int, int]] = []
        spec = make_cell(role="oom_decode", workload=cells.short, measurement=MeasurementPlan(trials=5, warmups=2))
        save_prompt(cells.folder, spec)
        result = measure_cell(
            spec, cells.model, cells.device, cells.folder, make_conditions(), lambda *each: seen.append(each)
        )
        assert seen == [("memory", 0, 1)]
        assert result.conditions.cap_bytes is None
        assert "prepare_inputs_for_generation" not in vars(cells.model)
        assert "open_link" not in vars(cells.device)

    def test_two_output_tokens_suffice_to_run_out_of_memory_in_decode(self, cells: Cells) -> None:
        shortest = Workload(batch_size=1, prompt_tokens=1, output_tokens=2, prompt=RandomPrompt())
        for strategy in ON_FULL:
            result = cells.measure(strategy, "oom_decode", workload=shortest)
            assert (result.status, result.failure and result.failure.phase) == ("oom", "decode")


class TestCheck:
    def test_it_is_one_session_of_a_short_prompt_in_the_chunks_that_are_shorter_still(self) -> None:
        long = make_workload(prompt_tokens=100, prefill_chunk_tokens=32)
        assert check_workload(long) == make_workload(batch_size=1, prompt_tokens=32, output_tokens=8)
        chunked = check_workload(make_workload(prompt_tokens=100, prefill_chunk_tokens=31))
        assert chunked.prefill_chunk_tokens == 31
        assert check_workload(make_workload(prompt_tokens=7)).prompt_tokens == 7

    def test_its_digests_follow_the_prompt_and_the_strategy_and_nothing_else(self, cells: Cells) -> None:
        spec = make_cell()
        first, again = cells.check(spec), cells.check(make_cell(role="oom_decode"))
        assert (first.tokens_digest, first.logits_digest) == (again.tokens_digest, again.logits_digest)
        rounded = cells.check(make_cell(StreamedSpec(prefetch_layers=1, host_dtype="int4")))
        assert rounded.logits_digest not in (None, first.logits_digest)
        other = make_cell(workload=Workload(batch_size=2, prompt_tokens=12, output_tokens=3, prompt=RandomPrompt()))
        assert cells.check(other).tokens_digest not in (None, first.tokens_digest)

    def test_it_leaves_nothing_on_the_device(self, cells: Cells) -> None:
        cells.check(make_cell())
        assert cells.device.live_bytes() == cells.weights_bytes


@pytest.fixture
def keep_caches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Any], Any]], None]]:
    """Hands every cache that `dynamic` builds to a holder."""
    build_cache = Dynamic.build_cache

    def plant(hold: Callable[[Any], Any]) -> None:
        def build_and_keep(*args: Any) -> Any:
            cache = build_cache(*args)
            hold(cache)
            return cache

        monkeypatch.setattr(Dynamic, "build_cache", build_and_keep)

    yield plant
    KEPT.clear()


KeepCaches = Callable[[Callable[[Any], Any]], None]


class TestLeaks:
    def test_a_cache_in_a_list_of_a_module_is_named_and_the_next_cell_counts_from_there(
        self, cells: Cells, keep_caches: KeepCaches
    ) -> None:
        keep_caches(KEPT.append)
        result = cells.measure(role="oom_decode")
        assert gc.get_freeze_count() > 0, "frozen again"
        recovery = result.conditions.recovery
        assert recovery is not None
        assert result.conditions.leaked_bytes == recovery.leaked_bytes == 18_432
        *named, rest = recovery.leaked
        assert len(named) == MOST_NAMED
        first = "float32 [2, 2, 12, 16], 3,072 bytes, held by test_recovery.KEPT[0].layers[0].keys"
        assert first in named
        assert rest == "2 more, 6,144 bytes"
        KEPT.clear()
        again = cells.measure(role="oom_prefill").conditions
        assert again.baseline_bytes == cells.weights_bytes

    def test_a_cache_in_an_attribute_of_the_model_is_named(self, cells: Cells, keep_caches: KeepCaches) -> None:
        keep_caches(lambda cache: setattr(cells.model, "kept", cache))
        recovery = cells.measure(role="oom_decode").conditions.recovery
        assert recovery is not None
        assert any("held by LlamaForCausalLM.kept.layers[" in line for line in recovery.leaked)

    def test_what_leaked_before_is_not_named_again(self, cells: Cells, keep_caches: KeepCaches) -> None:
        keep_caches(KEPT.append)
        cells.measure(role="oom_decode")
        recovery = cells.measure(role="oom_decode").conditions.recovery
        assert recovery is not None
        assert recovery.leaked_bytes == 18_432
        assert all("KEPT[1]" in line for line in recovery.leaked[:MOST_NAMED])

    def test_a_frame_that_an_exception_keeps_is_named(self) -> None:
        def fail() -> None:
            held = torch.zeros(7, 3)
            raise ValueError(held.shape)

        device = CpuDevice()
        before = LiveBefore(device)
        with LiveStorageTracker(device.memory):
            try:
                fail()
            except ValueError as error:
                KEPT.append(error)
        assert before.leaked_bytes() == 84
        (line,) = before.leaked()
        assert line.startswith("float32 [7, 3], 84 bytes, held by a frame of ")
        assert line.endswith(".fail as held")
        KEPT.clear()
        assert (before.leaked_bytes(), before.leaked()) == (0, ())

    def test_bytes_that_no_tensor_holds_are_said_to_be_so(self) -> None:
        device = CpuDevice()
        before = LiveBefore(device)
        storage = torch.zeros(7, 3).untyped_storage()
        device.memory.device.add(storage)
        assert before.leaked() == ("84 bytes that no Python tensor holds",)

    def test_a_cell_that_fails_in_the_strategy_has_recovered_too_and_one_that_ends_well_has_not(
        self, cells: Cells, keep_caches: KeepCaches
    ) -> None:
        assert cells.measure().conditions.recovery is None

        def fail(_cache: Any) -> None:
            raise RuntimeError("planted")

        keep_caches(fail)
        result = cells.measure()
        assert result.status == "failed"
        assert result.conditions.recovery is not None
        assert (result.conditions.recovery.leaked_bytes, result.conditions.recovery.in_new_worker) == (0, False)


@pytest.mark.parametrize("stage", ["warmup", "memory", "transfer", "timing"])
def test_no_pass_leaves_a_tensor_or_a_thread_behind_when_it_fails_in_decode(cells: Cells, stage: str) -> None:
    """The ledger sees the memory pass alone; here every tensor of the process is looked at, with copies in flight."""
    at = {"stage": ""}

    def fail_in_decode(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if at["stage"] == stage and inputs[0].shape[1] == 1:
            raise torch.OutOfMemoryError("planted")

    spec = make_cell(
        StreamedSpec(prefetch_layers=1), measurement=MeasurementPlan(trials=1, warmups=1), workload=cells.short
    )
    save_prompt(cells.folder, spec)
    hook = cells.model.model.layers[-1].mlp.register_forward_pre_hook(fail_in_decode)
    threads = threading.active_count()
    result = measure_cell(
        spec, cells.model, cells.device, cells.folder, make_conditions(), lambda name, *_: at.update(stage=name)
    )
    left = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    hook.remove()
    assert result.failure is not None
    assert (result.status, result.failure.stage, result.failure.phase) == ("oom", stage, "decode")
    assert left == []
    assert threading.active_count() == threads
    assert cells.device.memory.host.live_bytes == 0


def test_a_request_longer_than_the_context_is_refused_with_its_length_and_what_is_allowed() -> None:
    long = make_workload(name="long", prompt_tokens=510, output_tokens=3, prompt=RandomPrompt())
    experiment = make_experiment(workloads=(make_workload(prompt=RandomPrompt()), long))
    with pytest.raises(InputError) as refused:
        prepare_prompts(experiment, make_facts(context_tokens=512))
    assert str(refused.value) == (
        "workloads[1] (long): prompt_tokens + output_tokens = 513; allowed: at most 512, the model's context. "
        "Nothing is truncated."
    )
