"""Batches that were timed, by their lengths and strategy."""

from collections.abc import Sequence

from offload_eval.analysis.probes import lengths_of, timed_batch
from offload_eval.core.limits import Lengths, TimedBatch
from offload_eval.core.records import RunRecord

Timed = dict[Lengths, dict[str, list[TimedBatch]]]
"""Timed batches by lengths and by strategy, each in order of its sessions."""


def timed_batches(records: Sequence[RunRecord]) -> Timed:
    """Times of every record that has them; those that were swapped are left out, since their times are the disk's."""
    timed: Timed = {}
    for record in records:
        figures = timed_batch(record) if record.status == "ok" else None
        if figures is not None and not figures.swapped:
            of_lengths = timed.setdefault(lengths_of(record.spec.workload), {})
            of_lengths.setdefault(record.spec.strategy.label, []).append(figures)
    for of_lengths in timed.values():
        for batches in of_lengths.values():
            batches.sort(key=lambda batch: batch.sessions)
    return timed
