"""Resources of a pod in Kubernetes.

Source: kubernetes.io, "Schedule GPUs": a GPU is stated in limits; a request may be stated too and must be equal.
"Linux Node Swap Behaviors" and kubernetes pull request 125277: pods have no swap unless the node says LimitedSwap, and
then a container whose memory request equals its limit has none either.
"""

from typing import Final

from offload_eval.analysis.handoff_choice import Choice
from offload_eval.analysis.handoff_engine import host_rows_words
from offload_eval.core.handoff import Setting
from offload_eval.units import MIB, format_bytes

MARGIN_PERCENT: Final = 10
"""Of resident set and pinned memory together: page cache that is in use, and processes beside the worker."""


def pod_settings(choice: Choice) -> tuple[Setting, ...]:
    """Memory, requested and limited alike, and the device."""
    memory = _memory(choice)
    return (
        memory,
        Setting(
            target="kubernetes",
            name="resources.limits.memory",
            value=memory.value,
            derivation="Equal to the request: what is requested is what may be used, and none of it is swapped.",
            standing=memory.standing,
            caution=memory.caution,
        ),
        Setting(
            target="kubernetes",
            name="nvidia.com/gpu",
            value="1",
            derivation="One process on one device was "
            f"{'emulated' if choice.is_emulated else 'run'}. amd.com/gpu on a node with AMD devices.",
            standing="exact",
        ),
    )


def _memory(choice: Choice) -> Setting:
    name, rss_bytes = "resources.requests.memory", choice.strategy.peak_host_rss_bytes
    if rss_bytes is None:
        return Setting(
            target="kubernetes",
            name=name,
            value=None,
            derivation=f"No resident set of {choice.spec.label} was measured: state it by hand, twice the same.",
            standing="nearest",
        )
    pinned_bytes, pinned_words = _pinned(choice)
    sum_bytes = rss_bytes + pinned_bytes
    margin_bytes = -(-sum_bytes * MARGIN_PERCENT // 100)
    mebibytes = -(-(sum_bytes + margin_bytes) // MIB)
    return Setting(
        target="kubernetes",
        name=name,
        value=f"{mebibytes}Mi",
        derivation=f"{format_bytes(rss_bytes)} peak resident set of a worker + {pinned_words} + "
        f"{format_bytes(margin_bytes)} margin ({MARGIN_PERCENT} %) = {mebibytes:,} MiB, rounded up. Swap is not part "
        "of it. Of this toolkit's worker: an engine has processes of its own and shared memory, which counts as well.",
        standing="nearest",
        caution="EMULATED ON A CPU: the resident set holds what would lie on the device, weights included. Measure it "
        "on the device."
        if choice.is_emulated
        else None,
    )


def _pinned(choice: Choice) -> tuple[int, str]:
    """Host memory that a resident set may not show, and words for it."""
    pinned_bytes, rows_bytes = choice.strategy.pinned_allocated_bytes or 0, choice.host_rows_bytes
    if choice.is_emulated:
        return 0, "0 B pinned (an emulated host tier lies in the resident set)"
    if rows_bytes > pinned_bytes:
        return rows_bytes, f"{format_bytes(rows_bytes)} of host rows ({host_rows_words(choice)})"
    if pinned_bytes == 0:
        return 0, "0 B pinned"
    return pinned_bytes, (
        f"{format_bytes(pinned_bytes)} pinned, as its allocator rounds it (at worst it is in the resident set as well)"
    )
