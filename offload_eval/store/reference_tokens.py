"""Reads the greedy tokens that a run's baseline strategy left in its reference/."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from offload_eval.core.records import RunRecord

Tokens = tuple[tuple[int, ...], ...]


def read_reference_tokens(run_dir: Path, records: Iterable[RunRecord]) -> dict[str, Tokens]:
    """The tokens of each session, by the run_id of the baseline strategy's cell.

    A run that was copied without its reference/, or whose file is not what it should be, has none.
    """
    found = {
        record.run_id: _read(run_dir / "reference" / f"{record.spec.reference_key}.tokens.npy")
        for record in records
        if record.spec.is_baseline and record.spec.role == "cell" and record.evidence != "traced"
    }
    return {run_id: tokens for run_id, tokens in found.items() if tokens is not None}


def _read(path: Path) -> Tokens | None:
    try:
        tokens = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        return None
    return tuple(tuple(int(token) for token in row) for row in tokens)
