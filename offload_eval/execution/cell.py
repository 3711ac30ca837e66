"""Measures one cell in a worker: which passes, in which order, and what becomes of a failure."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from offload_eval.core.experiment import compile_mode
from offload_eval.core.records import Conditions, Failure, FidelitySample, RecoverySample, Status, TrialSample
from offload_eval.core.run_spec import DRILLS, RunSpec
from offload_eval.errors import CellUnsupportedError
from offload_eval.execution import passes
from offload_eval.execution.attention import using_attention
from offload_eval.execution.compilation import compiling_afresh, missing_compiler
from offload_eval.execution.drills import bring_about, drill_of
from offload_eval.execution.exhaustion import exhausted_ledger
from offload_eval.execution.messages import CellResult
from offload_eval.execution.passes import CellRun
from offload_eval.execution.reference import ReferenceFiles
from offload_eval.instruments.device import Device
from offload_eval.instruments.leaks import LiveBefore
from offload_eval.strategies.registry import load_strategy

ReportPass = Callable[[str, int, int], None]
"""Told the name of the pass that starts, how many are done and how many there are."""
_Step = tuple[str, Callable[[], None]]
_MeasuringPass = Callable[[CellRun, TrialSample], TrialSample]


@dataclass
class _Progress:
    """Results so far: what is kept when a later pass fails."""

    trials: list[TrialSample]
    fidelity: FidelitySample | None = None
    stage: str = "prepare"
    run: CellRun | None = None


def record_reference(spec: RunSpec, model: Any, device: Device, reference_dir: Path) -> float:
    """Writes the baseline's tokens and logits of a workload. Not capped: it is no measurement.

    Returns:
        Time inside generate().
    """
    with as_asked(spec, model):
        run = _prepare(spec, model, device, reference_dir)
        passes.record_reference(run)
    return run.generate_s


def measure_cell(
    spec: RunSpec, model: Any, device: Device, reference_dir: Path, conditions: Conditions, report: ReportPass
) -> CellResult:
    """Runs every pass of a cell. Never raises for what the cell did: a failure is a result.

    Args:
        spec: The cell.
        model: The loaded model, already adopted by the device.
        device: Where it runs.
        reference_dir: Where prompts are, and the baseline's tokens and logits.
        conditions: What is known of the worker; completed here.
        report: Told of every pass as it starts.

    Returns:
        The samples, or the failure with what was measured before it.
    """
    started_at_utc, started = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    before = LiveBefore(device)
    plan = spec.measurement
    rounds = max(plan.trials, plan.memory_trials, plan.transfer_trials)
    progress = _Progress(trials=[TrialSample() for _ in range(rounds)])
    prepare = partial(_prepare, spec, model, device, reference_dir)
    status, failure = _run_passes(progress, as_asked(spec, model), prepare, report)
    ended = time.perf_counter()
    run, progress.run = progress.run, None
    if run is not None:
        conditions = _with_passes(conditions, run)
    del run  # its prompt and tokens are device memory too
    device.release()
    recovery_s = time.perf_counter() - ended
    return CellResult(
        status=status,
        started_at_utc=started_at_utc,
        duration_s=time.perf_counter() - started,
        failure=failure,
        trials=tuple(trial for trial in progress.trials if trial != TrialSample()),
        fidelity=progress.fidelity,
        conditions=msgspec.structs.replace(
            conditions,
            baseline_bytes=before.live_bytes,
            leaked_bytes=before.leaked_bytes(),
            cap_bytes=cap_bytes(spec, model),
            host_cap_bytes=host_cap_bytes(spec),
            noise_floor_chunk_tokens=_noise_floor_chunk(spec),
            recovery=_recovery(before, recovery_s) if status in ("oom", "failed") else None,
        ),
    )


def _recovery(before: LiveBefore, recovery_s: float) -> RecoverySample:
    return RecoverySample(
        in_new_worker=False, recovery_s=recovery_s, leaked_bytes=before.leaked_bytes(), leaked=before.leaked()
    )


def _with_passes(conditions: Conditions, run: CellRun) -> Conditions:
    return msgspec.structs.replace(
        conditions,
        forced_tokens=run.tokens_BN is not None,
        generate_s=run.generate_s,
        warmups_s=tuple(run.warmups_s),
        num_compilations=run.num_compilations,
    )


@contextmanager
def as_asked(spec: RunSpec, model: Any) -> Iterator[None]:
    """The model as the cell wants it, and afterwards as it was: its attention, and nothing compiled."""
    with (
        using_attention(model, spec.workload.attn_implementation),
        compiling_afresh(model, compile_mode(spec.strategy)),
    ):
        yield


def cap_bytes(spec: RunSpec, model: Any) -> int | None:
    """What the allocator may hold: runtime bytes lie outside it.

    A cell may take the reserve too, where its budget is enforced. A probe is always held to what the arithmetic gives
    out, with the model's own weights in place of those that the budget states. A drill sets a cap of its own.
    """
    budget = spec.budget
    if spec.role in DRILLS:
        return None
    if spec.role == "cell":
        return budget.device_bytes - budget.runtime_bytes if budget.enforce else None
    loaded_bytes: int = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return budget.cap_bytes(loaded_bytes)


def host_cap_bytes(spec: RunSpec) -> int | None:
    """What the link's buffers may take, in a probe and under an enforced budget; None: it states no host memory."""
    if spec.role in DRILLS:  # these set their own
        return None
    return spec.budget.host_bytes if spec.budget.enforce or spec.role != "cell" else None


