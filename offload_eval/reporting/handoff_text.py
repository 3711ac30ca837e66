"""A hand-off for readers: a Markdown section, and the same for a terminal."""

from collections.abc import Iterator, Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from offload_eval.core.handoff import HandOff, Setting, Standing, Target
from offload_eval.reporting.display import MISSING, one_line
from offload_eval.reporting.handoff_blocks import render_blocks
from offload_eval.reporting.markdown import Verbatim, bullets, code, escape, fence, paragraph, render_table, section

TARGET_NAMES: Final[dict[Target, str]] = {"vllm": "vLLM", "sglang": "SGLang", "kubernetes": "Kubernetes"}
STANDING_WORDS: Final[dict[Standing, str]] = {
    "exact": "exact: arithmetic on what was asked for",
    "carried": "carried: a limit of transformers' caches, where to start",
    "nearest": "nearest: the closest that is offered, not what was run",
}


def render_hand_off(hand_off: HandOff, level: int = 2) -> str:
    """A section of Markdown; no name in a policy can act as markup.

    Args:
        hand_off: What is shown.
        level: Of the section's heading; each target has one below it.
    """
    blocks = render_blocks(hand_off)
    return section(
        f"Settings for {hand_off.strategy}",
        paragraph(_opening(hand_off)),
        bullets([Verbatim(f"**{escape(caution)}**") for caution in hand_off.cautions]),
        bullets(hand_off.notes),
        *(
            section(
                TARGET_NAMES[target],
                render_table(("setting", "value", "standing"), _rows(_of(hand_off, target)), "lll"),
                bullets([_derivation(setting) for setting in _of(hand_off, target)]),
                fence(block),
                level=level + 1,
            )
            for target, block in blocks.items()
        ),
        bullets(list(STANDING_WORDS.values())),
        level=level,
    )


def render_hand_off_terminal(hand_off: HandOff) -> Iterator[RenderableType | str]:
    """The parts from top to bottom; a plain text is a block to paste, for no console to wrap."""
    yield Text(f"Settings for {one_line(hand_off.strategy)}", style="bold")
    yield Text(one_line(_opening(hand_off)))
    for caution in hand_off.cautions:
        yield Text(one_line(caution), style="bold")
    yield _hanging(hand_off.notes)
    for target, block in render_blocks(hand_off).items():
        settings = _of(hand_off, target)
        yield Text()
        yield Text(TARGET_NAMES[target], style="bold")
        yield _table(settings)
        yield _hanging([f"{each.name}: {_words(each)}" for each in settings])
        yield Text()
        yield block
    yield Text()
    yield _hanging(list(STANDING_WORDS.values()))


def _opening(hand_off: HandOff) -> str:
    return (
        f"From policy {hand_off.policy}, strategy {hand_off.strategy} at {hand_off.lengths.label}: "
        f"{hand_off.evidence}. {hand_off.chosen}"
    )


def _of(hand_off: HandOff, target: Target) -> list[Setting]:
    return [setting for setting in hand_off.settings if setting.target == target]


def _value(setting: Setting) -> str:
    return MISSING if setting.value is None else setting.value or "(no value)"


def _rows(settings: Sequence[Setting]) -> list[tuple[str, str, str]]:
    return [(code(each.name), code(_value(each)), each.standing) for each in settings]


def _words(setting: Setting) -> str:
    return setting.derivation if setting.caution is None else f"{setting.caution} {setting.derivation}"


def _derivation(setting: Setting) -> Verbatim:
    caution = "" if setting.caution is None else f"**{escape(setting.caution)}** "
    return Verbatim(f"{code(setting.name)}: {caution}{escape(setting.derivation)}")


def _table(settings: Sequence[Setting]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("setting", "value", "standing"):
        table.add_column(title, overflow="fold")
    for each in settings:
        table.add_row(*(Text(one_line(cell)) for cell in (each.name, _value(each), each.standing)))
    return table


def _hanging(texts: Sequence[str]) -> Table:
    """One bullet a text; what does not fit a line goes on under its first word."""
    hanging = Table.grid()
    hanging.add_column(no_wrap=True)
    hanging.add_column(overflow="fold")
    for text in texts:
        hanging.add_row(Text("  - "), Text(one_line(text)))
    return hanging
