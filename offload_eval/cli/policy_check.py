"""`offload-eval policy check`: whether a policy still holds on this machine, for this model and these versions."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from offload_eval.analysis.fingerprint import check_fingerprint, make_fingerprint
from offload_eval.cli.console import print_json, result_console
from offload_eval.core.experiment import ModelSpec, StrategySpec
from offload_eval.core.policy import AdmissionPolicy, Difference
from offload_eval.errors import ExitCode, InputError
from offload_eval.execution.launcher import surroundings
from offload_eval.reporting.policy_text import render_check
from offload_eval.store.experiment_paths import is_local_source
from offload_eval.store.locations import existing_path, show_location
from offload_eval.store.policy_file import load_policy
from offload_eval.store.run_directory import EXPERIMENT_NAME

_TIMEOUT_S: Final = 600.0


def policy_check_command(*, policy: Path, model: str | None, device: str | None, json_output: bool) -> int:
    """Prints what differs from a policy's conditions, and what to measure again.

    Returns:
        0 where no limit is concerned, 1 where one is.

    Raises:
        InputError: The file is wrong, or the model is not where it is said to be.
        UnableError: The device is not there.
    """
    stored = load_policy(policy)
    spec = _model_here(stored, policy, model)
    try:
        found = surroundings(spec, device or stored.fingerprint.device, _TIMEOUT_S)
    except InputError as error:
        raise InputError(f"{policy}: {error}; --model says where the model is here") from error
    now = make_fingerprint(found.machine, found.model, spec, found.device)
    checked = check_fingerprint(stored, now)
    commands = rerun_commands(stored, checked, policy, model, device)
    holds = not any(each.concerns for each in checked)
    if json_output:
        print_json(msgspec.json.encode(_document(stored, checked, commands, holds=holds)).decode())
    else:
        console = result_console()
        for part in render_check(stored, checked, commands):
            console.print(part, highlight=False, soft_wrap=True)
    return ExitCode.DONE if holds else ExitCode.FELL_SHORT


def rerun_commands(
    policy: AdmissionPolicy, checked: Sequence[Difference], file: Path, model: str | None, device: str | None
) -> list[str]:
    """What measures the concerned limits again, in a directory of its own: stored records keep their versions.

    Where a change concerns some strategies only, the search is for those and for the baseline, whose tokens they are
    given.
    """
    concerned = {each.label for difference in checked for each in difference.concerns}
    if not concerned:
        return []
    beside = file.with_name(EXPERIMENT_NAME)
    experiment = str(beside) if beside.is_file() else "EXPERIMENT.yaml"
    words = ["offload-eval", "capacity", experiment, "--out", f"runs/{policy.name}-again"]
    if model is not None:
        key = "config" if policy.fingerprint.model.config is not None else "source"
        words += ["--set", f"model.{key}={json.dumps(model)}"]
    words += [] if device is None else ["--device", device]
    wanted = [each.strategy for each in policy.strategies if each.label in concerned | {policy.baseline}]
    if len(wanted) < len(policy.strategies):
        words += ["--set", f"strategies=[{', '.join(_flow(strategy) for strategy in wanted)}]"]
    return [shlex.join(words)]


def _flow(strategy: StrategySpec) -> str:
    """A strategy as YAML on one line."""
    return json.dumps({key: value for key, value in msgspec.to_builtins(strategy).items() if value is not None})


def _model_here(policy: AdmissionPolicy, file: Path, location: str | None) -> ModelSpec:
    """The policy's model, at another place where one is given."""
    spec = policy.fingerprint.model
    key = "config" if spec.config is not None else "source"
    asked = spec.location if location is None else location
    if not asked.strip():
        raise InputError(f"--model {asked!r} is not allowed; allowed: a folder, a file or a hub id")
    path = existing_path(asked, None)
    if path is not None:
        return msgspec.structs.replace(spec, **{key: str(path.resolve())})
    if key == "config" or is_local_source(asked, Path()):
        where = f"{file}: fingerprint.model.{key}:" if location is None else "--model"
        raise InputError(f"{where} {show_location(asked)} does not exist here; give its place with --model PATH")
    return msgspec.structs.replace(spec, source=asked)


def _document(
    policy: AdmissionPolicy, checked: Sequence[Difference], commands: Sequence[str], *, holds: bool
) -> dict[str, Any]:
    return {
        "policy": policy.name,
        "created_at_utc": policy.created_at_utc,
        "holds": holds,
        "differences": checked,
        "commands": commands,
    }
