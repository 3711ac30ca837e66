"""Whether the baseline strategy still writes the same text: its greedy tokens of both runs, token by token."""

from collections.abc import Sequence
from typing import Final

from offload_eval.analysis.compare_pairs import RunSide
from offload_eval.core.comparison import Change
from offload_eval.core.records import RunRecord

METRIC: Final = "equal_tokens"


def compare_tokens(
    baseline: RunSide, candidate: RunSide, pairs: Sequence[tuple[RunRecord, RunRecord]]
) -> list[Change]:
    """Counts the tokens of each baseline strategy that are the same in both runs.

    The candidate's value is how many of the baseline's are. One that is not is *worse* where model and prompts are the
    same to the byte, since then nothing but the code has changed; else it is *changed*, as another model writes
    another text. A run without its reference/ has no tokens, and no such line.
    """
    return [
        _compared(old, new, baseline.tokens[old.run_id], candidate.tokens[new.run_id])
        for old, new in pairs
        if old.run_id in baseline.tokens and new.run_id in candidate.tokens
    ]


def _compared(
    old: RunRecord, new: RunRecord, before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]
) -> Change:
    places = [
        (position, session)
        for session, (mine, theirs) in enumerate(zip(before, after, strict=False))
        for position, (own, other) in enumerate(zip(mine, theirs, strict=False))
        if own != other
    ]
    total = sum(map(len, before))
    same_work = (old.spec.model_fingerprint, old.spec.prompt_fingerprint) == (
        new.spec.model_fingerprint,
        new.spec.prompt_fingerprint,
    )
    where = min(places, default=(0, 0))
    return Change(
        metric=METRIC,
        title="greedy tokens of the baseline run that are the same",
        unit="tokens",
        workload=old.spec.workload.label,
        strategy=old.spec.strategy.label,
        baseline=total,
        candidate=total - len(places),
        ratio=(total - len(places)) / total if total else None,
        verdict="same" if not places else "worse" if same_work else "changed",
        lower_is_better=False,
        test="exact",
        note=""
        if not places
        else f"first at position {where[0]} of session {where[1]}, counted from 0"
        + ("" if same_work else "; the model or the prompts are others"),
        baseline_run_id=old.run_id,
        candidate_run_id=new.run_id,
    )
