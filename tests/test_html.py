"""report.html: one page that stands by itself. It is read back with html.parser, and held against markdown-it."""

import html
import re
import time
from html.parser import HTMLParser

from factories import (
    DYNAMIC,
    QUANTIZED,
    make_experiment,
    make_failure,
    make_machine,
    make_quantized,
    make_record,
    make_spec,
    make_streamed,
    make_traced,
    make_workload,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from offload_eval.analysis.study import Study
from offload_eval.core.experiment import ModelSpec, StreamedSpec
from offload_eval.reporting import markdown
from offload_eval.reporting.figures.plates import make_plates
from offload_eval.reporting.html_page import render_html
from offload_eval.reporting.markdown_html import sections_of
from offload_eval.reporting.report import render_report, write_report

HOSTILE = (
    "</td></table></main><script>alert(1)</script> \"q\" 'q' <img src=x onerror=y> [a](javascript:z) ![b](http://c) "
    "<http://d> **e** `f` | ``g`` &lt;h&gt; <!-- i --> </style> ]]> \x1b[31m"
)
VOID = {"meta", "link", "img", "br", "hr", "input", "col"}
PARSER = MarkdownIt("commonmark").enable("table")


class Page(HTMLParser):
    """What a browser finds in a page; a tag that is not closed where it should be is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def all(self, name: str) -> list[str | None]:
        return [value for key, value in self.attributes if key == name]

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())


def body_of(text):
    return "\n".join(section.body for section in sections_of(f"# title\n\n{text}"))


def words_of(fragment):
    return html.unescape(re.sub(r"<[^>]*>", " ", fragment)).split()


def clean_records():
    return [make_record(), make_traced(), make_streamed(), make_quantized()]


def page_of(experiment, records):
    return render_html(render_report(Study(experiment, records)), make_plates(Study(experiment, records)))


def clean_page():
    return page_of(make_experiment(), clean_records())


class TestMarkdown:
    @given(st.lists(st.text(max_size=40), min_size=2, max_size=2))
    @settings(max_examples=300, deadline=None)
    def test_any_text_in_a_table_is_that_text_and_no_markup(self, cells):
        page = Page(body_of(markdown.render_table(["x", "y"], [[cells[0], markdown.code(cells[1] or "-")]], "lr")))
        assert set(page.tags) <= {"div", "table", "thead", "tbody", "tr", "th", "td", "code"}
        shown = [" ".join(words_of(cell)) for cell in re.findall(r"<td[^>]*>(.*?)</td>", body_of(
            markdown.render_table(["x", "y"], [cells], "lr")))]  # fmt: skip
        assert shown == [" ".join(markdown.one_line(cell).split()) for cell in cells]

    @given(st.text(max_size=40))
    @settings(max_examples=300, deadline=None)
    def test_any_text_in_a_list_is_that_text_and_no_markup(self, text):
        page = Page(body_of(markdown.bullets([f"x{text}", text])))
        assert set(page.tags) <= {"ul", "li"}
        assert page.tags.count("li") == 2

    def test_a_fence_is_shown_as_it_is(self):
        assert body_of(markdown.fence("a <b> `c`\n\n# d")) == (
            '<pre tabindex="0"><code>a &lt;b&gt; `c`\n\n# d</code></pre>'
        )

    def test_numbers_stand_to_the_right(self):
        text = body_of(markdown.render_table(["a", "b"], [["c", "1"]], "lr"))
        assert '<th scope="col">a</th><th scope="col" class="n">b</th>' in text
        assert '<td>c</td><td class="n">1</td>' in text

    def test_the_same_heading_has_another_anchor_each_time(self):
        sections = sections_of("# a\n\n## a 1\n\n## a\n\n## a\n\n## \u4e2d")
        assert [section.anchor for section in sections] == ["a", "a-1", "a-2", "a-3", "section"]


class TestPage:
    def test_it_says_what_the_markdown_says(self):
        """By another parser of Markdown, word by word and table by table."""
        text = render_report(Study(make_experiment(), clean_records()))
        shown = PARSER.render(text)
        page = clean_page()
        without_figures = re.sub(r"<figure.*?</figure>", "", page[page.index("<main>") :], flags=re.DOTALL)
        assert words_of(without_figures) == words_of(shown)
        assert page.count("<table>") == shown.count("<table>")

    def test_it_is_well_formed_and_stands_by_itself(self):
        page = Page(clean_page())
        identifiers = page.all("id")
        assert len(set(identifiers)) == len(identifiers)
        assert {href.removeprefix("#") for href in page.all("href")} <= set(identifiers)
        assert page.all("src") == []
        assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
        assert "://" not in clean_page()
        assert "default-src 'none'" in " ".join(filter(None, page.all("content")))
        assert page.all("lang") == ["en"]

    def test_every_section_is_in_the_contents(self):
        page = clean_page()
        titles = re.findall(r"<h2 id=\"[^\"]*\">(.*?)</h2>", page)
        contents = page[page.index("<nav") : page.index("</nav>")]
        assert re.findall(r"<li><a href=\"#[^\"]*\">(.*?)</a>", contents) == titles
        assert "Strategies" in titles

    def test_hostile_text_shows_as_itself(self):
        strategy = StreamedSpec(name=HOSTILE)
        workload = make_workload(name=HOSTILE)
        experiment = make_experiment(
            name=HOSTILE, question=HOSTILE, model=ModelSpec(source=HOSTILE), workloads=(workload,)
        )
        spec = make_spec(strategy, workload=workload, model=ModelSpec(source=HOSTILE))
        records = [
            make_failure("failed", spec=spec, message=HOSTILE, machine=make_machine(cpu=HOSTILE)),
            make_record(spec=make_spec(workload=workload)),
        ]
        text = page_of(experiment, records)
        page, tame = Page(text), Page(clean_page())
        assert set(page.tags) <= set(tame.tags)
        assert {name for name, _ in page.attributes} <= {name for name, _ in tame.attributes}
        assert page.words.count(markdown.one_line(HOSTILE)) > 8

    def test_the_same_records_give_the_same_bytes(self, tmp_path):
        pages = [tmp_path / name / "report.html" for name in "ab"]
        for page in pages:
            page.parent.mkdir()
            write_report(page.parent, Study(make_experiment(), clean_records()))
        assert pages[0].read_bytes() == pages[1].read_bytes()
        assert pages[0].read_text() == clean_page()

    def test_300_records_are_less_than_2_mb(self, tmp_path):
        workloads = tuple(make_workload(name=f"load-{number}", prompt_tokens=100 + number) for number in range(100))
        makers = (make_record, make_traced, make_quantized)
        strategies = (DYNAMIC, DYNAMIC, QUANTIZED)
        records = [
            make(spec=make_spec(strategy, workload=workload))
            for workload in workloads
            for make, strategy in zip(makers, strategies, strict=True)
        ]
        paths = write_report(tmp_path, Study(make_experiment(workloads=workloads), records))
        assert 200_000 < paths[1].stat().st_size < 2_000_000

    def test_twice_the_records_take_about_twice_as_long(self, tmp_path):
        """Quadratic work would take four times as long."""
        times_s = {}
        for number in (100, 200, 400):
            loads = tuple(make_workload(name=f"load-{place}", prompt_tokens=100 + place) for place in range(number))
            records = [make_record(spec=make_spec(workload=load)) for load in loads]
            start_s = time.process_time()
            write_report(tmp_path, Study(make_experiment(workloads=loads), records))
            times_s[number] = time.process_time() - start_s
        assert times_s[400] < 3 * times_s[200]
