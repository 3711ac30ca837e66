"""What the session and its processes say to each other. No framework is imported: the session needs none."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from offload_eval.core.experiment import CpuSpec, DeviceName, ModelSpec, StrategySpec, Workload
from offload_eval.core.machine import Machine
from offload_eval.core.records import Conditions, Evidence, Failure, FidelitySample, Status, TrialSample
from offload_eval.core.run_spec import RunSpec
from offload_eval.core.shape import ModelFacts
from offload_eval.core.trace import Trace
from offload_eval.errors import OffloadEvalError

TokenArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PromptText:
    """A text's tokens, and those that the tokenizer puts before any text."""

    tokens: TokenArray
    opening: TokenArray


@dataclass(frozen=True)
class Preflight:
    """What the session needs to know before it starts a worker."""

    device: DeviceName
    evidence: Evidence
    machine: Machine
    model: ModelFacts
    prompts: dict[str, TokenArray]
    """Prompt tokens `[batch, prompt_tokens]` by workload label."""
    refusals: dict[tuple[str, str], str | None]
    """Why a strategy cannot run a workload here, by workload and strategy label; None where it can."""
    texts: dict[str, PromptText | None] = field(default_factory=dict)
    """What more prompts of a workload can be cut from, by its label, where limits are searched for; None: its prompts
    are random."""
    resolved: dict[tuple[str, str], StrategySpec] = field(default_factory=dict)
    """What stands for a strategy that leaves a choice to the budget, by workload and strategy label."""

    def strategy(self, workload: Workload, strategy: StrategySpec) -> StrategySpec:
        """The strategy as it runs a workload."""
        return self.resolved.get((workload.label, strategy.label), strategy)


@dataclass(frozen=True)
class Surroundings:
    """What a policy's limits depend on, as it is now."""

    device: DeviceName
    machine: Machine
    model: ModelFacts


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker needs before its first cell."""

    model: ModelSpec
    device: DeviceName
    cpu: CpuSpec
    compute_threads: int
    reference_dir: Path
    log_path: Path


@dataclass(frozen=True)
class ReferenceTask:
    """Asks the baseline's worker for a workload's tokens and logits."""

    spec: RunSpec


@dataclass(frozen=True)
class ReferenceDone:
    """The answer: the files are written, or the log says why not."""

    generate_s: float
    """Time inside generate()."""


@dataclass(frozen=True)
class CellTask:
    """Asks for one cell; the answer is a CellResult."""

    spec: RunSpec


@dataclass(frozen=True)
class CheckTask:
    """Asks for a short generation of one session under a cell's strategy; the answer is a CheckDone."""

    spec: RunSpec


@dataclass(frozen=True)
class CheckDone:
    """What the short generation gave: equal digests, equal bits."""

    tokens_digest: str | None
    """Hash of the tokens; None where there are none."""
    logits_digest: str | None
    """Hash of all logits."""
    seconds: float
    """Time it took, also where it failed."""
    message: str = ""
    """Why there is no digest."""


@dataclass(frozen=True)
class TraceTask:
    """Asks for the trace of one cell; the answer is a CellResult."""

    spec: RunSpec


@dataclass(frozen=True)
class Ready:
    """The model is loaded."""


@dataclass(frozen=True)
class PassStarted:
    """A pass of the cell begins."""

    name: str
    index: int
    total: int


@dataclass(frozen=True)
class LoadFailed:
    """The model could not be loaded; no cell of this worker can run."""

    failure: Failure


@dataclass(frozen=True)
class Refused:
    """The process cannot go on; the error is the user's to read."""

    error: OffloadEvalError


@dataclass(frozen=True)
class CellResult:
    """What became of one cell; the session makes the record of it."""

    status: Status
    started_at_utc: str
    duration_s: float
    failure: Failure | None = None
    trials: tuple[TrialSample, ...] = ()
    fidelity: FidelitySample | None = None
    conditions: Conditions = field(default_factory=Conditions)
    trace: Trace | None = None


def ended(status: Status, failure: Failure, started: datetime | None = None) -> CellResult:
    """The result of a cell that has none: it ends now, and began at `started` or now."""
    now = datetime.now(UTC)
    began = started or now
    return CellResult(
        status=status,
        failure=failure,
        started_at_utc=began.isoformat(timespec="seconds"),
        duration_s=(now - began).total_seconds(),
    )
