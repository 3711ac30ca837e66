"""The two ledgers of a plan, a line each."""

from offload_eval.core.plan import DeviceLedger, HostLedger
from offload_eval.units import format_bytes


def shortage_bytes(ledger: DeviceLedger) -> int:
    """Bytes that weights, activations, runtime and reserve lack; 0 where they fit."""
    taken_bytes = ledger.weights_bytes + ledger.activations_bytes + ledger.runtime_bytes + ledger.reserve_bytes
    return max(0, taken_bytes - ledger.budget_bytes)


def device_line(ledger: DeviceLedger) -> str:
    """Budget less everything that KV cannot have."""
    parts = [
        ("weights", ledger.weights_bytes),
        (_activation_words(ledger), ledger.activations_bytes),
        ("runtime", ledger.runtime_bytes),
        ("reserve", ledger.reserve_bytes),
    ]
    taken = "".join(f" - {format_bytes(size)} {name}" for name, size in parts if size)
    short = shortage_bytes(ledger)
    left = f"{format_bytes(short)} short" if short else f"{format_bytes(ledger.kv_bytes)} for KV cache"
    source = "" if ledger.budget_from is None else f" (memory of {ledger.budget_from}, no budget stated)"
    return f"Device ledger, a rank: {format_bytes(ledger.budget_bytes)}{source}{taken} = {left}."


def _activation_words(ledger: DeviceLedger) -> str:
    if ledger.prefill_tokens is None:
        return "activations"
    return f"activations (a prefill of {ledger.prefill_tokens:,} tokens)"


def host_line(ledger: HostLedger) -> str:
    """What pinned KV may take, and of what."""
    if ledger.kv_bytes is None:
        return "Host ledger: no capacity is stated (--host-gib), so that it limits nothing."
    stated = [
        f"{format_bytes(size)} {name}"
        for name, size in (("RAM", ledger.memory_bytes), ("limit of the control group", ledger.limit_bytes))
        if size is not None
    ]
    least = f"the smaller of {' and '.join(stated)}" if len(stated) > 1 else stated[0]
    reserve = f", less {format_bytes(ledger.reserve_bytes)} reserve" if ledger.reserve_bytes else ""
    return f"Host ledger: {least}{reserve}: {format_bytes(ledger.kv_bytes)} for pinned KV; swap is no capacity."