def _prepare(spec: RunSpec, model: Any, device: Device, reference_dir: Path) -> CellRun:
    files = ReferenceFiles(reference_dir, spec.reference_key)
    strategy = load_strategy(spec.strategy)
    strategy.prepare(device.name)
    tokens = files.load_tokens() if spec.role == "cell" else None
    prompt_BN = torch.from_numpy(files.load_prompt()).to(device.torch_device)
    tokens_BN = None if tokens is None else torch.from_numpy(tokens).to(device.torch_device)
    device.adopt(tensor for tensor in (prompt_BN, tokens_BN) if tensor is not None)
    return CellRun(
        model=model,
        device=device,
        strategy=strategy,
        spec=spec,
        prompt_BN=prompt_BN,
        tokens_BN=tokens_BN,
        files=files,
    )


def _run_passes(
    progress: _Progress, as_asked: AbstractContextManager[None], prepare: Callable[[], CellRun], report: ReportPass
) -> tuple[Status, Failure | None]:
    try:
        with as_asked:
            _take_all(progress, prepare, report)
    except Exception as error:  # whatever upstream raises is this cell's result, and the run goes on
        if isinstance(error, CellUnsupportedError) or missing_compiler(error) is not None:
            return "unsupported", _failure(error, progress, None)
        ledger = exhausted_ledger(error)
        return "failed" if ledger is None else "oom", _failure(error, progress, ledger)
    return "ok", None


def _take_all(progress: _Progress, prepare: Callable[[], CellRun], report: ReportPass) -> None:
    run = progress.run = prepare()
    if (drill := drill_of(run)) is not None:
        _take(("memory", partial(bring_about, run, drill)), progress, partial(report, "memory", 0, 1))
        return
    first, measured = _warming_steps(run, progress), _measuring_steps(run, progress)
    for index, step in enumerate(first):
        _take(step, progress, partial(report, step[0], index, len(first) + len(measured)))
    # Entered once: on CUDA it empties the allocator, and every pass after that would start cold.
    with run.device.capped(cap_bytes(run.spec, run.model), host_cap_bytes(run.spec)):
        for index, step in enumerate(measured, start=len(first)):
            _take(step, progress, partial(report, step[0], index, len(first) + len(measured)))


def _take(step: _Step, progress: _Progress, report: Callable[[], None]) -> None:
    progress.stage, run = step
    report()
    run()


def _warming_steps(run: CellRun, progress: _Progress) -> list[_Step]:
    """What warms up under no cap: the first use of a compiled strategy, and the fidelity pass with its float64 logits.

    What is compiled is compiled in a plain run, whose time is kept; no other pass has a first use in it.
    """
    compiles = [] if compile_mode(run.spec.strategy) is None else [("warmup", partial(passes.warm_up_compiled, run))]
    wanted = run.spec.measurement.fidelity and run.files.is_complete(run.spec.workload, with_logits=True)
    can_compare = not run.spec.is_baseline or _noise_floor_chunk(run.spec) is not None
    return [*compiles, *([("fidelity", partial(_compare, run, progress))] if wanted and can_compare else [])]


def _measuring_steps(run: CellRun, progress: _Progress) -> list[_Step]:
    plan = run.spec.measurement
    taken = int(compile_mode(run.spec.strategy) is not None)
    steps: list[_Step] = [("warmup", partial(passes.warm_up, run))] * max(0, plan.warmups - taken)
    measurements = [("memory", passes.measure_memory, plan.memory_trials)]
    if run.strategy.uses_link:
        measurements.append(("transfer", passes.measure_transfer, plan.transfer_trials))
    measurements.append(("timing", passes.measure_timing, plan.trials))
    if run.strategy.uses_link and run.device.has_profiler:
        measurements.append(("profile", passes.profile_transfer, min(1, plan.transfer_trials)))
    for name, measure, rounds in measurements:
        steps += [(name, partial(_measure, run, progress, measure, index)) for index in range(rounds)]
    return steps


def _compare(run: CellRun, progress: _Progress) -> None:
    progress.fidelity = passes.measure_fidelity(run, _noise_floor_chunk(run.spec))


def _measure(run: CellRun, progress: _Progress, measure: _MeasuringPass, index: int) -> None:
    progress.trials[index] = measure(run, progress.trials[index])


def _noise_floor_chunk(spec: RunSpec) -> int | None:
    """Chunk size of the baseline's comparison with itself: at least two chunks, and odd where the plan's is.

    A workload that is prefilled in chunks is compared with itself in smaller ones, which need no more memory, and
    never with the same ones: those would give equal bits, and no floor. Chunks of one token are held against two.

    None for other strategies, and for a prompt of a single token, which cannot be prefilled in chunks.
    """
    own_chunk, prompt_tokens = spec.workload.prefill_chunk_tokens, spec.workload.prompt_tokens
    if not spec.is_baseline or prompt_tokens < 2:
        return None
    if own_chunk == 1:
        return 2
    half = ((own_chunk or prompt_tokens) + 1) // 2
    return min(spec.measurement.noise_floor_chunk_tokens, max(1, half - (half % 2 == 0)))


def _failure(error: BaseException, progress: _Progress, ledger: Literal["device", "host"] | None) -> Failure:
    """Keeps the words of an exception and none of its frames, which hold the cache alive."""
    failure = Failure(
        type=type(error).__name__,
        message=str(error).strip()[:2000],
        stage=progress.stage,
        phase=None if progress.run is None else progress.run.clock.phase,
        ledger=ledger,
    )
    error.__traceback__ = None
    error.__context__ = error.__cause__ = None
    return failure
