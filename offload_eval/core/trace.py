"""What a run on tensors without data shows: bytes that live, and bytes that cross the link."""

from typing import Literal

from offload_eval.core.base import Strict
from offload_eval.core.experiment import DeviceName, StrategySpec, Workload
from offload_eval.core.latency import LatencyBounds

KV_CACHE = "kv_cache"
"""Last part of a contributor's module for what the cache allocates while that module updates it."""


class Contributor(Strict, frozen=True, kw_only=True):
    """What one operator of one module, in all layers together, held at a peak."""

    module: str
    """Dotted name in the model, layer numbers replaced by `*`, with `.kv_cache` after it for what the cache allocates;
    `generate` for what lies outside the model, `prompt` for what is there before the model runs, and `weights` for
    its parameters and buffers."""
    operator: str
    """The operator that allocated the bytes."""
    bytes: int


class PhaseTrace(Strict, frozen=True, kw_only=True):
    """The whole prefill, or one decode step. It ends when its token is on the host."""

    live_device_bytes: int
    """Bytes on the device when the phase ends, weights included."""
    peak_device_bytes: int
    """Highest bytes on the device during the phase."""
    kv_device_bytes: int | None = None
    """Payload of the cache's tensors on the device when the phase ends, as a run counts it."""
    kv_host_bytes: int | None = None
    live_host_bytes: int
    """Bytes in host memory that the run holds when the phase ends."""
    peak_host_bytes: int
    """Highest bytes in host memory during the phase."""
    h2d_bytes: int
    """Bytes that crossed the link into the device."""
    d2h_bytes: int
    num_h2d_copies: int
    num_d2h_copies: int
    matmul_flops: int
    """Floating-point operations of matrix products, convolutions and attention, two for a multiply-add."""
    attention_flops: int
    """Those of them in fused attention operators."""
    hidden_flops: int
    """Those of them that a causal kernel skips: about half of a whole prompt's attention."""
    weights_read_bytes: int
    """The least of the weights that operators read, once for each forward pass: of embeddings the rows looked up, of
    experts as many as one token is routed to."""
    touched_bytes: int
    """Bytes that operators read and wrote: each one's inputs and outputs once. Views touch nothing."""
    contributors: tuple[Contributor, ...]
    """Everything that lived at the peak, largest first; the sum is `peak_device_bytes`."""
    timeline_bytes: tuple[int, ...]
    """Highest live bytes in equal parts of the phase, by count of allocations."""


class StepTrace(PhaseTrace, frozen=True, kw_only=True):
    """One decode step."""

    step: int
    """Counted from 1, which computes the second token; the last is `output_tokens - 1`."""
    requantizes: bool = False
    """Whether a quantized cache quantizes all it holds anew in this step."""


class Trace(Strict, frozen=True, kw_only=True):
    """One strategy on one workload, without data."""

    evidence: Literal["traced"] = "traced"
    strategy: StrategySpec
    workload: Workload
    device: DeviceName
    """Whose operators were followed."""
    attn_implementation: str
    weights_bytes: int
    """Parameters and buffers, tied ones once."""
    logits_modules: tuple[str, ...] = ()
    """Contributors that hold logits: the output head, what the model does after it, and generate()'s copies."""
    prefill: PhaseTrace
    steps: tuple[StepTrace, ...]
    """The decode steps that were traced, in order; the last one is the workload's last."""
    assumptions: tuple[str, ...] = ()

    @property
    def decode(self) -> StepTrace:
        """The last step, when the cache is largest."""
        return self.steps[-1]

    @property
    def highest_step(self) -> StepTrace:
        """The first of the traced steps whose peak is highest."""
        return max(self.steps, key=lambda step: step.peak_device_bytes)

    @property
    def busiest_step(self) -> StepTrace:
        """The last of the traced steps that moves most over the link: the very last may fetch nothing ahead."""
        return max(reversed(self.steps), key=lambda step: step.h2d_bytes + step.d2h_bytes)

    @property
    def decode_peak_device_bytes(self) -> int:
        """The highest peak of all traced steps: the first may hold what prefill left, a flush its transients."""
        return max(step.peak_device_bytes for step in self.steps)

    @property
    def kv_host_peak_bytes(self) -> int:
        """The most that the cache has on the host, as asked for; 0 where it has nothing there when generation ends.

        The highest host bytes of any traced phase, without what generate() holds there besides, its tokens: what is
        live after the last step, when every buffer is full, beyond the payload.
        """
        payload_bytes = self.decode.kv_host_bytes
        if not payload_bytes:
            return 0
        peak_bytes = max(phase.peak_host_bytes for phase in (self.prefill, *self.steps))
        return peak_bytes - max(0, self.decode.live_host_bytes - payload_bytes)


class TracedAdmission(Strict, frozen=True, kw_only=True):
    """The largest batches whose traced peaks fit a budget, without what an allocator rounds up and fragments."""

    available_bytes: int
    """Device bytes for weights, cache and activations: the budget less runtime and reserve."""
    prefill_sessions: int
    """The largest batch whose prefill fits."""
    decode_sessions: int
    """The largest batch whose decode steps fit."""
    limit: int
    """The smaller of the two, and of `host_sessions` where there is one."""
    host_available_bytes: int | None = None
    """Host bytes for the cache; None: the budget states none, and the host's ledger is not looked at."""
    host_sessions: int | None = None
    """The largest batch whose cache fits them, as asked for, without a pinned allocator's rounding; None where the
    cache has nothing on the host."""
    limiting_ledger: Literal["device", "host"] | None = None
    """The one that admits fewer; None without `host_available_bytes`."""
    is_capped: bool = False
    """Whether the search stopped at the largest batch that is tried."""
    num_traces: int
    """Batches that were traced to find it; the limit and the next batch are among them."""


class TracedCell(Strict, frozen=True, kw_only=True):
    """One strategy on one workload, as `trace` answers."""

    kind: str
    strategy: str
    workload: str
    refusal: str | None = None
    """Why it cannot be traced."""
    trace: Trace | None = None
    latency: LatencyBounds | None = None
    """None without a hardware profile."""
    admission: TracedAdmission | None = None
    """None without a budget."""
    admission_refusal: str | None = None
    """Why there is no admission: a batch on the way to it cannot be traced."""
