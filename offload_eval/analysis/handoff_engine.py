"""What the settings of both engines have in common: lengths, running requests, formats and fractions."""

from typing import Final, NamedTuple

from offload_eval.analysis.handoff_choice import Choice, cached_tokens, quantized_bits, total_tokens
from offload_eval.core.experiment import StreamedSpec
from offload_eval.core.handoff import Setting, Standing, Target
from offload_eval.units import format_bytes

_DECIMALS: Final = 10_000
EMULATED_LIMIT: Final = "EMULATED ON A CPU: do not carry this limit over; measure it on the device."
EMULATED_MEMORY: Final = "EMULATED ON A CPU: memory arithmetic, which may be carried over; no limit or time may."


class Card(NamedTuple):
    """What a fraction of the device's memory is a fraction of."""

    memory_bytes: int
    text: str
    caution: str | None

    @property
    def is_known(self) -> bool:
        """Whether there is a card: a share of the budget itself is nobody's setting."""
        return self.caution is None


class KvFormat(NamedTuple):
    """An engine's format of the cache."""

    value: str
    derivation: str
    standing: Standing


def fraction(part_bytes: int, whole_bytes: int) -> str | None:
    """A share with four decimals, rounded down so that it never asks for more; None outside (0, 1]."""
    units = part_bytes * _DECIMALS // whole_bytes
    if not 0 < units <= _DECIMALS:
        return None
    return f"{units // _DECIMALS}.{units % _DECIMALS:04d}"


def card(choice: Choice) -> Card:
    """The accelerator's memory, or the budget where the policy has no accelerator."""
    memory_bytes = choice.policy.fingerprint.accelerator_memory_bytes
    if memory_bytes is not None:
        return Card(memory_bytes, f"{format_bytes(memory_bytes)} of the card", None)
    budget_bytes = choice.policy.budget.device_bytes
    return Card(
        budget_bytes,
        f"{format_bytes(budget_bytes)}, which is budget.device_bytes",
        "RELATIVE TO budget.device_bytes, and left out: the policy names no accelerator memory. On a card, multiply "
        f"by {format_bytes(budget_bytes)} and divide by its memory.",
    )


def memory_caution(choice: Choice, other: str | None = None) -> str | None:
    """What a setting of pure memory arithmetic has to say."""
    parts = [*([EMULATED_MEMORY] if choice.is_emulated else []), *([] if other is None else [other])]
    return " ".join(parts) or None


def rows_caution(choice: Choice) -> str | None:
    """What a size has to say that is sessions times bytes."""
    if not choice.is_emulated:
        return None
    return "EMULATED ON A CPU: the bytes a token takes may be carried over, the number of sessions may not."


def dtype_setting(choice: Choice, target: Target) -> Setting:
    """The dtype that `auto` of the cache's format then means."""
    return Setting(
        target=target,
        name="--dtype",
        value=choice.policy.fingerprint.model.dtype,
        derivation="The dtype that was run; left out, the engine takes the checkpoint's.",
        standing="exact",
    )


def length_setting(choice: Choice, target: Target, name: str) -> Setting:
    """The longest session that may run: prompt and output together."""
    running = choice.running
    if running is None:
        return Setting(target=target, name=name, value=None, derivation=_nothing_runs(choice), standing="carried")
    lengths = running.lengths
    tokens = total_tokens(lengths)
    words = (
        f"{lengths.prompt_tokens:,} prompt + {lengths.output_tokens:,} output tokens = {tokens:,}, the longest class "
        f"at which {choice.running_label} admits a session. A longer request is outside every limit here."
    )
    if tokens < total_tokens(choice.limit.lengths):
        words += f" {choice.spec.label} admits {choice.limit.lengths.label} as well. {choice.running_reason}"
    return Setting(
        target=target,
        name=name,
        value=str(tokens),
        derivation=words,
        standing="exact",
        caution=_limit_caution(choice),
    )


def running_setting(choice: Choice, target: Target, name: str) -> Setting:
    """Requests that run at once: the limit of the longest class, as a point to start from."""
    running = choice.running
    caution = _limit_caution(choice)
    if running is None:
        derivation, value = _nothing_runs(choice), None
    else:
        value = str(running.sessions)
        derivation = (
            f"{running.sessions:,} sessions of {choice.running_label} at {running.lengths.label}, {running.evidence}. "
            "Where to start: shorter requests leave room for more, and an engine that runs out of blocks queues or "
            "preempts instead of failing."
        )
        if choice.running_reason:
            derivation += f" Not {choice.limit.sessions:,}: {choice.running_reason}"
    return Setting(target=target, name=name, value=value, derivation=derivation, standing="carried", caution=caution)


def kv_format(choice: Choice, narrower: str) -> KvFormat:
    """The engine's format that is closest to the strategy's.

    Args:
        choice: The strategy.
        narrower: What the engine has below 8 bits, in words.
    """
    spec, bits = choice.spec, quantized_bits(choice.spec)
    dtype = choice.policy.fingerprint.model.dtype
    if isinstance(spec, StreamedSpec) and spec.host_dtype != "native":
        return KvFormat(
            "auto",
            f"{spec.label} computes in {dtype} and stores {spec.host_dtype} on the host alone. The engine stores both "
            "in one format: the device's was taken, which loses nothing.",
            "nearest",
        )
    if bits is None:
        return KvFormat("auto", f"{spec.label} stores KV in the model's dtype, {dtype}, and so does auto.", "exact")
    if bits == 8:
        return KvFormat(
            "fp8_e4m3",
            f"{spec.label} stores 8 bits a value, and so does fp8_e4m3; scales and rounding are the engine's, so the "
            "fidelity is not what was measured.",
            "nearest",
        )
    return KvFormat(
        "fp8_e4m3",
        f"{spec.label} stores {bits} bits a value in groups with scale and zero point, which the engine does not "
        f"have. fp8_e4m3 is the nearest that is widely supported: NOT WHAT WAS MEASURED, neither its bytes "
        f"({8 / bits:g} times as many) nor its fidelity. {narrower}",
        "nearest",
    )


def host_rows_words(choice: Choice) -> str:
    """How the bytes of the host's rows come about."""
    return (
        f"{choice.limit.sessions:,} sessions * {cached_tokens(choice.limit.lengths):,} cached tokens * "
        f"{choice.strategy.host_bytes_per_session_token or 0:,.10g} host bytes a token of {choice.spec.label} = "
        f"{choice.host_rows_bytes:,} bytes"
    )


def _limit_caution(choice: Choice) -> str | None:
    if choice.is_emulated:
        return EMULATED_LIMIT
    if choice.running is None or choice.running.evidence == "measured":
        return None
    return f"NOT MEASURED: this limit is {choice.running.evidence}, an upper bound."


def _nothing_runs(choice: Choice) -> str:
    return (
        f"{choice.running_reason} The baseline {choice.running_label}, which holds all KV on the device, admits no "
        "session: within this budget an engine has no room for one."
    )


def format_setting(choice: Choice, target: Target, narrower: str) -> Setting:
    """The option that both engines have for the format of the cache."""
    stored = kv_format(choice, narrower)
    return Setting(
        target=target,
        name="--kv-cache-dtype",
        value=stored.value,
        derivation=stored.derivation,
        standing=stored.standing,
    )
