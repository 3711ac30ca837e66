"""A policy held against a population: one left-padded batch, filled in the order of the file.

Admission is first in, first out, and nobody overtakes: once a session waits, so do all that come after it and could
be admitted at all. A shorter one let past would make the waiting one wait longer. A session that could never be
admitted is refused, and holds nobody up.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from offload_eval.analysis.calibration import predict
from offload_eval.core.admission import (
    Batch,
    BatchArithmetic,
    GroupAnswer,
    PolicyAnswer,
    Stop,
    StrategyAnswer,
)
from offload_eval.core.experiment import BITS_PER_VALUE, StreamedSpec
from offload_eval.core.plan import SessionGroup
from offload_eval.core.policy import AdmissionPolicy, Calibration, PolicyLimit, PolicyStrategy
from offload_eval.units import format_bytes

_MASKS: Final = 2
"""Of full attention, and of windows."""


@dataclass(frozen=True, kw_only=True)
class ApplyOptions:
    """What is asked of a policy beside the population."""

    reserve_bytes: int = 0
    """Kept free on top of the calibration's own reserve."""
    prefill_chunk_tokens: int | None = None
    """Prompt tokens prefilled at once; None: a whole prompt."""
    extrapolate: bool = False
    """Let the calibration answer for batches outside of what was measured."""


def apply_policy(
    policy: AdmissionPolicy, groups: Sequence[SessionGroup], labels: Sequence[str], options: ApplyOptions
) -> PolicyAnswer:
    """Says for every group and strategy how many sessions are admitted, queued and refused.

    Args:
        policy: The limits, the calibrations and the cap.
        groups: In the order they arrive.
        labels: Of the strategies that are asked about.
        options: See there.
    """
    asked = [strategy for strategy in policy.strategies if strategy.label in labels]
    return PolicyAnswer(
        policy=policy.name,
        cap_bytes=policy.cap_bytes,
        strategies=tuple(_Admission(policy, strategy, options).answer(groups) for strategy in asked),
        assumptions=(
            *policy.assumptions,
            "Every session is counted at its max_new_tokens; prefixes that sessions share are held by each row.",
            "First in, first out: once a session waits, all after it that could be admitted wait as well.",
        ),
    )


def weigh(policy: AdmissionPolicy, strategy: PolicyStrategy, batch: Batch, options: ApplyOptions) -> BatchArithmetic:
    """Holds one batch against a policy: the measured limit, the range measured, the host, and the calibrated peak."""
    calibration = strategy.calibration
    counted = None if calibration is None else _counted(batch, calibration)
    prediction = None if calibration is None or counted is None else predict(calibration, counted)
    covering = covering_limit(strategy, batch)
    arithmetic = BatchArithmetic(
        batch=batch,
        prediction=prediction,
        reserve_bytes=options.reserve_bytes + (0 if calibration is None else calibration.reserve_bytes),
        mask_bytes=_mask_bytes(policy, counted or batch),
        cap_bytes=policy.cap_bytes,
        host_bytes=_host_bytes(policy, strategy, counted or batch),
        host_cap_bytes=policy.budget.host_bytes,
        covering_class=None if covering is None else covering.lengths.label,
        covering_sessions=None if covering is None else covering.sessions,
    )
    return next(_stops(arithmetic, strategy, options), arithmetic)


def covering_limit(strategy: PolicyStrategy, batch: Batch) -> PolicyLimit | None:
    """The measured length class of most sessions among those that are as long as the batch: its rows ran, no shorter.

    Of classes that prefill at least as much at once, with the model's own attention; None where there is none.
    """
    covering = [limit for limit in strategy.limits if _covers(limit, batch)]
    return max(covering, key=lambda limit: limit.sessions, default=None)


