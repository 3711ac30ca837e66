"""Local paths of an experiment: relative to the file that names them, made absolute, and present."""

from pathlib import Path
from typing import Final

from msgspec.structs import replace

from offload_eval.core.experiment import Experiment, JsonlPrompt, ModelSpec, TextPrompt, Workload
from offload_eval.store.locations import existing_path
from offload_eval.store.origin import KeyPath, Origin

_LOCAL_STARTS: Final = (".", "/", "~")


def resolve_paths(experiment: Experiment, origin: Origin) -> Experiment:
    """Makes every local path absolute; a `model.source` that is not local is a hub id and stays.

    Raises:
        InputError: A local path leads to nothing.
    """
    workloads = tuple(
        _with_resolved_prompt(workload, index, origin) for index, workload in enumerate(experiment.workloads)
    )
    return replace(
        experiment,
        model=_with_resolved_model(experiment.model, origin),
        hardware=_resolved_hardware(experiment.hardware, origin),
        workloads=workloads,
    )


def _resolved_hardware(location: str | None, origin: Origin) -> str | None:
    """A file's absolute path; what leads to no file may be the name of a profile, and stays."""
    found = None if location is None else existing_path(location, origin.file.parent)
    return location if found is None else str(found.resolve())


def is_local_source(source: str, folder: Path) -> bool:
    """Whether `model.source` names something on this machine rather than a hub id."""
    return (
        source.startswith(_LOCAL_STARTS) or source.endswith(".gguf") or (source != "" and (folder / source).exists())
    )


def _with_resolved_model(model: ModelSpec, origin: Origin) -> ModelSpec:
    if model.source and is_local_source(model.source, origin.file.parent):
        if model.revision is not None:
            problem = f"{model.revision!r} needs a hub id in model.source, and {model.source!r} is local"
            raise origin.refusal(("model", "revision"), problem)
        return replace(model, source=str(_existing(model.source, ("model", "source"), origin)))
    if model.config:
        path: KeyPath = ("model", "config")
        config = _existing(model.config, path, origin)
        if config.is_dir() and not (config / "config.json").is_file():
            raise origin.refusal(path, f"{model.config!r} is a folder without a config.json")
        return replace(model, config=str(config))
    return model


def _with_resolved_prompt(workload: Workload, index: int, origin: Origin) -> Workload:
    prompt = workload.prompt
    if not isinstance(prompt, TextPrompt | JsonlPrompt) or not prompt.path:
        return workload
    path: KeyPath = ("workloads", index, "prompt", "path")
    resolved = _existing(prompt.path, path, origin)
    if not resolved.is_file():
        raise origin.refusal(path, f"{prompt.path!r} is not a file")
    return replace(workload, prompt=replace(prompt, path=str(resolved)))


def _existing(text: str, path: KeyPath, origin: Origin) -> Path:
    try:
        resolved = (origin.file.parent / Path(text).expanduser()).resolve()
        exists = resolved.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise origin.refusal(path, f"{text!r} is not a path that can be opened: {error}") from error
    if not exists:
        raise origin.refusal(path, f"{text!r} does not exist (looked for {resolved})")
    return resolved
