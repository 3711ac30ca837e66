"""A page in one file that needs no other and no network, made of the Markdown of a report, comparison or history."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from offload_eval.reporting.figures.plates import Plate
from offload_eval.reporting.markdown_html import sections_of

_TEMPLATES: Final = "templates"


def render_html(markdown: str, plates: Mapping[str, Sequence[Plate]], opening: Sequence[Plate] = ()) -> str:
    """Renders Markdown as one page.

    Args:
        markdown: What `render_report`, `render_comparison` or `render_history` made.
        plates: Figures by the title of the section that they stand at the top of.
        opening: Figures before the first section.

    Returns:
        HTML without a script and without an address outside of it; a policy in it forbids both.
    """
    head, *sections = sections_of(markdown)
    text = _template().render(
        head=head._replace(body=Markup(head.body)),
        sections=[section._replace(body=Markup(section.body)) for section in sections],
        plates={title: _marked(own) for title, own in plates.items()},
        opening=_marked(opening),
        css=Markup(_css()),
    )
    return f"{text}\n"


def _marked(plates: Sequence[Plate]) -> list[Plate]:
    return [plate._replace(svg=Markup(plate.svg)) for plate in plates]


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("offload_eval.reporting", _TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja")


def _css() -> str:
    return resources.files("offload_eval.reporting").joinpath(_TEMPLATES, "report.css").read_text(encoding="utf-8")