class _Admission:
    """One strategy's batch while it is filled."""

    def __init__(self, policy: AdmissionPolicy, strategy: PolicyStrategy, options: ApplyOptions) -> None:
        self._policy = policy
        self._strategy = strategy
        self._options = options
        self._batch: Batch | None = None
        self._waiting: str | None = None
        """Name of the first group that waits."""
        self._one_more: BatchArithmetic | None = None
        self._refused_alone: BatchArithmetic | None = None

    def answer(self, groups: Sequence[SessionGroup]) -> StrategyAnswer:
        answers = tuple(self._group(group) for group in groups)
        batch = None if self._batch is None else self._weigh(self._batch)
        return StrategyAnswer(
            strategy=self._strategy.label,
            kind=self._strategy.strategy.kind,
            evidence=next((limit.evidence for limit in self._strategy.limits), None),
            groups=answers,
            batch=batch,
            one_more=self._one_more or self._refused_alone,
            notes=tuple(_notes(self._strategy, batch)),
        )

    def _group(self, group: SessionGroup) -> GroupAnswer:
        refusal = self._refusal(group)
        if refusal is not None:
            return _group_answer(group, 0, 0, refusal)
        if self._waiting is not None:
            return _group_answer(group, 0, group.sessions, f"waits behind {self._waiting}")
        # More of the same never need less: the first count that is stopped ends the search.
        counts = range(1, group.sessions + 1)
        admitted = bisect_left(counts, True, key=lambda count: self._weigh(self._with(group, count)).stop is not None)
        if admitted:
            self._batch = self._with(group, admitted)
        if admitted == group.sessions:
            return _group_answer(group, admitted, 0, "")
        self._waiting = group.name
        self._one_more = self._weigh(self._with(group, 1))
        return _group_answer(group, admitted, group.sessions - admitted, f"one more: {self._one_more.reason}")

    def _refusal(self, group: SessionGroup) -> str | None:
        """Why a session of the group could never be admitted."""
        if self._strategy.refusal is not None:
            return self._strategy.refusal
        context_tokens, request_tokens = self._policy.context_tokens, group.prompt_tokens + group.max_new_tokens
        if context_tokens is not None and request_tokens > context_tokens:
            return f"{request_tokens:,} tokens pass the model's context of {context_tokens:,}"
        if isinstance(self._strategy.strategy, StreamedSpec) and group.beams > 1:
            return "streamed rows cannot be reordered: beams are not supported"
        alone = self._weigh(_batch_of(group, self._options))
        if alone.stop is None:
            return None
        self._refused_alone = self._refused_alone or alone
        return f"alone: {alone.reason}"

    def _with(self, group: SessionGroup, count: int) -> Batch:
        """The batch with more sessions of a group, all of its rows as long as the longest."""
        added = msgspec.structs.replace(_batch_of(group, self._options), rows=count * group.beams)
        if self._batch is None:
            return added
        return msgspec.structs.replace(
            added,
            rows=self._batch.rows + added.rows,
            prompt_tokens=max(self._batch.prompt_tokens, added.prompt_tokens),
            output_tokens=max(self._batch.output_tokens, added.output_tokens),
            is_padded=self._batch.is_padded or self._batch.prompt_tokens != added.prompt_tokens,
        )

    def _weigh(self, batch: Batch) -> BatchArithmetic:
        return weigh(self._policy, self._strategy, batch, self._options)


def _group_answer(group: SessionGroup, admitted: int, queued: int, reason: str) -> GroupAnswer:
    return GroupAnswer(
        name=group.name,
        sessions=group.sessions,
        admitted=admitted,
        queued=queued,
        refused=group.sessions - admitted - queued,
        reason=reason,
    )


def _batch_of(group: SessionGroup, options: ApplyOptions) -> Batch:
    """One session of a group by itself."""
    return Batch(
        rows=group.beams,
        prompt_tokens=group.prompt_tokens,
        output_tokens=group.max_new_tokens,
        prefill_chunk_tokens=options.prefill_chunk_tokens,
    )


def _counted(batch: Batch, calibration: Calibration) -> Batch:
    """Lengths below the shortest measured ones are counted as those: too much, rather than extrapolated."""
    chunk_tokens = batch.prefill_chunk_tokens
    return msgspec.structs.replace(
        batch,
        prompt_tokens=max(batch.prompt_tokens, calibration.least_prompt_tokens),
        output_tokens=max(batch.output_tokens, calibration.least_output_tokens),
        prefill_chunk_tokens=chunk_tokens and max(chunk_tokens, calibration.least_prefill_tokens),
    )


def _host_bytes(policy: AdmissionPolicy, strategy: PolicyStrategy, batch: Batch) -> int | None:
    per_token_bytes = strategy.host_bytes_per_session_token
    if policy.budget.host_bytes is None or per_token_bytes is None:
        return None
    # Each pinned buffer is rounded up to a power of two.
    rounding = 2 if policy.fingerprint.device == "cuda" else 1
    return rounding * math.ceil(per_token_bytes * batch.rows * batch.cached_tokens)


def _mask_bytes(policy: AdmissionPolicy, batch: Batch) -> int:
    """At most: one mask for full attention and one for windows, each as bool and once more in the model's dtype."""
    if not batch.is_padded:
        return 0
    bytes_per_position = 1 + BITS_PER_VALUE[policy.fingerprint.model.dtype] // 8
    return _MASKS * bytes_per_position * batch.prefill_tokens * batch.cached_tokens


def _covers(limit: PolicyLimit, batch: Batch) -> bool:
    lengths = limit.lengths
    return (
        lengths.attn_implementation is None
        and lengths.prompt_tokens >= batch.prompt_tokens
        and lengths.output_tokens >= batch.output_tokens
        and _at_once_tokens(limit) >= batch.prefill_at_once_tokens
    )


def _at_once_tokens(limit: PolicyLimit) -> int:
    """Prompt tokens that a session of the class prefilled at once."""
    return min(limit.lengths.prefill_chunk_tokens or limit.lengths.prompt_tokens, limit.lengths.prompt_tokens)


