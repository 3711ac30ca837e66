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
Basis = Literal["search", "cells", "traces"]
"""What all figures at one combination of lengths are from, so that like stands beside like. search: limits that ran
and batches timed for them. cells: the experiment's cells, sessions extrapolated. traces: nothing was run."""
InGpuState = Literal["chosen", "less", "none", "unknown"]
"""The in-GPU cache beside a choice: it is the choice; it has less; it was seen to have none; it is not known."""


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
    """One strategy at one combination of lengths. None is not known, and never none."""

    strategy: str
    family: Family
    is_lossless: bool
    """Whether its output has to equal the baseline's, and was not seen to differ by more than the noise floor."""
    evidence: Evidence | None = None
    """The rung of its figures; None where it has none."""
    reason: str = ""
    """Why `sessions` is not known."""
    analytic: int | None = None
    """Sessions by arithmetic, an upper bound."""
    traced: int | None = None
    """Sessions by trace: of a search over traces, or extrapolated from the cell's."""
    sessions: int | None = None
    """As they ran, or on the basis of traces by trace; 0: not even one was seen to fit."""
    is_least: bool = False
    """Whether the search ended before the next batch was seen to fail: there may be more."""
    by_host_arithmetic: bool = False
    """Whether more ran, past the stated host budget, so that the count is the host ledger's."""
    ledger: Ledger | None = None
    """The ledger that decides `sessions`, where the budget states both."""
    oom_at: int | None = None
    """The smallest batch of a cell that ran out of memory; `sessions` is less."""
    session_run_ids: tuple[str, ...] = ()
    """The records behind `sessions`: of the limit or the cell, and of the batch that failed."""
    under_slo: TimedBatch | None = None
    """The largest batch under the objectives, below every one that is over them; of a search alone."""
    fastest: TimedBatch | None = None
    """The batch with most tokens/s of those that kept the objectives."""
    num_timed: int = 0
    """Batches with times, within the objectives or not."""
    num_swapped: int = 0
    """Batches whose times are the disk's: they count for nothing."""
    fidelity: Fidelity | None = None

    @property
    def has_no_batch(self) -> bool:
        """Whether it was seen to have no batch within the objectives: none fits, or every timed one is over them."""
        return self.sessions == 0 or self.oom_at == 1 or (self.num_timed > 0 and self.fastest is None)


class Choice(Strict, frozen=True, kw_only=True):
    """Which strategy does best at one combination of lengths, for one goal."""

    goal: Goal
    strategy: str | None
    """Of those that lose nothing; None: none of them has a batch."""
    value: float | None = None
    """Sessions, or tokens/s of the whole card."""
    is_least: bool = False
    batch_size: int | None = None
    """Sessions of the batch that gives these tokens/s."""
    in_gpu: InGpuState = "unknown"
    over_in_gpu: float | None = None
    """`value` over that of the in-GPU cache; None where there is none, or that may be more."""
    run_ids: tuple[str, ...] = ()
    in_gpu_run_ids: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    """Strategies that lose nothing and whose figure is not known."""
    lossy: str | None = None
    """A strategy that loses something and does better still; None: there is none."""
    lossy_value: float | None = None
    lossy_run_ids: tuple[str, ...] = ()


class BatchBreakEven(Strict, frozen=True, kw_only=True):
    """From which batch on a strategy gives more tokens/s than the in-GPU cache gives at any batch."""

    strategy: str
    wins_from: int | None
    """The smallest timed batch from which on all timed ones give more; None: the largest does not."""
    loses_up_to: int | None
    """The largest timed batch that does not give more; None: there is none."""
    best_ratio: float
    """Most tokens/s of the strategy over most of the in-GPU cache; 1.0 is equal."""
    best_at: int
    """The batch of `best_ratio`."""
    run_ids: tuple[str, ...]


class ContextBreakEven(Strict, frozen=True, kw_only=True):
    """From which context length on a strategy gives more tokens/s than the in-GPU cache, each at its best batch."""

    strategy: str
    output_tokens: int
    prefill_chunk_tokens: int | None = None
    attn_implementation: Attention | None = None
    tokens: tuple[int, ...]
    """Context lengths, prompt and output, at which it is known of both what they give."""
    wins_from: int | None
    """The shortest from which on all give more; None: the longest does not. Where one of the two was seen to have no
    batch, the other gives more."""
    best_ratio: float | None
    """None where at no length both have a batch."""
    best_at: int | None
    """The context length of `best_ratio`."""
    without_in_gpu: tuple[int, ...] = ()
    """Of `tokens`, those at which the in-GPU cache was seen to have no batch."""
    is_searched: bool = True
    """Whether batches up to each limit were timed. Otherwise it is of the batches that the experiment names."""
    run_ids: tuple[str, ...]


class Situation(Strict, frozen=True, kw_only=True):
    """All strategies at one combination of lengths."""

    lengths: Lengths
    workloads: tuple[str, ...] = ()
    """Labels of the experiment's workloads that have these lengths."""
    basis: Basis
    in_gpu: str | None = None
    """The in-GPU cache that the others are held against."""
    standings: tuple[Standing, ...] = ()
    choices: tuple[Choice, ...] = ()
    break_evens: tuple[BatchBreakEven, ...] = ()

    @property
    def in_gpu_standing(self) -> Standing | None:
        """That of the in-GPU cache."""
        return next((each for each in self.standings if each.strategy == self.in_gpu), None)

    def over_in_gpu(self, standing: Standing) -> float | None:
        """Sessions over the in-GPU cache's; None where one is not known, or the in-GPU cache may have more."""
        base = self.in_gpu_standing
        if base is None or base.is_least or not base.sessions or standing.sessions is None:
            return None
        return standing.sessions / base.sessions


class Verdict(Strict, frozen=True, kw_only=True):
    """What a run concludes."""

    ttft_limit_s: float | None = None
    """Stated objective; None: none was stated."""
    tpot_limit_s: float | None = None
    situations: tuple[Situation, ...] = ()
    break_evens: tuple[ContextBreakEven, ...] = ()
    num_left_out: int = 0
    """Runs of cells that were made with another model, budget, version or machine than the last one: no part of it."""
