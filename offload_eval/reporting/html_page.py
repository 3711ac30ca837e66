"""report.html: one file that needs no other and no network, made of the report's own Markdown."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from offload_eval.reporting.figures.plates import Plate
from offload_eval.reporting.markdown_html import sections_of

_TEMPLATES: Final = "templates"


def render_html(markdown: str, plates: Mapping[str, Sequence[Plate]]) -> str:
    """Renders a report as one page.

    Args:
        markdown: What `render_report` made.
        plates: Figures by the title of the section that they stand at the top of.

    Returns:
        HTML without a script and without an address outside of it; a policy in it forbids both.
    """
    head, *sections = sections_of(markdown)
    text = _template().render(
        head=head._replace(body=Markup(head.body)),
        sections=[section._replace(body=Markup(section.body)) for section in sections],
        plates={title: [plate._replace(svg=Markup(plate.svg)) for plate in own] for title, own in plates.items()},
        css=Markup(_css()),
    )
    return f"{text}\n"


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
