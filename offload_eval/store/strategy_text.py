"""Strategies as typed: `dynamic`, `streamed:prefetch_layers=2`, `quantized:backend=hqq,nbits=2`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from offload_eval.core.experiment import (
    DynamicSpec,
    Experiment,
    OffloadedSpec,
    QuantizedSpec,
    StrategySpec,
    StreamedSpec,
)
from offload_eval.errors import InputError
from offload_eval.store.conversion import convert_strict
from offload_eval.store.experiment_checks import check_experiment
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
_UPSTREAM_BACKEND: Final = "quanto"
"""What transformers takes where a quantized cache names no backend."""
_OPTION: Final = re.compile(r"(?P<key>\w+)=(?P<value>.*)")


def parse_strategies(texts: Sequence[str], option: str = "--strategy") -> list[StrategySpec | None]:
    """Reads strategies; commas separate options of one strategy, and strategies.

    Args:
        texts: What was typed, once or several times. The label of a strategy is understood as well.
        option: Named in refusals.

    Returns:
        One item a strategy, in order; None stands for `paged`.

    Raises:
        InputError: A kind or an option is unknown, or one strategy is named twice.
    """
    words = [word for text in texts for word in _split(text)]
    strategies = [_parse(word, option) for word in words]
    labels = [PAGED if each is None else each.label for each in strategies]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise InputError(f"{option}: {twice} is named twice; name it once")
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


def _parse(word: str, option: str) -> StrategySpec | None:
    if word == PAGED:
        return None
    by_label = {strategy.label: strategy for strategy in DEFAULT_STRATEGIES}
    if word in by_label:
        return by_label[word]
    kind, _, options = word.partition(":")
    tree: dict[str, Any] = {"kind": kind}
    for piece in options.split(",") if options else []:
        match = _OPTION.fullmatch(piece.strip())
        if match is None:
            raise InputError(f"{option} {word}: {piece!r} is not key=value, as in quantized:backend=hqq,nbits=2")
        tree[match["key"]] = read_yaml(match["value"], Origin(file=Path(f"{option} {word}")))
    if kind == "quantized":
        tree.setdefault("backend", _UPSTREAM_BACKEND)
    return _convert(tree, f"{option} {word}", option)


def _convert(tree: dict[str, Any], where: str, option: str) -> StrategySpec:
    """Goes through an experiment with this one strategy, whose checks are then this one's."""
    experiment_tree = {
        "name": "plan",
        "model": {"source": "."},
        "budget": {"device_bytes": 1},
        "workloads": [{"prompt_tokens": 1, "output_tokens": 2}],
        "strategies": [tree],
    }
    origin = Origin(file=Path(where))
    try:
        experiment = convert_strict(experiment_tree, Experiment, origin)
        problems = [each for each in check_experiment(experiment) if each[0][0] == "strategies"]
    except InputError as error:
        raise InputError(_shortened(str(error), option)) from error
    for path, problem in problems:
        raise InputError(_shortened(str(origin.refusal(path, problem)), option))
    return experiment.strategies[0]


def _shortened(message: str, option: str) -> str:
    """Names the option's key instead of its place in an experiment; `paged` is among the kinds."""
    shown = message.replace(" strategies[0].", " ").replace(" strategies[0]:", "")
    return shown.replace("allowed: dynamic,", f"allowed: {PAGED}, dynamic,") if option == "--strategy" else shown
