"""Reads gate files: YAML with the fields of `GateSpec`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Final, get_args

from offload_eval.core.gate import GateLimits, GateSpec, MetricLimit
from offload_eval.core.records import Status
from offload_eval.errors import InputError
from offload_eval.store.conversion import convert_strict
from offload_eval.store.origin import KeyPath, Origin, show_value, suggest
from offload_eval.store.strict_yaml import read_yaml_file

MAX_BYTES: Final = 1_000_000
"""Of a gate file; real ones have some hundred bytes."""
STATES: Final = (*get_args(Status), "searched", "refused")
STATE_CHANGES: Final = tuple(
    [f"{before} -> {after}" for before, after in permutations(get_args(Status), 2)]
    + ["searched -> refused", "refused -> searched"]
    + [f"{before} -> missing" for before in STATES]
)
"""What `allow` takes."""


def load_gate(path: Path) -> GateSpec:
    """Reads a gate.

    Raises:
        InputError: There is no such file, or it is no gate: the file, the path inside it, the value and what is
            allowed.
    """
    if path.is_file() and path.stat().st_size > MAX_BYTES:
        raise InputError(f"{path}: more than {MAX_BYTES:,} bytes, which no gate has; allowed: a gate file")
    origin = Origin(file=path)
    gate = convert_strict(read_yaml_file(path), GateSpec, origin)
    for where, problem in _problems(gate):
        raise origin.refusal(where, problem)
    return gate


def check_labels(path: Path, gate: GateSpec, labels: Sequence[str]) -> None:
    """Refuses a gate for a strategy that neither run has: it would keep nothing.

    Raises:
        InputError: It names one.
    """
    for index, each in enumerate(gate.strategies):
        if each.strategy not in labels:
            near = suggest(each.strategy, labels)
            problem = f"{show_value(each.strategy)} is in neither run; allowed: {', '.join(labels)}{near}"
            raise Origin(file=path).refusal(("strategies", index, "strategy"), problem)


def _problems(gate: GateSpec) -> Iterator[tuple[KeyPath, str]]:
    yield from _of_section(gate.limits, gate.allow, ())
    for label, times in Counter(each.strategy for each in gate.strategies).items():
        if times > 1:
            yield ("strategies",), f"the strategy {show_value(label)} is given {times} times; allowed: once"
    for index, each in enumerate(gate.strategies):
        yield from _of_section(each.limits, each.allow, ("strategies", index))


def _of_section(limits: GateLimits, allow: Sequence[str], at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    for name in limits.__struct_fields__:
        limit: MetricLimit | None = getattr(limits, name)
        if limit is not None:
            yield from _of_limit(limit, (*at, "limits", name))
    for index, change in enumerate(allow):
        if change not in STATE_CHANGES:
            seen, near = show_value(change), suggest(change, STATE_CHANGES)
            yield (*at, "allow", index), f"{seen} is no change of state; allowed: {', '.join(STATE_CHANGES)}{near}"


def _of_limit(limit: MetricLimit, at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    names = limit.__struct_fields__
    if all(getattr(limit, name) is None for name in names):
        yield at, f"states no limit; allowed: at least one of {', '.join(names)}"
    if limit.at_most is not None and limit.at_least is not None and limit.at_least > limit.at_most:
        yield (*at, "at_least"), f"{limit.at_least:g} is not allowed; allowed: at most at_most = {limit.at_most:g}"
