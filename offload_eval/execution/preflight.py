"""Everything that can be refused before a model is loaded, in one process that touches no weights."""

from typing import Any

from offload_eval.core.experiment import DeviceName, Experiment
from offload_eval.core.factors import expand_workloads
from offload_eval.errors import InputError
from offload_eval.execution.attention import attention_refusal
from offload_eval.execution.devices import accelerator_uuid, resolve_device
from offload_eval.execution.messages import Preflight
from offload_eval.execution.model_loading import load_config, read_model_facts
from offload_eval.execution.prompts import prepare_prompts
from offload_eval.instruments.environment import read_machine
from offload_eval.strategies.registry import load_strategy


def run_preflight(experiment: Experiment) -> Preflight:
    """Resolves the device and checks model, prompts and strategies.

    Raises:
        InputError: The model, a text or a length is wrong.
        UnableError: The device asked for is not there.
    """
    device = resolve_device(experiment.device)
    config = load_config(experiment.model)
    if getattr(config, "quantization_config", None) is not None and experiment.budget.weights_bytes is None:
        raise InputError(
            f"model {experiment.model.location}: its weights are quantized, and their bytes cannot be counted before "
            "they are loaded; state budget.weights_bytes"
        )
    machine = read_machine(with_accelerator=device == "cuda", accelerator_uuid=accelerator_uuid(device))
    threads = experiment.cpu.compute_threads
    if threads is not None and threads > machine.cpu_cores:
        raise InputError(
            f"cpu.compute_threads: {threads}; allowed: 1 to {machine.cpu_cores}, the cores of this process"
        )
    model = read_model_facts(experiment.model, config)
    return Preflight(
        device=device,
        evidence="measured" if device == "cuda" else "emulated",
        machine=machine,
        model=model,
        prompts=prepare_prompts(experiment, model),
        refusals=_refusals(experiment, device, config),
    )


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
