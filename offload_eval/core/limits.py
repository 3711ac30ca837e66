"""What a capacity search concludes: the largest batch of a strategy at its lengths, and what stopped it."""

from typing import Literal

from offload_eval.core.base import Strict
from offload_eval.core.experiment import Attention, StrategySpec
from offload_eval.core.judgement import Ledger
from offload_eval.core.records import Evidence, Phase

Exhausted = Literal["device", "host", "time"]
"""What a larger batch runs out of; time: of the cell's timeout."""


class Lengths(Strict, frozen=True, kw_only=True):
    """A combination of lengths: a workload without its batch."""

    prompt_tokens: int
    output_tokens: int
    prefill_chunk_tokens: int | None = None
    attn_implementation: Attention | None = None

    @property
    def label(self) -> str:
        """The lengths, and what differs from the model's own attention and a whole prefill."""
        parts = [
            f"p{self.prompt_tokens}-o{self.output_tokens}",
            *([] if self.prefill_chunk_tokens is None else [f"chunk{self.prefill_chunk_tokens}"]),
            *([] if self.attn_implementation is None else [self.attn_implementation]),
        ]
        return "-".join(parts)


class TimedBatch(Strict, frozen=True, kw_only=True):
    """Medians of a batch's timed runs. Every figure is of the whole batch at once, all sessions starting together."""

    sessions: int
    trials: int
    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    """Output tokens of all sessions over the end-to-end latency, prefill included."""
    swapped: bool = False
    """Whether the machine swapped meanwhile: the times are the disk's."""
    run_id: str


class CapacityLimit(Strict, frozen=True, kw_only=True):
    """The largest batch of one strategy at one combination of lengths: by arithmetic, by trace and as it ran."""

    lengths: Lengths
    strategy: StrategySpec
    kind: str
    label: str
    is_in_gpu: bool = False
    """Whether this is the in-GPU cache that the others are held against."""
    evidence: Evidence
    """Rung of the limit: emulated on a CPU; traced where nothing was run, and `measured` is None."""
    cap_bytes: int | None = None
    """What the device tier was held to, of a traced limit what it has: the budget less runtime and reserve."""
    analytic: int | None = None
    """Sessions by arithmetic, of the smaller ledger; None where it refuses the model."""
    analytic_ledger: Ledger | None = None
    """The ledger that decides `analytic`."""
    traced: int | None = None
    """The largest batch whose traced peaks fit; None where it cannot be traced."""
    measured: int | None = None
    """The largest batch that ran to its end; 0: not even one session; None: the search could not be made."""
    failed_at: int | None = None
    """The smallest batch that did not, of a traced limit the one whose peaks do not fit; None: none failed."""
    refusal: str | None = None
    """Why there is no measured limit."""
    probes: int = 0
    """Batches that were tried for the limit."""
    passes: int = 0
    """Runs of the limit that ended well."""
    repeats: int = 0
    """Runs of the limit that were asked for."""
    limited_by: str = ""
    """What stops the next batch, in words: ledger, phase and the largest part of the peak that grows with it."""
    limiting_ledger: Exhausted | None = None
    limiting_phase: Phase | None = None
    limiting_part: str | None = None
    difference: str = ""
    """What lies between the traced and the measured limit, in words; empty where they agree."""
    in_gpu: int | None = None
    """The limit of the in-GPU cache at the same lengths, on the same rung; None where it is not known to the
    session."""
    at_limit: TimedBatch | None = None
    at_in_gpu_limit: TimedBatch | None = None
    """This strategy at the limit of the in-GPU cache, where it can run that batch."""
    in_gpu_at_limit: TimedBatch | None = None
    """The in-GPU cache at its own limit."""
    under_slo: TimedBatch | None = None
    """The largest batch that was timed under the stated limits of TTFT and TPOT."""
    slo_failed_at: int | None = None
    """The smallest batch that was timed over them, or that did not run."""
    run_ids: tuple[str, ...] = ()
    """Of every probe, in the order they ran."""
    limit_run_ids: tuple[str, ...] = ()
    """Those of them that the limit rests on: its own runs, and those of the batch that failed. Of a traced limit, its
    traces: `traced_run_ids`."""
    traced_run_ids: tuple[str, ...] = ()
    """Of the traces that `traced` rests on: of that batch, where there is one, and of the next. Of a limit that a
    trace refuses, of that trace."""

    @property
    def sessions(self) -> int | None:
        """The limit on its own rung: as it ran, or by trace where nothing was run."""
        return self.traced if self.evidence == "traced" else self.measured

    @property
    def gain_over_in_gpu(self) -> float | None:
        """Sessions over those of the in-GPU cache, the least of a range; None where one of them is not known."""
        return self.sessions / self.in_gpu if self.sessions is not None and self.in_gpu else None

    @property
    def is_exact(self) -> bool:
        """Whether the next larger batch was seen to fail, or by trace not to fit."""
        return self.sessions is not None and self.failed_at == self.sessions + 1
