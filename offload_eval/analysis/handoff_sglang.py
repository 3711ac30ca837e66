"""Settings of `python -m sglang.launch_server`.

Source: SGLang at commit 004813e1, docs/advanced_features/server_arguments.md ("Server Arguments"):
mem-fraction-static is the share of memory for weights and the KV pool; context-length, max-running-requests;
kv-cache-dtype takes auto, bfloat16, fp8_e5m2, fp8_e4m3 and fp4_e2m1. srt/model_executor, _profile_available_bytes: the
pool gets what is free after loading less (1 - fraction) of what was free before; activations and CUDA graphs live in
that rest. srt/mem_cache, HostKVCache: hicache-size is in 1e9 bytes for each rank and wins over hicache-ratio (2.0 by
default); a host pool no larger than the device's is an error in older releases and a warning in newer ones.

Source: docs.sglang.io, "SGLang HiCache Best Practices": the hierarchical cache holds KV for prefixes that come again.
"""

from typing import Final

from offload_eval.analysis.handoff_choice import Choice
from offload_eval.analysis.handoff_engine import (
    card,
    dtype_setting,
    format_setting,
    fraction,
    host_rows_words,
    length_setting,
    memory_caution,
    rows_caution,
    running_setting,
)
from offload_eval.core.handoff import Setting
from offload_eval.core.policy import PolicyStrategy
from offload_eval.units import format_bytes

_GB: Final = 1000**3
_NARROWER: Final = "SGLang also takes fp4_e2m1 on recent hardware: another format, to be measured there."


def sglang_settings(choice: Choice) -> tuple[Setting, ...]:
    """The options, in the order they are typed."""
    return (
        dtype_setting(choice, "sglang"),
        _static_fraction(choice),
        length_setting(choice, "sglang", "--context-length"),
        running_setting(choice, "sglang", "--max-running-requests"),
        format_setting(choice, "sglang", _NARROWER),
        *_hierarchical(choice),
    )


def _static_fraction(choice: Choice) -> Setting:
    """Weights and KV pool: the cap, less the activations of one prefill where the fit knows them."""
    cap_bytes, whole = choice.policy.cap_bytes, card(choice)
    activations_bytes = _prefill_activations(choice)
    share = fraction(cap_bytes - (activations_bytes or 0), whole.memory_bytes)
    cap = f"{format_bytes(cap_bytes)} cap (budget - runtime - reserve)"
    if activations_bytes is None:
        sizes = f"{cap} / {whole.text}"
        bound = " No fit says what activations take: an upper bound, to be lowered where a prefill runs out of memory."
    else:
        fit = f"{format_bytes(activations_bytes)} activations of one prefill by the fit of {choice.running_label}"
        sizes, bound = f"({cap} - {fit}) / {whole.text}", ""
    return Setting(
        target="sglang",
        name="--mem-fraction-static",
        value=share if whole.is_known else None,
        derivation=f"{sizes} is not a share of it: the budget does not fit this card."
        if share is None
        else f"{sizes} = {share}, rounded down.{bound} The engine counts weights and KV pool here; activations and "
        "CUDA graphs live in the rest, and its own are others than transformers'. It takes the share of what is free "
        "before loading, which is less than the whole card.",
        standing="nearest",
        caution=memory_caution(choice, whole.caution),
    )


def _prefill_activations(choice: Choice) -> int | None:
    """Bytes that one session's prefill takes beyond weights and cache.

    Returns:
        None without anything to run, without a fit, and where the fit cannot tell them from the cache's.
    """
    running = choice.running
    strategy = _by_label(choice, choice.running_label)
    if running is None or strategy is None or strategy.calibration is None:
        return None
    tokens = running.lengths.prefill_chunk_tokens or running.lengths.prompt_tokens
    fits = [fit for fit in strategy.calibration.fits if fit.phase == "prefill"]
    if not fits or "bytes_per_prefill_token" in fits[0].not_told_apart:
        return None
    return round(fits[0].bytes_per_prefill_token * tokens)


def _by_label(choice: Choice, label: str) -> PolicyStrategy | None:
    return next((each for each in choice.policy.strategies if each.strategy.label == label), None)


def _hierarchical(choice: Choice) -> tuple[Setting, ...]:
    """Host rows as the second tier of the prefix cache; nothing where the strategy holds none."""
    rows_bytes = choice.host_rows_bytes
    if rows_bytes == 0:
        return ()
    size = -(-rows_bytes // _GB)
    return (
        Setting(
            target="sglang",
            name="--enable-hierarchical-cache",
            value="",
            derivation=f"{choice.spec.label} holds KV on the host; the engine does so for prefixes that come again, "
            "not for a larger running batch.",
            standing="nearest",
        ),
        Setting(
            target="sglang",
            name="--hicache-size",
            value=str(size),
            derivation=f"{host_rows_words(choice)}, in whole GB of 1e9 bytes, rounded up; for each rank. It wins over "
            "--hicache-ratio, which is left out. Older releases refuse a host pool that is not larger than the "
            f"device's, which may have up to {format_bytes(_most_pool_bytes(choice))} here: there, raise it.",
            standing="nearest",
            caution=rows_caution(choice),
        ),
    )


def _most_pool_bytes(choice: Choice) -> int:
    """What the cap leaves for a pool beside weights, where these are stated."""
    return max(0, choice.policy.cap_bytes - (choice.policy.budget.weights_bytes or 0))
