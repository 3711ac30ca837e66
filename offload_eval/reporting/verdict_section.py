"""The verdict at the top of a report: its sentences, each number with its records, and one table at each length."""

from collections import Counter
from typing import Final

from offload_eval.analysis.study import Study
from offload_eval.core.verdict import Situation, Standing
from offload_eval.reporting.display import MISSING, show_count, show_ms, show_number
from offload_eval.reporting.markdown import Verbatim, bullets, code, paragraph, render_table, section
from offload_eval.reporting.price_table import bounds_overview, comparison_line, price_line
from offload_eval.reporting.sourced import Part, markdown, telling_characters
from offload_eval.reporting.verdict_text import elsewhere, overview, show_standing, situation_lines, situation_title

MOST_SITUATIONS: Final = 12
"""Combinations of lengths that a verdict is written out for; report.json has all of them."""
READING: Final = (
    "In brackets: the first characters of the run_id of every record that a number comes from; the table has them "
    "in full."
)
_TITLES: Final = (
    "strategy",
    "evidence",
    "analytic sessions",
    "traced sessions",
    "sessions",
    "over in-GPU",
    "most tokens/s",
    "TPOT there (ms)",
    "sessions there",
    "mean KL (nats)",
    "records",
)
_EVIDENCE: Final = 1


def render_verdict(study: Study) -> str:
    """What the run concludes, over all lengths and then at each."""
    verdict, characters = study.verdict, telling_characters(study.records)
    if not verdict.situations:
        return ""
    shown = verdict.situations[:MOST_SITUATIONS]
    left_out = len(verdict.situations) - len(shown)
    blocks = [
        bullets(_notes(study)),
        bullets([markdown(line, characters) for line in (*overview(verdict), bounds_overview(study.prices)) if line]),
        paragraph(READING),
        *(
            section(
                situation_title(situation),
                bullets([markdown(line, characters) for line in _lines(situation, study)]),
                _table(situation),
                level=3,
            )
            for situation in shown
        ),
        *([paragraph(f"{left_out:,} more combinations of lengths are in report.json.")] if left_out else []),
    ]
    return "\n\n".join(block for block in blocks if block)


def _notes(study: Study) -> list[str]:
    """What is not in the verdict, or not yet."""
    left_out, missing = study.verdict.num_left_out, study.num_missing_limits if study.limits else 0
    weighty = Counter(finding.code for finding in study.findings if finding.severity != "note")
    codes = ", ".join(f"{name} ({count:,})" for name, count in weighty.items())
    return [
        *([f"Findings against these numbers, to be read first: {codes}."] if weighty else []),
        *([f"The search is not done: {missing:,} limits are missing, and not known below."] if missing else []),
        *(
            [f"{left_out:,} cells of another model, budget, version or machine than the last one are left out."]
            if left_out
            else []
        ),
    ]


def _lines(situation: Situation, study: Study) -> list[list[Part]]:
    bounds = (each(study.prices, situation.lengths) for each in (price_line, comparison_line))
    return [*situation_lines(situation, study.verdict), *(line for line in bounds if line)]


def _table(situation: Situation) -> str:
    """One row a strategy, of what is known of any; their rungs where there are several, else a sentence names it."""
    rows = [_row(standing, situation) for standing in situation.standings]
    columns = list(zip(*rows, strict=True))
    places = [place for place, column in enumerate(columns) if set(column) != {MISSING}]
    if len(set(columns[_EVIDENCE]) - {MISSING}) == 1:
        places = [place for place in places if place != _EVIDENCE]
    align = "llrrrrrrrrl"
    return render_table(
        [_TITLES[place] for place in places],
        [[row[place] for place in places] for row in rows],
        "".join(align[place] for place in places),
    )


def _row(standing: Standing, situation: Situation) -> list[str]:
    fastest, fidelity, ratio = standing.fastest, standing.fidelity, situation.over_in_gpu(standing)
    return [
        standing.strategy,
        standing.evidence or MISSING,
        show_count(standing.analytic),
        show_count(standing.traced),
        MISSING if situation.basis == "traces" else show_standing(standing) or MISSING,
        MISSING if ratio is None else f"{ratio:.2f}x",
        MISSING if fastest is None else show_number(fastest.tokens_per_s),
        MISSING if fastest is None else show_ms(fastest.tpot_s),
        MISSING if fastest is None else show_count(fastest.sessions),
        MISSING if fidelity is None else f"{show_number(fidelity.mean_kl_nats)}{elsewhere(standing, situation)}",
        _run_ids(standing),
    ]


def _run_ids(standing: Standing) -> Verbatim:
    """Of the sessions, of the times and of the fidelity, each once."""
    ids = [
        *standing.session_run_ids,
        *([] if standing.fastest is None else [standing.fastest.run_id]),
        *([] if standing.fidelity is None else [standing.fidelity.run_id]),
    ]
    return Verbatim(", ".join(map(code, dict.fromkeys(ids))) or MISSING)
