"""Which strategy of a policy is handed off, at which lengths, and whose limit an engine's batch starts from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from offload_eval.core.experiment import OffloadedSpec, OffloadedStaticSpec, QuantizedSpec, StrategySpec, StreamedSpec
from offload_eval.core.limits import Lengths
from offload_eval.core.policy import AdmissionPolicy, PolicyLimit, PolicyStrategy
from offload_eval.core.records import Evidence
from offload_eval.errors import InputError

_RUNGS: Final[tuple[Evidence, ...]] = ("analytic", "traced", "emulated", "measured")
_ENGINE_BITS: Final = 8
"""Bits of a value in fp8, the narrowest format that both engines have had for long."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A strategy, its longest admitted class, and what of that an engine can hold as running requests."""

    policy: AdmissionPolicy
    strategy: PolicyStrategy
    limit: PolicyLimit
    reason: str
    """Why this strategy, in words."""
    running: PolicyLimit | None
    """The limit that a running batch starts from; None: the baseline, whose it would be, admits nothing."""
    running_label: str
    """Of the strategy that `running` is of."""
    running_reason: str
    """Why it is not the strategy's own; empty where it is."""

    @property
    def spec(self) -> StrategySpec:
        """The strategy as it was run."""
        return self.strategy.strategy

    @property
    def is_emulated(self) -> bool:
        """Whether the limits are those of a CPU."""
        return self.policy.fingerprint.device == "cpu" or self.limit.evidence == "emulated"

    @property
    def host_rows_bytes(self) -> int:
        """Host bytes of the cache with the strategy's limit of sessions at full length; 0: none that are counted."""
        per_token = self.strategy.host_bytes_per_session_token or 0.0
        return round(per_token * self.limit.sessions * cached_tokens(self.limit.lengths))


def choose(policy: AdmissionPolicy, label: str | None) -> Choice:
    """Takes the strategy that is named, or else the lossless one that admits most at the longest class.

    Raises:
        InputError: The policy has no strategy of this label, or it admits no session.
    """
    strategy = _named(policy, label) if label is not None else _default(policy)
    limit = longest(strategy)
    if limit is None:
        admitting = [each.strategy.label for each in policy.strategies if longest(each) is not None]
        raise InputError(
            f"policy {policy.name}: {strategy.strategy.label!r} admits no session at any lengths"
            f"{f' ({strategy.refusal})' if strategy.refusal else ''}; allowed: {', '.join(admitting) or 'none'}"
        )
    running_label, running_reason = _running(policy, strategy.strategy)
    baseline = next((each for each in policy.strategies if each.strategy.label == running_label), None)
    return Choice(
        policy=policy,
        strategy=strategy,
        limit=limit,
        reason="It was named." if label is not None else _reason(policy, strategy, limit),
        running=None if baseline is None or keeps_kv_on_host(baseline.strategy) else longest(baseline),
        running_label=running_label,
        running_reason=running_reason,
    )


def longest(strategy: PolicyStrategy) -> PolicyLimit | None:
    """The longest class at which a strategy admits a session on the best rung it has; of equals, where it admits most.

    A longer class that is only traced does not stand in for a measured one.
    """
    admitted = [limit for limit in strategy.limits if limit.sessions > 0] if strategy.refusal is None else []
    return max(admitted, key=_rank, default=None)


def _rank(limit: PolicyLimit) -> tuple[int, int, bool, int]:
    """A whole prefill before one in chunks, which holds for those chunks alone."""
    whole = limit.lengths.prefill_chunk_tokens is None
    return (_RUNGS.index(limit.evidence), total_tokens(limit.lengths), whole, limit.sessions)


def total_tokens(lengths: Lengths) -> int:
    """Prompt and output of one session."""
    return lengths.prompt_tokens + lengths.output_tokens


def cached_tokens(lengths: Lengths) -> int:
    """Tokens that one session holds when it ends: the last one is never cached."""
    return total_tokens(lengths) - 1


def keeps_kv_on_host(spec: StrategySpec) -> bool:
    """Whether a running session's KV lies on the host, where no engine lets it."""
    return isinstance(spec, OffloadedSpec | OffloadedStaticSpec | StreamedSpec)


def quantized_bits(spec: StrategySpec) -> int | None:
    """Bits of a value of a quantized cache; None of one in the model's dtype. Unset, upstream's default of 4."""
    if not isinstance(spec, QuantizedSpec):
        return None
    return 8 if spec.backend == "fp8" else spec.nbits or 4


def _named(policy: AdmissionPolicy, label: str) -> PolicyStrategy:
    for strategy in policy.strategies:
        if strategy.strategy.label == label:
            return strategy
    labels = ", ".join(each.strategy.label for each in policy.strategies)
    raise InputError(f"policy {policy.name}: {label!r} is not one of its strategies; allowed: {labels}")


def _default(policy: AdmissionPolicy) -> PolicyStrategy:
    """The better rung first, then the longer class, then sessions; the baseline wins ties."""
    lossless = [each for each in policy.strategies if each.strategy.lossless and longest(each) is not None]
    candidates: Sequence[PolicyStrategy] = lossless or policy.strategies
    if not candidates:
        raise InputError(f"policy {policy.name}: has no strategy")

    def rank(strategy: PolicyStrategy) -> tuple[int, int, bool, int, bool]:
        limit = longest(strategy)
        return (*((-1, 0, False, 0) if limit is None else _rank(limit)), strategy.strategy.label == policy.baseline)

    return max(candidates, key=rank)


def _reason(policy: AdmissionPolicy, strategy: PolicyStrategy, limit: PolicyLimit) -> str:
    at = f"{limit.sessions:,} at {limit.lengths.label}, {limit.evidence}"
    if not strategy.strategy.lossless:
        return f"No lossless strategy admits a session; of the others it admits most at the longest class ({at})."
    if strategy.strategy.label == policy.baseline:
        return f"It is the baseline, and no lossless strategy admits more at the longest class ({at})."
    baseline = next((each for each in policy.strategies if each.strategy.label == policy.baseline), None)
    theirs = sessions_at(baseline, limit.lengths)
    return (
        f"Of the lossless strategies with the best evidence it admits most at the longest class ({at}); "
        f"the baseline {policy.baseline}: {'no limit there' if theirs is None else f'{theirs:,}'}."
    )


def sessions_at(strategy: PolicyStrategy | None, lengths: Lengths) -> int | None:
    """What a strategy admits at exactly these lengths; None where that was not asked."""
    limits = () if strategy is None else strategy.limits
    return next((limit.sessions for limit in limits if limit.lengths == lengths), None)


def _running(policy: AdmissionPolicy, spec: StrategySpec) -> tuple[str, str]:
    """Whose limit a running batch starts from, and why that is not the strategy's own."""
    bits = quantized_bits(spec)
    if keeps_kv_on_host(spec):
        return policy.baseline, (
            f"{spec.label} keeps KV of running sessions on the host. An engine does not: what it moves there are "
            "blocks to be reused, and every running request holds its KV on the device."
        )
    if bits is not None and bits < _ENGINE_BITS:
        return policy.baseline, (
            f"{spec.label} stores {bits} bits a value and the engine {_ENGINE_BITS}: its limit would ask for "
            f"{_ENGINE_BITS / bits:g} times the bytes."
        )
    return spec.label, ""
