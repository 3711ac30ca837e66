"""What a policy answers for a population: who is admitted, and the arithmetic behind it."""

from typing import Literal

from offload_eval.core.base import Strict
from offload_eval.core.records import Evidence, Phase


class Batch(Strict, frozen=True, kw_only=True):
    """One left-padded batch: every row is as long as the longest prompt and the longest generation in it."""

    rows: int
    """Sessions, each as often as it has beams."""
    prompt_tokens: int
    output_tokens: int
    prefill_chunk_tokens: int | None = None
    """Prompt tokens prefilled at once; None: the whole prompt."""
    is_padded: bool = False
    """Whether rows have shorter prompts than the longest: they are padded, and a mask says where."""

    @property
    def prefill_at_once_tokens(self) -> int:
        """Prompt tokens that a row prefills at once."""
        return min(self.prefill_chunk_tokens or self.prompt_tokens, self.prompt_tokens)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that all rows together prefill at once."""
        return self.rows * self.prefill_at_once_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens that a row holds when generation ends; the last one is never cached."""
        return self.tokens("decode")

    def tokens(self, phase: Phase) -> int:
        """Tokens that a row holds when a phase ends."""
        return self.prompt_tokens if phase == "prefill" else self.prompt_tokens + self.output_tokens - 1


class PeakTerm(Strict, frozen=True, kw_only=True):
    """One term of a calibrated peak."""

    name: str
    arithmetic: str
    """The product in words and numbers; empty for a constant."""
    bytes: int
    """Rounded up."""


class PredictedPeak(Strict, frozen=True, kw_only=True):
    """The calibrated peak of one phase."""

    phase: Phase
    terms: tuple[PeakTerm, ...]
    bytes: int
    """Sum of the terms."""


class Prediction(Strict, frozen=True, kw_only=True):
    """The calibrated peaks of a batch, and whether such a batch was measured."""

    batch: Batch
    peaks: tuple[PredictedPeak, ...]
    extrapolates: tuple[str, ...]
    """Where the batch lies outside of what was measured, in words; empty: within."""

    @property
    def worst(self) -> PredictedPeak:
        """The higher of the phases."""
        return max(self.peaks, key=lambda peak: peak.bytes)


Stop = Literal["host", "device", "measured limit", "not measured"]
"""What a batch is too large for; not measured: nothing says that it fits."""


class BatchArithmetic(Strict, frozen=True, kw_only=True):
    """One batch against a policy: the calibrated peak and the reserve under the cap, and the measured limit."""

    batch: Batch
    prediction: Prediction | None
    """Of the batch with lengths below the shortest measured ones counted as those; None without a calibration."""
    reserve_bytes: int
    """Of the calibration, and what was asked for on top."""
    mask_bytes: int = 0
    """The most that an attention mask of rows with padding takes: rows of one length need none, and were measured."""
    cap_bytes: int
    host_bytes: int | None = None
    """What the cache takes on the host; None where it takes none, or none is limited."""
    host_cap_bytes: int | None = None
    covering_class: str | None = None
    """The smallest measured length class that no row is longer than; None: there is none."""
    covering_sessions: int | None = None
    """Its measured limit."""
    stop: Stop | None = None
    """The first thing that the batch is too large for; None: it may be admitted."""
    reason: str = ""
    """That, in words and numbers."""

    @property
    def needed_bytes(self) -> int | None:
        """The worse phase's peak with the mask and the reserve."""
        if self.prediction is None:
            return None
        return self.prediction.worst.bytes + self.mask_bytes + self.reserve_bytes


class GroupAnswer(Strict, frozen=True, kw_only=True):
    """What becomes of the sessions of one group."""

    name: str
    sessions: int
    admitted: int
    queued: int
    """Would fit alone, but not beside those that are admitted; or wait behind such a one."""
    refused: int
    """Do not fit alone, or nothing says that they do."""
    reason: str = ""
    """Why not all are admitted."""


class StrategyAnswer(Strict, frozen=True, kw_only=True):
    """A population under one strategy."""

    strategy: str
    kind: str
    evidence: Evidence | None
    """Rung of the measured limits; None without one."""
    groups: tuple[GroupAnswer, ...]
    batch: BatchArithmetic | None = None
    """All admitted sessions; None: none are."""
    one_more: BatchArithmetic | None = None
    """With the first session that is queued, or the first refused one alone where none is."""
    notes: tuple[str, ...] = ()
    """What speaks against the answer: extrapolation, and what speaks against the calibration."""


class PolicyAnswer(Strict, frozen=True, kw_only=True):
    """The answer of `policy apply`."""

    policy: str
    cap_bytes: int
    strategies: tuple[StrategyAnswer, ...]
    assumptions: tuple[str, ...]
