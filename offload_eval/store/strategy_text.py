"""Strategies as typed: `dynamic`, `streamed:prefetch_layers=2`, `quantized:backend=hqq,nbits=2`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import to_builtins

from offload_eval.core.experiment import (
    DynamicSpec,
    Experiment,
    OffloadedSpec,
    QuantizedSpec,
    StrategySpec,
    StreamedSpec,
)
from offload_eval.core.plan import PagingSpec
from offload_eval.errors import InputError
from offload_eval.store.experiment_file import build_for_plan
from offload_eval.store.origin import Origin
from offload_eval.store.strict_yaml import read_yaml

PAGED: Final = "paged"
"""A paged engine: known to `plan`, not to `run`."""
DEFAULT_STRATEGIES: Final[tuple[StrategySpec, ...]] = (
    DynamicSpec(),
    OffloadedSpec(),
    StreamedSpec(),
    QuantizedSpec(backend="quanto", nbits=4),
    QuantizedSpec(backend="fp8"),
)
_OPTION_NAME: Final = "--strategy"
_UPSTREAM_BACKEND: Final = "quanto"
"""What transformers takes where a quantized cache names no backend."""
_STREAMED_LABEL: Final = re.compile(
    r"streamed(?=-)(-ahead(?P<prefetch_layers>\d+))?(-resident(?P<resident_share>auto|[\d.]+))?"
    r"(-residentbytes(?P<resident_bytes>\d+))?(-(?P<host_dtype>fp8|int8|int4))?"
)
_STATIC_LABEL: Final = re.compile(r"(?P<kind>static|offloaded_static)-compile-(?P<mode>[a-z-]+)")
_OPTION: Final = re.compile(r"(?P<key>\w+)=(?P<value>.*)")


def parse_strategies(texts: Sequence[str], paging: PagingSpec) -> list[PagingSpec | StrategySpec]:
    """Reads strategies; commas separate options of one strategy, and strategies.

    Args:
        texts: What was typed, once or several times. The label of a strategy is understood as well.
        paging: What `paged` stands for; its options replace values of it.

    Returns:
        One item a strategy, in order.

    Raises:
        InputError: A kind or an option is unknown, or one strategy is named twice.
    """
    strategies = [_parse(word, paging) for text in texts for word in _split(text)]
    labels = [each.label for each in strategies]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise InputError(f"{_OPTION_NAME}: {twice} is named twice; name it once")
    return strategies


def _split(text: str) -> list[str]:
    """A piece without a colon that has a `=` is one more option of the strategy before it."""
    words: list[str] = []
    for piece in text.split(","):
        if words and "=" in piece and ":" not in piece:
            words[-1] += f",{piece}"
        else:
            words.append(piece.strip())
    return words


def _parse(word: str, paging: PagingSpec) -> PagingSpec | StrategySpec:
    origin = Origin(file=Path(f"{_OPTION_NAME} {word!r}" if not word else f"{_OPTION_NAME} {word}"))
    kind, _, options = _from_label(word).partition(":")
    tree = _options(options, origin)
    if kind == PAGED:
        return _converted({"plan": {"paging": to_builtins(paging) | tree}}, "plan.paging", origin).plan.paging
    if kind == "quantized":
        tree.setdefault("backend", _UPSTREAM_BACKEND)
    return _converted({"strategies": [{"kind": kind} | tree]}, "strategies[0]", origin).strategies[0]


def _from_label(word: str) -> str:
    """A strategy's label, as outputs show it, in the form that is typed; any other word as it is."""
    if match := re.fullmatch(rf"{PAGED}-(\w+)", word):
        return f"{PAGED}:kv_cache_dtype={match[1]}"
    if match := _STATIC_LABEL.fullmatch(word):
        return f"{match['kind']}:compile={match['mode']}"
    if match := _STREAMED_LABEL.fullmatch(word):
        options = [f"{name}={value}" for name, value in match.groupdict().items() if value is not None]
        return f"streamed:{','.join(options)}"
    if match := re.fullmatch(r"quantized-([a-z]+\d*)((?:-[a-z]+\d+)*)", word):
        names = {"int": "nbits", **{name.replace("_", ""): name for name in QuantizedSpec.__struct_fields__}}
        pieces = re.findall(r"-([a-z]+)(\d+)", match[2])
        return ",".join(
            [f"quantized:backend={match[1]}", *(f"{names.get(key, key)}={value}" for key, value in pieces)]
        )
    return word


def _options(text: str, origin: Origin) -> dict[str, object]:
    tree = {}
    for piece in text.split(",") if text else []:
        match = _OPTION.fullmatch(piece.strip())
        if match is None:
            raise InputError(f"{origin.file}: {piece!r} is not key=value, as in quantized:backend=hqq,nbits=2")
        if match["key"] == "kind" or match["key"] in tree:
            raise InputError(f"{origin.file}: {match['key']} is given twice; keep one")
        tree[match["key"]] = read_yaml(match["value"], origin)
    return tree


def _converted(tree: dict[str, object], place: str, origin: Origin) -> Experiment:
    """Checks one strategy as an experiment's; a refusal names the option, not its place in an experiment."""
    try:
        return build_for_plan(tree, origin)
    except InputError as error:
        message = str(error).replace(f" {place}.", " ").replace(f" {place}:", "")
        raise InputError(message.replace("allowed: dynamic,", f"allowed: {PAGED}, dynamic,")) from error
