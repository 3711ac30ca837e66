"""What a run concludes for whoever has to decide: what each strategy buys, what it costs, and which to choose."""

from typing import Literal

from offload_eval.core.base import Strict
from offload_eval.core.experiment import Attention
from offload_eval.core.judgement import Ledger
from offload_eval.core.limits import Lengths, TimedBatch
from offload_eval.core.records import Evidence

Family = Literal["in-GPU", "offload", "quantization"]
"""Where a strategy keeps the KV cache: on the device as the model made it, in host memory, or on the device in fewer
bits. What is quantized in host memory is offload."""
Goal = Literal["sessions", "tokens_per_s"]


class Fidelity(Strict, frozen=True, kw_only=True):
    """What a strategy's output is against the baseline's: of the cell with the highest mean KL at some lengths."""

    workload: str
    """Its label: of other lengths where there is no cell of the same."""
    mean_kl_nats: float
    noise_floor_nats: float | None
    """The baseline against itself in chunks; None: it was not looked at."""
    top1_agreement_ratio: float
    bit_equal: bool
    run_id: str


class Standing(Strict, frozen=True, kw_only=True):
    """One strategy at one combination of lengths."""

    strategy: str
    family: Family
    is_lossless: bool
    """Whether its output has to equal the baseline's."""
    evidence: Evidence | None = None
    """The rung of `sessions` and of times; None where there is neither."""
    refusal: str = ""
    """Why it has no result, in words."""
    analytic: int | None = None
    """Sessions by arithmetic, an upper bound."""
    traced: int | None = None
    """The largest batch whose traced peaks fit, or extrapolated from one traced batch; see `is_searched`."""
    sessions: int | None = None
    """Sessions as they ran: the searched limit, or extrapolated from the peak of one batch; see `is_searched`."""
    is_searched: bool = False
    """Whether a search found the sessions. Otherwise they are extrapolated from one batch."""
    is_exact: bool = False
    """Whether the next larger batch was seen to fail."""
    ledger: Ledger | None = None
    """The ledger that decides `sessions`, where the budget states both."""
    session_run_ids: tuple[str, ...] = ()
    """The runs behind `sessions`: of the limit, and of the batch that failed."""
    largest: TimedBatch | None = None
    """The largest batch that was timed and kept the objectives."""
    fastest: TimedBatch | None = None
    """The batch with most tokens/s of those that kept the objectives."""
    num_timed: int = 0
    """Batches that were timed, within the objectives or not."""
    fidelity: Fidelity | None = None


class Choice(Strict, frozen=True, kw_only=True):
    """Which strategy does best at one combination of lengths, for one goal."""

    goal: Goal
    strategy: str
    value: float
    """Sessions, or tokens/s of the whole card."""
    batch_size: int | None = None
    """Sessions of the batch that gives these tokens/s."""
    over_in_gpu: float | None = None
    """`value` over that of the in-GPU cache; None where it has none."""
    run_ids: tuple[str, ...] = ()
    in_gpu_run_ids: tuple[str, ...] = ()
    lossy: str | None = None
    """A strategy that loses something and does better still; None: there is none."""
    lossy_value: float | None = None
    lossy_run_ids: tuple[str, ...] = ()


class BatchBreakEven(Strict, frozen=True, kw_only=True):
    """From which batch on a strategy gives more tokens/s than the in-GPU cache gives at any batch."""

    strategy: str
    wins_from: int | None
    """The smallest batch that was timed and gives more; None: none does."""
    loses_up_to: int | None
    """The largest smaller batch that was timed; None: there is none."""
    best_ratio: float
    """Most tokens/s of the strategy over most of the in-GPU cache; 1.0 is equal."""
    best_at: int
    """The batch of `best_ratio`."""
    run_ids: tuple[str, ...]


class ContextBreakEven(Strict, frozen=True, kw_only=True):
    """From which context length on a strategy gives more tokens/s than the in-GPU cache, each at its best batch."""

    strategy: str
    prefill_chunk_tokens: int | None = None
    attn_implementation: Attention | None = None
    tokens: tuple[int, ...]
    """Context lengths at which the strategy was timed, prompt and output."""
    wins_from: int | None
    """The shortest from which on all give more; None: the longest does not. Where the in-GPU cache has no batch within
    the objectives, or none at all, the strategy gives more."""
    best_ratio: float | None
    """None where the in-GPU cache has no batch at any length."""
    best_at: int | None
    """The context length of `best_ratio`."""
    is_searched: bool = True
    """Whether batches up to each limit were timed. Otherwise it is of the batches that the experiment names."""
    run_ids: tuple[str, ...]


class Situation(Strict, frozen=True, kw_only=True):
    """All strategies at one combination of lengths."""

    lengths: Lengths
    workloads: tuple[str, ...] = ()
    """Labels of the experiment's workloads that have these lengths."""
    in_gpu: str | None = None
    """The in-GPU cache that the others are held against."""
    standings: tuple[Standing, ...] = ()
    choices: tuple[Choice, ...] = ()
    break_evens: tuple[BatchBreakEven, ...] = ()


class Verdict(Strict, frozen=True, kw_only=True):
    """What a run concludes."""

    ttft_limit_s: float | None = None
    """Stated objective; None: none was stated."""
    tpot_limit_s: float | None = None
    situations: tuple[Situation, ...] = ()
    break_evens: tuple[ContextBreakEven, ...] = ()
