"""Measures one cell in a worker: which passes, in which order, and what becomes of a failure."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload_eval.core.experiment import BudgetSpec, RunSpec
from offload_eval.core.records import Conditions, Failure, FidelitySample, Status, TrialSample
from offload_eval.execution import passes
from offload_eval.execution.messages import CellResult
from offload_eval.execution.passes import CellRun
from offload_eval.execution.reference import ReferenceFiles
from offload_eval.instruments.device import Device
from offload_eval.strategies.registry import load_strategy

_MeasuringPass = Callable[[CellRun, TrialSample], TrialSample]

ReportPass = Callable[[str, int, int], None]
"""Told the name of the pass that starts, how many are done and how many there are."""


@dataclass
class _Progress:
    """Results so far: what is kept when a later pass fails."""

    trials: list[TrialSample]
    fidelity: FidelitySample | None = None
    pass_name: str = "load"


def measure_cell(
    spec: RunSpec, model: Any, device: Device, reference_dir: Path, conditions: Conditions, report: ReportPass
) -> CellResult:
    """Runs every pass of a cell. Never raises for what the cell did: a failure is a result.

    Args:
        spec: The cell.
        model: The loaded model, already adopted by the device.
        device: Where it runs.
        reference_dir: Where prompts are, and where the baseline leaves its tokens and logits.
        conditions: What is known of the worker; completed here.
        report: Told of every pass as it starts.

    Returns:
        The samples, or the failure with what was measured before it.
    """
    started_at_utc, started = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    device.release()
    baseline_bytes = device.live_bytes()
    progress = _Progress(trials=[TrialSample() for _ in range(spec.measurement.trials)])
    run = _prepare(spec, model, device, reference_dir)
    status, failure = _run_passes(run, progress, report)
    generate_s = run.generate_s
    del run  # its prompt and tokens are device memory too
    device.release()
    live_bytes = device.live_bytes()
    measured = tuple(trial for trial in progress.trials if trial != TrialSample())
    return CellResult(
        status=status,
        started_at_utc=started_at_utc,
        duration_s=time.perf_counter() - started,
        failure=failure,
        trials=measured,
        fidelity=progress.fidelity,
        conditions=Conditions(
            compute_threads=conditions.compute_threads,
            contention_ratio=conditions.contention_ratio,
            load_s=conditions.load_s,
            baseline_bytes=baseline_bytes,
            leaked_bytes=None if live_bytes is None or baseline_bytes is None else live_bytes - baseline_bytes,
            cap_bytes=cap_bytes(spec.budget),
            generate_s=generate_s,
        ),
    )


def cap_bytes(budget: BudgetSpec) -> int | None:
    """What the allocator may hold when the budget is enforced: runtime bytes lie outside it."""
    return budget.device_bytes - budget.runtime_bytes if budget.enforce else None


def _prepare(spec: RunSpec, model: Any, device: Device, reference_dir: Path) -> CellRun:
    files = ReferenceFiles(reference_dir, spec.workload.label)
    tokens = files.load_tokens()
    return CellRun(
        model=model,
        device=device,
        strategy=load_strategy(spec.strategy),
        spec=spec,
        prompt_BN=torch.from_numpy(files.load_prompt()).to(device.torch_device),
        tokens_BN=None if tokens is None else torch.from_numpy(tokens).to(device.torch_device),
        files=files,
    )


def _run_passes(run: CellRun, progress: _Progress, report: ReportPass) -> tuple[Status, Failure | None]:
    steps = _plan(run, progress)
    try:
        for index, (name, step) in enumerate(steps):
            progress.pass_name = name
            report(name, index, len(steps))
            step()
    except (torch.OutOfMemoryError, MemoryError) as error:
        return "oom", _failure(error, run, progress)
    except Exception as error:  # whatever upstream raises is this cell's result, and the run goes on
        out_of_host_memory = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
        return "oom" if out_of_host_memory else "failed", _failure(error, run, progress)
    return "ok", None


def _plan(run: CellRun, progress: _Progress) -> list[tuple[str, Callable[[], None]]]:
    """The passes in order. The reference and fidelity passes come first: they warm up what is timed later."""
    plan = run.spec.measurement
    steps: list[tuple[str, Callable[[], None]]] = []
    if plan.fidelity and _can_compare(run.spec):
        steps.append(("fidelity", partial(_compare, run, progress)))
    steps += [("warmup", partial(passes.warm_up, run))] * plan.warmups
    measurements = [("memory", passes.measure_memory, plan.memory_trials)]
    if run.strategy.uses_link:
        measurements.append(("transfer", passes.measure_transfer, plan.transfer_trials))
    measurements.append(("timing", passes.measure_timing, plan.trials))
    for name, measure, rounds in measurements:
        steps += [(name, partial(_measure, run, progress, measure, i)) for i in range(min(rounds, plan.trials))]
    steps = [(name, partial(_capped, run, step)) for name, step in steps]
    if run.spec.is_baseline:
        # Not capped: it is no measurement, and the other strategies need it even where the baseline does not fit.
        steps.insert(0, ("reference", partial(passes.record_reference, run)))
    return steps


def _capped(run: CellRun, step: Callable[[], None]) -> None:
    with run.device.capped(cap_bytes(run.spec.budget)):
        step()


def _compare(run: CellRun, progress: _Progress) -> None:
    if run.tokens_BN is not None and run.files.logits.exists():
        chunk_tokens = _noise_floor_chunk(run.spec) if run.spec.is_baseline else None
        progress.fidelity = passes.measure_fidelity(run, chunk_tokens)


def _measure(run: CellRun, progress: _Progress, measure: _MeasuringPass, index: int) -> None:
    progress.trials[index] = measure(run, progress.trials[index])


def _can_compare(spec: RunSpec) -> bool:
    """A baseline whose prompt is a single token has no noise floor: it cannot be prefilled in chunks."""
    return not spec.is_baseline or spec.workload.prompt_tokens > 1


def _noise_floor_chunk(spec: RunSpec) -> int:
    """Chunk size of the baseline's comparison with itself: at least two chunks, and odd where the plan's is."""
    half = (spec.workload.prompt_tokens + 1) // 2
    return min(spec.measurement.noise_floor_chunk_tokens, max(1, half - (half % 2 == 0)))


def _failure(error: BaseException, run: CellRun, progress: _Progress) -> Failure:
    """Keeps the words of an exception and none of its frames, which hold the cache alive."""
    failure = Failure(
        type=type(error).__name__,
        message=str(error).strip()[:2000],
        phase=f"{progress.pass_name}/{run.clock.phase}",
    )
    error.__traceback__ = None
    error.__context__ = error.__cause__ = None
    return failure
