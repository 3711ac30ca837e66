"""Rules about what crossed the link: counts that a trace or the arithmetic contradicts, and copies that block."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from offload_eval.analysis.cells import latest_records, latest_traces, merged_sample
from offload_eval.analysis.traced_totals import MovedTotals, traced_decode, traced_decode_of_model, traced_prefill
from offload_eval.bounds.strategy_bound import moved_bytes, prefill_fetched_bytes
from offload_eval.core.experiment import DynamicSpec, StreamedSpec
from offload_eval.core.judgement import Finding
from offload_eval.core.records import PHASES, PhaseSample, RunRecord
from offload_eval.core.run_spec import RunSpec
from offload_eval.core.trace import Trace

_WORDS = ("bytes to the device", "bytes to the host", "copies to the device", "copies to the host")


def check_traced_transfers(records: Sequence[RunRecord]) -> list[Finding]:
    """A run moved other bytes than its trace, or in another number of copies.

    A trace has the model's own copies as well, which no link accounts for, and the baseline's has nothing else: it is
    taken off. Decode of every strategy is held to what is left, or to the whole where the baseline was not traced; the
    prefill of `streamed` alone, and only less the baseline's: scalars cross when upstream's layers are set up.
    """
    traces = {record.spec: record.trace for record in latest_traces(records)}
    return [
        finding
        for run in latest_records(records)
        if run.status == "ok" and (trace := traces.get(run.spec)) is not None
        for finding in _against_trace(run, trace, _of_model(run, traces))
    ]


def _of_model(run: RunRecord, traces: Mapping[RunSpec, Trace | None]) -> Trace | None:
    """The baseline's trace, where its cache never leaves the device."""
    if not isinstance(run.spec.baseline, DynamicSpec):
        return None
    return traces.get(msgspec.structs.replace(run.spec, strategy=run.spec.baseline))


def _traced_totals(run: RunRecord, trace: Trace, of_model: Trace | None) -> tuple[MovedTotals | None, ...]:
    """What the link of a run counts in each phase by its trace; None where that is not certain."""
    decode = traced_decode(run, trace)
    if of_model is None:
        return None, decode
    own = traced_decode_of_model(of_model)
    return (
        traced_prefill(trace).less(traced_prefill(of_model)) if isinstance(run.spec.strategy, StreamedSpec) else None,
        None if decode is None or own is None else decode.less(own),
    )


def _against_trace(run: RunRecord, trace: Trace, of_model: Trace | None) -> Iterator[Finding]:
    sample = merged_sample(run)
    for phase, traced in zip(PHASES, _traced_totals(run, trace, of_model), strict=True):
        counted: PhaseSample = getattr(sample, phase)
        differences = [] if traced is None else list(_differences(counted, traced))
        if differences:
            yield Finding(
                code="transfers_differ_from_trace",
                severity="error",
                message=f"over the whole {phase}, {'; '.join(differences)}. Suspected cause: the strategy copies "
                "something twice or not at all, the account misses a copy, or the trace has one of the model's own.",
                remedy="Trust no figure of the link before they agree; look at the strategy's copies first.",
                run_ids=(run.run_id,),
            )


def _differences(counted: PhaseSample, traced: MovedTotals) -> Iterator[str]:
    seen = (counted.h2d_bytes, counted.d2h_bytes, counted.num_h2d_copies, counted.num_d2h_copies)
    for words, count, expected in zip(_WORDS, seen, traced, strict=True):
        if count is not None and count != expected:
            yield f"{count:,} {words} were counted where the trace has {expected:,}"


def check_transfer_card(record: RunRecord) -> Finding | None:
    """A run moved other bytes than the arithmetic says it must.

    What decode writes back is held to the card of every strategy that has one; what is fetched to that of `streamed`
    alone, and over both phases: its first fetches for decode belong to the prefill, whose chunks fetch for themselves
    too. Upstream's prefetcher fetches past the end. Records made before copies were counted are not held to it.
    """
    sample, moved = merged_sample(record), moved_bytes(record.spec, record.model)
    prefill, decode = sample.prefill, sample.decode
    if record.status != "ok" or moved is None or decode.num_d2h_copies is None:
        return None
    fetched_bytes, written_bytes = moved
    if decode.d2h_bytes is not None and decode.d2h_bytes != written_bytes:
        return _differs_from_card(record, "decode copied to the host", decode.d2h_bytes, written_bytes)
    both = (prefill.h2d_bytes, decode.h2d_bytes)
    if not isinstance(record.spec.strategy, StreamedSpec) or both[0] is None or both[1] is None:
        return None
    fetched_bytes += prefill_fetched_bytes(record.spec, record.model) or 0
    if both[0] + both[1] != fetched_bytes:
        return _differs_from_card(record, "prefill and decode copied to the device", both[0] + both[1], fetched_bytes)
    return None


def _differs_from_card(record: RunRecord, what: str, seen_bytes: int, card_bytes: int) -> Finding:
    more = "more" if seen_bytes > card_bytes else "fewer"
    return Finding(
        code="transfers_differ_from_card",
        severity="error",
        message=f"{what} {seen_bytes:,} bytes where the arithmetic gives {card_bytes:,}: "
        f"{abs(seen_bytes - card_bytes):,} bytes {more}. Suspected cause: the strategy copies something twice or not "
        "at all, or the arithmetic does not describe it.",
        remedy="Trust no figure of the link before they agree; look at the strategy's copies first.",
        run_ids=(record.run_id,),
    )


def check_pageable(record: RunRecord) -> Finding | None:
    """Copies whose host side is not pinned: on a GPU they block the host and overlap nothing."""
    sample = merged_sample(record)
    counts = [phase.num_pageable_copies for phase in (sample.prefill, sample.decode)]
    num_pageable = sum(count or 0 for count in counts)
    if num_pageable == 0:
        return None
    not_pinned = "not made by the link" if record.evidence == "emulated" else "not pinned"
    return Finding(
        code="pageable_copies",
        severity="warning",
        message=f"{num_pageable:,} copies are from or to host memory that is {not_pinned} ({counts[0] or 0:,} in "
        f"prefill, {counts[1] or 0:,} in decode). On a GPU the driver stages such a copy while the host waits: it "
        "overlaps nothing, at a fraction of the link's speed. Suspected cause: a buffer allocated past the link.",
        remedy="Allocate every host buffer with the link's empty_host, or pin it.",
        run_ids=(record.run_id,),
    )
