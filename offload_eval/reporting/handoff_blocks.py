"""Blocks to paste: a command line for each engine, and a fragment of a pod's YAML. No text in them can act."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from offload_eval.core.handoff import HandOff, Setting, Target
from offload_eval.reporting.display import one_line

_CONTINUED: Final = " \\\n    "


def render_blocks(hand_off: HandOff) -> dict[Target, str]:
    """A block for each target that the hand-off has settings of."""
    blocks: dict[Target, str] = {}
    for target in dict.fromkeys(setting.target for setting in hand_off.settings):
        settings = [setting for setting in hand_off.settings if setting.target == target]
        blocks[target] = "\n".join([*_comments(hand_off, settings), _BODIES[target](hand_off, settings)])
    return blocks


def _comments(hand_off: HandOff, settings: Sequence[Setting]) -> list[str]:
    """What a reader of the pasted block has to know, where only the block is left."""
    lengths = hand_off.lengths
    first = f"Policy {hand_off.policy}, strategy {hand_off.strategy}, {lengths.label}: {hand_off.evidence}."
    own = [f"{each.name}: {each.caution}" for each in settings if each.caution is not None and each.value is not None]
    inexact = [each.name for each in settings if each.standing != "exact" and each.value is not None]
    standing = [f"Not exact, see their derivation: {', '.join(inexact)}."] if inexact else []
    return [f"# {one_line(text)}" for text in (first, *hand_off.cautions, *own, *standing)]


def _command(start: Sequence[str], hand_off: HandOff, settings: Sequence[Setting]) -> str:
    """A command in words that a shell takes as they are."""
    revision = hand_off.model.revision
    options = [
        *([] if revision is None else [f"--revision {_word(revision)}"]),
        *(
            f"{each.name} {_word(each.value)}" if each.value else each.name
            for each in settings
            if each.value is not None
        ),
    ]
    return _CONTINUED.join([" ".join(start), *options])


def _word(text: str) -> str:
    return shlex.quote(one_line(text))


def _model(hand_off: HandOff) -> str:
    """The checkpoint; a path that begins like an option is made to look like a path.

    A place on this machine is nobody else's: MODEL stands for it, as the cautions say.
    """
    source = one_line(hand_off.model.source or "MODEL")
    if Path(source).is_absolute():
        return "MODEL"
    return shlex.quote(f"./{source}" if source.startswith("-") else source)


def _vllm(hand_off: HandOff, settings: Sequence[Setting]) -> str:
    return _command(["vllm", "serve", _model(hand_off)], hand_off, settings)


def _sglang(hand_off: HandOff, settings: Sequence[Setting]) -> str:
    start = ["python", "-m", "sglang.launch_server", "--model-path", _model(hand_off)]
    return _command(start, hand_off, settings)


def _kubernetes(_hand_off: HandOff, settings: Sequence[Setting]) -> str:
    values = {setting.name: setting.value for setting in settings}
    lines = ["resources:"]
    for section in ("requests", "limits"):
        memory = values[f"resources.{section}.memory"]
        stated = "# memory: not measured" if memory is None else f'memory: "{memory}"'
        lines += [f"  {section}:", f"    {stated}", f"    nvidia.com/gpu: {values['nvidia.com/gpu']}"]
    return "\n".join(lines)


_BODIES: Final[dict[Target, Callable[[HandOff, Sequence[Setting]], str]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "kubernetes": _kubernetes,
}
