"""From an admission policy to the settings of vLLM, SGLang and Kubernetes; pure, and only what the policy says."""

from collections.abc import Callable, Collection
from pathlib import PurePath
from typing import Final

from offload_eval.analysis.handoff_choice import Choice, choose, keeps_kv_on_host
from offload_eval.analysis.handoff_pod import pod_settings
from offload_eval.analysis.handoff_sglang import sglang_settings
from offload_eval.analysis.handoff_vllm import vllm_settings
from offload_eval.core.handoff import TARGETS, HandOff, Setting, Target
from offload_eval.core.policy import AdmissionPolicy

_SETTINGS: Final[dict[Target, Callable[[Choice], tuple[Setting, ...]]]] = {
    "vllm": vllm_settings,
    "sglang": sglang_settings,
    "kubernetes": pod_settings,
}


def derive_settings(policy: AdmissionPolicy, strategy_label: str | None = None) -> tuple[Setting, ...]:
    """The settings of every target; see `derive_hand_off`."""
    return derive_hand_off(policy, strategy_label).settings


def derive_hand_off(
    policy: AdmissionPolicy, strategy_label: str | None = None, targets: Collection[Target] = TARGETS
) -> HandOff:
    """Derives the settings that stand for one strategy of a policy.

    Args:
        policy: Its limits are of transformers' caches, in one batch that starts at once.
        strategy_label: None: the lossless strategy with most sessions at the longest class; ties go to the baseline.
        targets: Of these; in the order of `TARGETS`.

    Raises:
        InputError: The policy has no strategy of this label, or it admits no session.
    """
    choice = choose(policy, strategy_label)
    wanted = [target for target in TARGETS if target in targets]
    return HandOff(
        policy=policy.name,
        model=policy.fingerprint.model,
        strategy=choice.spec.label,
        chosen=choice.reason,
        lengths=choice.limit.lengths,
        evidence=choice.limit.evidence,
        cautions=_cautions(choice),
        settings=tuple(setting for target in wanted for setting in _SETTINGS[target](choice)),
        notes=_notes(choice, wanted),
    )


def _cautions(choice: Choice) -> tuple[str, ...]:
    cautions = []
    if choice.is_emulated:
        cautions.append(
            "EMULATED ON A CPU. Memory arithmetic may be carried over; limits and times may not: measure them on the "
            "device before anybody relies on them."
        )
    elif choice.limit.evidence != "measured":
        cautions.append(f"NOT MEASURED: the limits are {choice.limit.evidence}, an upper bound.")
    source = choice.policy.fingerprint.model.source
    if source is not None and PurePath(source).is_absolute():
        cautions.append(f"MODEL stands for {PurePath(source).name}, wherever it lies.")
    if source is None:
        cautions.append("The weights were random, built from a config alone: MODEL stands for the checkpoint.")
    return tuple(cautions)


def _notes(choice: Choice, targets: Collection[Target]) -> tuple[str, ...]:
    engines = bool({"vllm", "sglang"} & set(targets))
    notes = []
    if engines:
        notes.append(
            "The policy is of transformers' caches: one batch, padded, all sessions starting together. An engine "
            "pages its cache and admits one request after another: its own limit is another one."
        )
    if engines and keeps_kv_on_host(choice.spec):
        notes.append(
            "An engine's KV offloading keeps blocks of finished and preempted requests for reuse. It saves prefills; "
            "it does not make the running batch larger, which is what this strategy did."
        )
    if "vllm" in targets:
        notes.append(
            "vLLM's --swap-space is gone since 0.18.0, and the V1 engine never used it: --kv-offloading-size is not "
            "its new name but another feature."
        )
    return tuple(notes)
