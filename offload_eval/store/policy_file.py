"""Reads and writes admission policies: YAML with the fields of `AdmissionPolicy`."""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from offload_eval.core.policy import POLICY_SCHEMA_VERSION, AdmissionPolicy, Calibration, PolicyStrategy
from offload_eval.core.records import PHASES
from offload_eval.errors import InputError, UnableError
from offload_eval.store.conversion import convert_strict
from offload_eval.store.origin import KeyPath, Origin, show_value, suggest
from offload_eval.store.strict_yaml import dump_yaml, read_yaml_file
from offload_eval.store.whole_file import supersede, write_whole

MAX_BYTES: Final = 10_000_000
"""Of a policy; real ones have some ten thousand bytes."""


def load_policy(path: Path) -> AdmissionPolicy:
    """Reads a policy.

    Raises:
        InputError: There is no such file, it is of another schema, or no policy: the file, the path inside it, the
            value and what is allowed.
    """
    if path.is_file() and path.stat().st_size > MAX_BYTES:
        raise InputError(f"{path}: more than {MAX_BYTES:,} bytes, which no policy has; allowed: a policy file")
    origin = Origin(file=path)
    tree = read_yaml_file(path)
    if isinstance(tree, dict):
        # First: a newer file is told apart by its version, not by a key that this release does not know.
        _check_version(tree, origin)
    policy = convert_strict(tree, AdmissionPolicy, origin)
    for where, problem in _problems(policy):
        raise origin.refusal(where, problem)
    return policy


def dump_policy(policy: AdmissionPolicy) -> str:
    """Writes a policy, without what is absent, as YAML that loads back equal; its limits come first, as a comment."""
    lines = [f"# Admission policy {policy.name}: the largest batch of each strategy, by the lengths of its sessions."]
    lines += [f"#   {each.label}: {_limits_text(each)}" for each in policy.strategies]
    lines += ["# Whether it still holds here: offload-eval policy check FILE"]
    return "\n".join(lines) + "\n" + dump_yaml(_without_none(msgspec.to_builtins(policy)))


def write_policy(path: Path, policy: AdmissionPolicy) -> None:
    """Puts a whole policy at `path`, or nothing; another one that is there is kept under a numbered name.

    Raises:
        InputError: What is there is no regular file.
        UnableError: The disk refused it.
    """
    text = dump_policy(policy)
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: not a regular file; allowed: a file that exists or does not")
    try:
        if not path.exists():
            write_whole(path, text)
        elif path.read_bytes() != text.encode():
            supersede(path, text)
    except OSError as error:
        raise UnableError(f"{path}: the policy cannot be written: {error.strerror}") from error


def _check_version(tree: dict[str, object], origin: Origin) -> None:
    if "schema_version" not in tree:
        raise origin.refusal(("schema_version",), f"required, and missing; allowed: {POLICY_SCHEMA_VERSION}")
    version = tree["schema_version"]
    if version != POLICY_SCHEMA_VERSION or isinstance(version, bool):
        raise origin.refusal(
            ("schema_version",),
            f"{show_value(version)} is not a version that this release reads; allowed: {POLICY_SCHEMA_VERSION}. Read "
            "it with the release that wrote it, or measure again",
        )


def _problems(policy: AdmissionPolicy) -> Iterator[tuple[KeyPath, str]]:
    """What the types cannot say, the first to mend first."""
    try:
        datetime.fromisoformat(policy.created_at_utc)
    except ValueError:
        seen = show_value(policy.created_at_utc)
        yield ("created_at_utc",), f"{seen} is no time; allowed: one as 2026-01-02T03:04:05Z"
    model = policy.fingerprint.model
    if (model.source is None) == (model.config is None):
        yield ("fingerprint", "model"), "exactly one of source and config is needed; allowed: one of them"
    if policy.cap_bytes > policy.budget.device_bytes:
        allowed = f"at most budget.device_bytes = {policy.budget.device_bytes}"
        yield ("cap_bytes",), f"{policy.cap_bytes} is more than the device has; allowed: {allowed}"
    labels = [strategy.label for strategy in policy.strategies]
    label, times = Counter(labels).most_common(1)[0]
    if times > 1:
        yield ("strategies",), f"the label {label!r} is used {times} times; give each its own `name`"
    if policy.baseline not in labels:
        near = suggest(policy.baseline, labels)
        yield ("baseline",), f"{policy.baseline!r} is not the label of a strategy; allowed: {', '.join(labels)}{near}"
    for index, strategy in enumerate(policy.strategies):
        for where, problem in _strategy_problems(strategy):
            yield ("strategies", index, *where), problem


def _strategy_problems(strategy: PolicyStrategy) -> Iterator[tuple[KeyPath, str]]:
    for label, times in Counter(limit.lengths.label for limit in strategy.limits).items():
        if times > 1:
            yield ("limits",), f"the lengths {label} have {times} limits; allowed: one each"
    if not strategy.limits and strategy.refusal is None:
        yield ("limits",), "[] without a refusal is not allowed; allowed: at least one limit, or a refusal"
    for index, limit in enumerate(strategy.limits):
        for name in ("prompt_tokens", "output_tokens", "prefill_chunk_tokens"):
            tokens = getattr(limit.lengths, name)
            if tokens is not None and tokens < 1:
                yield ("limits", index, "lengths", name), f"{tokens} is not allowed; allowed: an integer >= 1"
    if strategy.calibration is not None:
        for where, problem in _calibration_problems(strategy.calibration):
            yield ("calibration", *where), problem


def _calibration_problems(calibration: Calibration) -> Iterator[tuple[KeyPath, str]]:
    phases = [fit.phase for fit in calibration.fits]
    if sorted(phases) != sorted(PHASES):
        yield ("fits",), f"of {', '.join(phases)}; allowed: one of each of {', '.join(PHASES)}"
    for name in ("prompt_tokens", "output_tokens"):
        least, most = getattr(calibration, f"least_{name}"), getattr(calibration, f"most_{name}")
        if least > most:
            yield (f"least_{name}",), f"{least} is not allowed; allowed: at most most_{name} = {most}"


def _limits_text(strategy: PolicyStrategy) -> str:
    if strategy.refusal is not None:
        return "refused"
    return ", ".join(f"{limit.lengths.label}: {limit.sessions:,}" for limit in strategy.limits)


def _without_none(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list | tuple) else value