def _stops(weighed: BatchArithmetic, strategy: PolicyStrategy, options: ApplyOptions) -> Iterator[BatchArithmetic]:
    """The batch with each thing that it is too large for, the first to mend first.

    A batch within the measured limit of a class that is no shorter has been seen to run: nothing computed overrules
    that, unless more is to be kept free than the search did. Elsewhere the calibration decides, where it was measured
    and nothing speaks against it.
    """
    rows, limit = weighed.batch.rows, weighed.covering_sessions
    is_measured = limit is not None and rows <= limit and not weighed.batch.is_padded
    if not is_measured:
        yield from _unmeasured(weighed, strategy, options)
    if not is_measured or options.reserve_bytes:
        yield from _over_cap(weighed)
    if not is_measured:
        yield from _over_host(weighed)


def _unmeasured(
    weighed: BatchArithmetic, strategy: PolicyStrategy, options: ApplyOptions
) -> Iterator[BatchArithmetic]:
    """Why the calibration may not answer for a batch that no measured limit covers."""
    batch, prediction, limit = weighed.batch, weighed.prediction, weighed.covering_sessions
    if limit is not None and batch.rows <= limit and prediction is None:
        yield _stopped(weighed, "not measured", "prompts of several lengths need a mask, and there is no calibration")
    over = "" if limit is None else f"{_rows(batch)}; measured at {weighed.covering_class}: {limit:,}"
    fits = () if strategy.calibration is None else strategy.calibration.fits
    flags = list(dict.fromkeys(flag for fit in fits for flag in fit.flags))
    is_refuted = prediction is None or (flags and not options.extrapolate) or _is_of_class(strategy, batch)
    if limit is not None and batch.rows > limit and is_refuted:
        yield _stopped(weighed, "measured limit", over)
    if limit is None and prediction is None:
        reason = f"{_lengths(batch)} {_longer_than_all(strategy)}, and there is no calibration"
        yield _stopped(weighed, "not measured", reason)
    doubts = [*flags, *(() if prediction is None else prediction.extrapolates)]
    if doubts and not options.extrapolate:
        yield _stopped(weighed, "not measured", f"{'; '.join(doubts)} (--extrapolate allows it)")


def _is_of_class(strategy: PolicyStrategy, batch: Batch) -> bool:
    """Whether the batch has exactly the lengths of a measured class: one more than its limit was seen to fail."""
    return any(
        (batch.prompt_tokens, batch.output_tokens, batch.prefill_at_once_tokens)
        == (limit.lengths.prompt_tokens, limit.lengths.output_tokens, _at_once_tokens(limit))
        for limit in strategy.limits
    )


def _over_cap(weighed: BatchArithmetic) -> Iterator[BatchArithmetic]:
    prediction = weighed.prediction
    if prediction is not None and (needed := weighed.needed_bytes or 0) > weighed.cap_bytes:
        phase, cap = prediction.worst.phase, format_bytes(weighed.cap_bytes)
        mask = " and the mask of shorter prompts" if weighed.mask_bytes else ""
        reason = f"{phase} would need {format_bytes(needed)} with the reserve{mask}; the cap is {cap}"
        yield _stopped(weighed, "device", reason)


def _over_host(weighed: BatchArithmetic) -> Iterator[BatchArithmetic]:
    if weighed.host_bytes is not None and weighed.host_bytes > (weighed.host_cap_bytes or 0):
        needed, cap = format_bytes(weighed.host_bytes), format_bytes(weighed.host_cap_bytes)
        yield _stopped(weighed, "host", f"the cache would take {needed} of the host's {cap}")


def _stopped(weighed: BatchArithmetic, stop: Stop, reason: str) -> BatchArithmetic:
    return msgspec.structs.replace(weighed, stop=stop, reason=reason)


def _rows(batch: Batch) -> str:
    return f"{batch.rows:,} {'row' if batch.rows == 1 else 'rows'} of {_lengths(batch)}"


def _lengths(batch: Batch) -> str:
    chunk = "" if batch.prefill_chunk_tokens is None else f"-chunk{batch.prefill_chunk_tokens}"
    return f"p{batch.prompt_tokens}-o{batch.output_tokens}{chunk}"


def _longer_than_all(strategy: PolicyStrategy) -> str:
    measured = ", ".join(limit.lengths.label for limit in strategy.limits) or "none"
    return f"is covered by no measured length class ({measured})"


def _notes(strategy: PolicyStrategy, batch: BatchArithmetic | None) -> Iterator[str]:
    if batch is not None and batch.prediction is not None and batch.prediction.extrapolates:
        yield f"extrapolates: {'; '.join(batch.prediction.extrapolates)}"
    if strategy.calibration is None:
        if strategy.refusal is None:
            yield "no calibration: the measured limits alone decide"
        return
    for fit in strategy.calibration.fits:
        for flag in fit.flags:
            yield f"{fit.phase}: {flag}"
