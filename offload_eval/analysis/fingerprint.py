"""What a policy's limits hold for, and which of them a change concerns."""

from collections.abc import Iterator
from typing import Final

from offload_eval import __version__
from offload_eval.core.experiment import DeviceName, ModelSpec, QuantizedSpec, StrategySpec
from offload_eval.core.machine import Machine
from offload_eval.core.policy import AdmissionPolicy, ConcernedStrategy, Difference, Fingerprint, PolicyStrategy
from offload_eval.core.shape import ModelFacts

OWN_PACKAGE: Final = "offload-eval"
LIMIT_PACKAGES: Final = ("accelerate", "flash-attn", "hqq", "optimum-quanto", "torch", "transformers", "triton")
"""Recorded packages whose code a limit depends on. The others read, write or draw what is measured."""
_BACKEND_OF_PACKAGE: Final = {"versions.hqq": "hqq", "versions.optimum-quanto": "quanto"}
"""Packages that nothing but one quantizer backend uses."""
_TRACED_PACKAGES: Final = ("torch", "transformers", OWN_PACKAGE)
"""Those whose code every trace follows."""
_LOCATION_FIELDS: Final = ("source", "config", "trust_remote_code")
"""Of a model: where it lies decides nothing, its own fingerprint says what it is."""


def make_fingerprint(machine: Machine, facts: ModelFacts, model: ModelSpec, device: DeviceName) -> Fingerprint:
    """Keeps what a limit depends on: the CPU's name for an emulated one, GPU, driver and CUDA for a measured one."""
    accelerator = machine.accelerator if device == "cuda" else None
    is_emulated = device == "cpu"
    return Fingerprint(
        model=model,
        model_fingerprint=facts.fingerprint,
        device=device,
        accelerator=accelerator.name if accelerator else None,
        accelerator_memory_bytes=accelerator.memory_bytes if accelerator else None,
        driver=accelerator.driver if accelerator else None,
        cuda=None if is_emulated else machine.cuda,
        cpu=machine.cpu if is_emulated else None,
        allocator_config=None if is_emulated else machine.allocator_config,
        versions={name: machine.versions[name] for name in LIMIT_PACKAGES if name in machine.versions}
        | {OWN_PACKAGE: __version__},
    )


def traced_fingerprint(fingerprint: Fingerprint, strategy: StrategySpec) -> Fingerprint:
    """What of it a trace depends on: code and model, and neither the machine nor which build of torch it has."""
    backend = strategy.backend if isinstance(strategy, QuantizedSpec) else None
    packages = (*_TRACED_PACKAGES, *(name for name, of in _BACKEND_OF_PACKAGE.items() if of == backend))
    names = {name.removeprefix("versions.") for name in packages}
    return Fingerprint(
        model=fingerprint.model,
        model_fingerprint=fingerprint.model_fingerprint,
        device=fingerprint.device,
        versions={name: each.partition("+")[0] for name, each in fingerprint.versions.items() if name in names},
    )


def differences(policy: Fingerprint, now: Fingerprint) -> tuple[Difference, ...]:
    """Every field that is otherwise now; `concerned_by` says which limits each one concerns."""
    before, after = dict(_fields(policy)), dict(_fields(now))
    return tuple(
        Difference(field=name, policy=before.get(name), now=after.get(name))
        for name in [*before, *(name for name in after if name not in before)]
        if before.get(name) != after.get(name)
    )


def concerned_by(policy: AdmissionPolicy, field: str) -> tuple[ConcernedStrategy, ...]:
    """The strategies whose limits a changed field of the fingerprint concerns, with what to measure again.

    A quantizer's package concerns the strategies of that backend alone; everything else concerns all.
    """
    return tuple(_concerned(each) for each in policy.strategies if _depends(each.strategy, field))


def check_fingerprint(policy: AdmissionPolicy, now: Fingerprint) -> tuple[Difference, ...]:
    """The differences, each with the strategies it concerns; without any, it changes no limit of this policy."""
    return tuple(
        Difference(field=each.field, policy=each.policy, now=each.now, concerns=concerned_by(policy, each.field))
        for each in differences(policy.fingerprint, now)
    )


def _depends(strategy: StrategySpec, field: str) -> bool:
    backend = _BACKEND_OF_PACKAGE.get(field)
    return backend is None or (isinstance(strategy, QuantizedSpec) and strategy.backend == backend)


def _concerned(strategy: PolicyStrategy) -> ConcernedStrategy:
    calibration_ids = strategy.calibration.run_ids if strategy.calibration is not None else ()
    limit_ids = (run_id for limit in strategy.limits for run_id in limit.run_ids)
    return ConcernedStrategy(
        label=strategy.label,
        length_classes=tuple(limit.lengths.label for limit in strategy.limits),
        run_ids=tuple(dict.fromkeys([*limit_ids, *calibration_ids])),
    )


def _fields(fingerprint: Fingerprint) -> Iterator[tuple[str, str]]:
    """What is there, as text: an absent version and an absent driver are both None."""
    for name in fingerprint.model.__struct_fields__:
        if name not in _LOCATION_FIELDS:
            yield from _field(f"model.{name}", getattr(fingerprint.model, name))
    for name in fingerprint.__struct_fields__:
        if name not in ("model", "versions"):
            yield from _field(name, getattr(fingerprint, name))
    for name, version in sorted(fingerprint.versions.items()):
        yield f"versions.{name}", version


def _field(name: str, value: object) -> Iterator[tuple[str, str]]:
    if value is not None:
        yield name, str(value)
