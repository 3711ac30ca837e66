"""Everything that can be refused before a model is loaded, in one process that touches no weights."""

from typing import Any

from offload_eval.core.experiment import DeviceName, Experiment, ModelSpec, StrategySpec, StreamedSpec, is_auto
from offload_eval.core.factors import expand_workloads
from offload_eval.core.machine import Machine
from offload_eval.errors import InputError, UnableError
from offload_eval.execution.attention import TraceableModels, attention_refusal
from offload_eval.execution.devices import accelerator_uuid, resolve_device
from offload_eval.execution.messages import Preflight, Surroundings
from offload_eval.execution.model_loading import as_traceable, load_config, read_model_facts
from offload_eval.execution.prompts import prepare_prompts
from offload_eval.instruments.environment import read_machine
from offload_eval.strategies.registry import load_strategy
from offload_eval.tracing.residency import resolve_auto
from offload_eval.tracing.trace import strategy_refusal


def run_preflight(experiment: Experiment, *, trace_only: bool = False) -> Preflight:
    """Resolves the device and checks model, prompts and strategies.

    Args:
        experiment: What is asked.
        trace_only: Nothing will be run: neither the device need be there nor what only a run imports.

    Raises:
        InputError: The model, a text or a length is wrong.
        UnableError: The device asked for is not there.
    """
    device = resolve_device(experiment.device, trace_only=trace_only)
    config = load_config(experiment.model)
    if getattr(config, "quantization_config", None) is not None and experiment.budget.weights_bytes is None:
        raise InputError(
            f"model {experiment.model.location}: its weights are quantized, and their bytes cannot be counted before "
            "they are loaded; state budget.weights_bytes"
        )
    has_accelerator = device == "cuda" and not (trace_only and resolve_device("auto") == "cpu")
    uuid = accelerator_uuid(device) if has_accelerator else None
    machine = read_machine(with_accelerator=has_accelerator, accelerator_uuid=uuid)
    _check_card(experiment, machine)
    threads = experiment.cpu.compute_threads
    if threads is not None and threads > machine.cpu_cores:
        raise InputError(
            f"cpu.compute_threads: {threads}; allowed: 1 to {machine.cpu_cores}, the cores of this process"
        )
    model = read_model_facts(as_traceable(experiment.model) if trace_only else experiment.model, config)
    refusals = (_trace_refusals if trace_only else _refusals)(experiment, device, config)
    prompts = prepare_prompts(experiment, model)
    autos = _resolve_autos(experiment, device, refusals)
    return Preflight(
        device=device,
        evidence="measured" if device == "cuda" else "emulated",
        machine=machine,
        model=model,
        prompts=prompts.rows,
        texts={} if experiment.capacity is None else prompts.texts,
        refusals=refusals | {cell: answer for cell, answer in autos.items() if isinstance(answer, str)},
        resolved={cell: answer for cell, answer in autos.items() if not isinstance(answer, str)},
    )


def read_surroundings(model: ModelSpec, device: str) -> Surroundings:
    """Looks at the machine, the device and the model; loads no weights.

    Args:
        model: Whose config and weight files are looked at.
        device: auto, cuda or cpu.

    Raises:
        InputError: The model has no config that can be read.
        UnableError: The device asked for is not there.
    """
    name = resolve_device(device)
    facts = read_model_facts(model, load_config(model))
    machine = read_machine(with_accelerator=name == "cuda", accelerator_uuid=accelerator_uuid(name))
    return Surroundings(device=name, machine=machine, model=facts)


def _check_card(experiment: Experiment, machine: Machine) -> None:
    """A cap above the card's memory would hold nothing to it."""
    budget, card = experiment.budget, machine.accelerator
    is_capped = budget.enforce or experiment.capacity is not None
    if card is not None and is_capped and budget.device_bytes > card.memory_bytes:
        raise InputError(
            f"budget.device_bytes: {budget.device_bytes} is more than {card.name} has, and cannot be enforced; "
            f"allowed: at most {card.memory_bytes}"
        )


_Cell = tuple[str, str]
"""Labels of a workload and a strategy."""


def _resolve_autos(
    experiment: Experiment, device: DeviceName, refusals: dict[_Cell, str | None]
) -> dict[_Cell, StrategySpec | str]:
    """What stands for each `resident_share: auto` that is not refused, or why nothing can."""
    models = TraceableModels(experiment.model)
    answers: dict[_Cell, StrategySpec | str] = {}
    for strategy in (each for each in experiment.strategies if isinstance(each, StreamedSpec) and is_auto(each)):
        for workload in expand_workloads(experiment):
            cell = (workload.label, strategy.label)
            if refusals[cell] is None:
                room_bytes = experiment.budget.available_bytes - workload.forced_tokens_bytes
                try:
                    traceable = models.with_attention(workload.attn_implementation)
                    answers[cell] = resolve_auto(traceable, strategy, workload, room_bytes, device=device)
                except UnableError as error:
                    answers[cell] = f"resident_share: auto is resolved by a trace, and there is none: {error}"
    return answers


def _refusals(experiment: Experiment, device: DeviceName, config: Any) -> dict[tuple[str, str], str | None]:
    """Why a cell cannot run; each attention is tried once, on a model without data."""
    attentions: dict[str | None, str | None] = {}
    refusals = {}
    for workload in expand_workloads(experiment):
        attention = workload.attn_implementation
        if attention not in attentions:
            attentions[attention] = attention_refusal(experiment.model, config, device, attention)
        for strategy in experiment.strategies:
            refusal = attentions[attention] or load_strategy(strategy).refusal(device, config, workload)
            refusals[workload.label, strategy.label] = refusal
    return refusals


def _trace_refusals(experiment: Experiment, device: DeviceName, config: Any) -> dict[_Cell, str | None]:
    """Why a cell cannot be traced, as far as its strategy says; an attention is refused by the trace itself."""
    return {
        (workload.label, strategy.label): strategy_refusal(strategy, workload, config, device)
        for workload in expand_workloads(experiment)
        for strategy in experiment.strategies
    }
