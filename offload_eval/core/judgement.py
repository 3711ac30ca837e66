"""What is computed about records and what is concluded from them."""

from typing import Literal

from offload_eval.core.base import Strict
from offload_eval.core.records import Evidence

Severity = Literal["error", "warning", "note"]


class Bound(Strict, frozen=True, kw_only=True):
    """Closed-form bytes of one strategy on one workload, with what they assume."""

    evidence: Evidence = "analytic"
    kv_device_bytes_per_session: int
    """KV bytes a session holds on the device when its last token is computed."""
    kv_device_peak_bytes_per_session: int
    """The most of them at rest, over the whole generation; more than at its end where a quantizer flushes."""
    kv_device_bytes_fixed: int = 0
    """KV bytes on the device that do not grow with sessions held elsewhere."""
    kv_host_bytes_per_session: int = 0
    h2d_bytes_per_step: int = 0
    """Bytes to the device for one decode step of the whole batch, at the last step."""
    d2h_bytes_per_step: int = 0
    sessions: int | None = None
    """Sessions that fit the budget: an upper bound under the assumptions."""
    assumptions: tuple[str, ...] = ()
    source: str = ""


class Finding(Strict, frozen=True, kw_only=True):
    """Something the reader must know before trusting a number."""

    code: str
    severity: Severity
    message: str
    remedy: str = ""
    run_ids: tuple[str, ...] = ()


class Interval(Strict, frozen=True, kw_only=True):
    """A median with the range that holds the true one."""

    median: float
    low: float
    high: float
    samples: int
    confidence: float | None
    """Coverage of [low, high]; None when there are too few samples for one, and the range is min to max."""


class Comparison(Strict, frozen=True, kw_only=True):
    """One strategy against the baseline on the same workload. Ratios are strategy over baseline; 1.0 is equal."""

    workload: str
    strategy: str
    run_id: str
    baseline_run_id: str
    tpot_ratio: float | None = None
    ttft_ratio: float | None = None
    throughput_ratio: float | None = None
    prefill_peak_saved_bytes: int | None = None
    decode_peak_saved_bytes: int | None = None
    kv_device_saved_bytes: int | None = None
    sessions_gained: int | None = None
    extra_bytes_moved_per_token: float | None = None
    mean_kl_nats: float | None = None
    noise_floor_nats: float | None = None
