"""An admission policy: limits for each strategy and length class, and the machine, model and versions they are of."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from offload_eval.core.base import Name, NonNegativeInt, PositiveInt, Strict
from offload_eval.core.experiment import BudgetSpec, DeviceName, ModelSpec, StrategySpec
from offload_eval.core.limits import Lengths
from offload_eval.core.records import Evidence, Phase

POLICY_SCHEMA_VERSION: Final = 1
NonNegativeNumber = Annotated[float, Meta(ge=0, le=2**53)]
"""Up to where a float still tells every byte apart."""


class PhaseFit(Strict, frozen=True, kw_only=True):
    """The peak of one phase as a plane over what the batch holds, fitted with no coefficient below zero.

    peak = weights + runtime + bytes_per_session_token * sessions * tokens + bytes_per_session * sessions
    + bytes_per_prefill_token * prefill_tokens. `tokens` are those that a session holds when the phase ends;
    `prefill_tokens` those that all sessions together prefill at once.
    """

    phase: Phase
    weights_bytes: PositiveInt
    """Live before any session."""
    runtime_bytes: NonNegativeNumber
    """The constant: what no batch changes, and is not among the weights."""
    bytes_per_session_token: NonNegativeNumber
    bytes_per_session: NonNegativeNumber
    bytes_per_prefill_token: NonNegativeNumber
    not_told_apart: tuple[str, ...] = ()
    """Coefficients left at zero because, over the measured lengths, others stand for them too."""
    points: PositiveInt
    """Measured peaks under the fit."""
    worst_residual_bytes: NonNegativeNumber
    """The most that a measured peak lies above or below the fit."""
    worst_above_bytes: NonNegativeNumber
    """The most that a measured peak lies above the fit, or above what the others predict for it."""
    leave_one_out_ratio: NonNegativeNumber | None = None
    """Worst error of a batch predicted from all others, over its peak beyond the weights; None: too few batches."""
    flags: tuple[str, ...] = ()
    """What speaks against a plane: a leak, a bend, too few points."""


class Calibration(Strict, frozen=True, kw_only=True):
    """The fits of both phases of one strategy, and the range of batches that were measured."""

    fits: Annotated[tuple[PhaseFit, ...], Meta(min_length=1)]
    least_prompt_tokens: PositiveInt
    most_prompt_tokens: PositiveInt
    least_output_tokens: PositiveInt
    most_output_tokens: PositiveInt
    least_prefill_tokens: PositiveInt
    """Fewest prompt tokens that a session prefilled at once: the chunk, or a prompt without chunks."""
    most_cached_tokens: PositiveInt
    """Of one session at the end of its decode."""
    most_sessions: PositiveInt
    most_session_tokens: PositiveInt
    """Most tokens that all sessions of a batch held together."""
    reserve_bytes: NonNegativeInt
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
    host_bytes_per_session_token: NonNegativeNumber | None = None
    """Host bytes that a cached token takes; None: none that are counted."""
    peak_host_rss_bytes: NonNegativeInt | None = None
    """Highest resident set of a worker at any of the batches."""
    pinned_allocated_bytes: NonNegativeInt | None = None
    """Highest pinned host memory, as the pinned allocator rounds it."""
    refusal: str | None = None
    """Why nothing may be admitted."""

    @property
    def label(self) -> str:
        """The strategy's name in reports and on the command line."""
        return self.strategy.label


class Fingerprint(Strict, frozen=True, kw_only=True):
    """What the limits hold for, and nothing else."""

    model: ModelSpec
    model_fingerprint: str
    """Hash over the model's config and its weight files."""
    device: DeviceName
    accelerator: str | None = None
    accelerator_memory_bytes: PositiveInt | None = None
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
    context_tokens: PositiveInt | None = None
    """Prompt and generated tokens that the model takes; None: its config does not say."""
    baseline: str
    """Label of the in-GPU strategy."""
    strategies: Annotated[tuple[PolicyStrategy, ...], Meta(min_length=1)]
    assumptions: tuple[str, ...] = ()


class ConcernedStrategy(Strict, frozen=True, kw_only=True):
    """Limits that no longer hold, of one strategy."""

    label: str
    length_classes: tuple[str, ...]
    """Labels of the lengths to measure again; empty where the strategy was refused, and may not be now."""
    run_ids: tuple[str, ...]
    """Of the records that the limits and the calibration rest on."""


class Difference(Strict, frozen=True, kw_only=True):
    """One thing that a policy's limits hold for and that is otherwise now."""

    field: str
    """Of the fingerprint, such as `versions.torch`."""
    policy: str | None
    """None: there was none."""
    now: str | None
    """None: there is none."""
    concerns: tuple[ConcernedStrategy, ...] = ()
    """Empty: no limit of the policy depends on it."""
