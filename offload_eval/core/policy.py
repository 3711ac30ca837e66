"""An admission policy: limits for each strategy and length class, and the machine, model and versions they are of."""

from typing import Final

import msgspec

from offload_eval.core.base import Name, NonNegativeInt, PositiveInt, Strict
from offload_eval.core.experiment import BudgetSpec, DeviceName, ModelSpec, StrategySpec
from offload_eval.core.limits import Lengths
from offload_eval.core.records import Evidence, Phase

POLICY_SCHEMA_VERSION: Final = 1


class PhaseFit(Strict, frozen=True, kw_only=True):
    """The peak of one phase as a plane over what the batch holds, fitted with no coefficient below zero.

    peak = weights + runtime + bytes_per_session_token * sessions * tokens + bytes_per_session * sessions
    + bytes_per_prefill_token * prefill_tokens. `tokens` are those that a session holds when the phase ends;
    `prefill_tokens` those that all sessions together prefill at once.
    """

    phase: Phase
    weights_bytes: int
    """Live before any session."""
    runtime_bytes: float
    bytes_per_session_token: float
    bytes_per_session: float
    bytes_per_prefill_token: float
    not_told_apart: tuple[str, ...] = ()
    """Coefficients left at zero because, over the measured lengths, another one stands for them too."""
    points: int
    """Measured peaks under the fit."""
    worst_residual_bytes: float
    """The most that a measured peak lies above or below the fit."""
    worst_above_bytes: float
    """The most that a measured peak lies above the fit, or above what the other points predict for it."""
    leave_one_out_ratio: float | None = None
    """Worst error of a point predicted from all others, over that peak beyond the weights; None: too few points."""
    flags: tuple[str, ...] = ()
    """What speaks against a plane: a leak, a bend, too few points."""


class Calibration(Strict, frozen=True, kw_only=True):
    """The fits of both phases of one strategy, and where they hold."""

    fits: tuple[PhaseFit, ...]
    least_prompt_tokens: int
    most_prompt_tokens: int
    least_output_tokens: int
    most_output_tokens: int
    most_sessions: int
    reserve_bytes: int
    """Covers the worst peak above the fits, in whole MiB."""
    run_ids: tuple[str, ...] = ()


class PolicyLimit(Strict, frozen=True, kw_only=True):
    """The limit of one length class: of sessions no longer than this in prompt and in output."""

    lengths: Lengths
    sessions: NonNegativeInt
    evidence: Evidence
    limited_by: str = ""
    run_ids: tuple[str, ...] = ()


class PolicyStrategy(Strict, frozen=True, kw_only=True):
    """What one strategy may admit."""

    strategy: StrategySpec
    limits: tuple[PolicyLimit, ...]
    calibration: Calibration | None = None
    """None: too few lengths or batches were measured."""
    host_bytes_per_session_token: float | None = None
    """Host bytes that a cached token takes; None: none that are counted."""
    peak_host_rss_bytes: int | None = None
    """Highest resident set of a worker at any of the limits."""
    pinned_allocated_bytes: int | None = None
    """Highest pinned host memory, as the pinned allocator rounds it."""
    refusal: str | None = None
    """Why nothing may be admitted."""


class Fingerprint(Strict, frozen=True, kw_only=True):
    """What the limits hold for, and nothing else."""

    model: ModelSpec
    model_fingerprint: str
    """Hash over the model's config and its weight files."""
    device: DeviceName
    accelerator: str | None = None
    accelerator_memory_bytes: int | None = None
    driver: str | None = None
    cuda: str | None = None
    cpu: str | None = None
    """Of an emulated policy; None of a measured one."""
    allocator_config: str | None = None
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    """Of every package that a limit depends on, this one included."""


class AdmissionPolicy(Strict, frozen=True, kw_only=True):
    """One policy file."""

    schema_version: int = POLICY_SCHEMA_VERSION
    name: Name
    created_at_utc: str
    fingerprint: Fingerprint
    budget: BudgetSpec
    cap_bytes: PositiveInt
    """Device bytes for weights, cache and activations: the budget less runtime and reserve."""
    baseline: str
    """Label of the in-GPU strategy."""
    strategies: tuple[PolicyStrategy, ...]
    assumptions: tuple[str, ...] = ()
