"""The profiler's records of copies, from a trace in the format that torch.profiler exports."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_eval.core.records import ProfiledDirection
from offload_eval.errors import UnableError, UpstreamChangedError
from offload_eval.instruments.copy_profile import (
    ProfiledCopy,
    compare_with_account,
    parse_trace,
    profile_device_copies,
)
from offload_eval.instruments.transfers import TransferLog

PROMPT_BYTES = 8 * 100


def event(name: str, size_bytes: int, duration_us: float, **changes: Any) -> dict[str, Any]:
    """A copy as kineto writes it."""
    args = {
        "device": 0,
        "context": 1,
        "stream": 20,
        "correlation": 1281474,
        "bytes": size_bytes,
        "memory bandwidth (GB/s)": size_bytes / duration_us / 1000,
    }
    place = {"ph": "X", "cat": "gpu_memcpy", "pid": 0, "tid": 20, "ts": 4471520.103}
    return {**place, "name": name, "dur": duration_us, "args": args} | changes


def trace_of(*events: dict[str, Any]) -> dict[str, Any]:
    """With what stands around copies in a real trace."""
    others = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1.0, "dur": 9.5, "args": {"stream": 7}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "ts": 1.0, "dur": 3.0, "args": {"cbid": 41}},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "ts": 2.0, "dur": 1.0, "args": {"bytes": 64}},
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0.0, "args": {"name": "python"}},
        event("Memcpy DtoD (Device -> Device)", 4096, 2.0),
    ]
    return {"schemaVersion": 1, "traceEvents": [*others, *events]}


def test_copies_between_host_and_device_are_read_with_bytes_time_and_memory() -> None:
    trace = trace_of(
        event("Memcpy HtoD (Pinned -> Device)", 1_609_728, 31.5),
        event("Memcpy DtoH (Device -> Pinned)", 8_192, 2.25),
        event("Memcpy HtoD (Pageable -> Device)", 24, 1.5),
        event("Memcpy DtoH (Device -> Pageable)", 16, 1.0),
        event("CopyHostToDevice", 512, 4.0),
    )
    assert parse_trace(trace) == [
        ProfiledCopy("h2d", 1_609_728, pytest.approx(31.5e-6), False),
        ProfiledCopy("d2h", 8_192, pytest.approx(2.25e-6), False),
        ProfiledCopy("h2d", 24, pytest.approx(1.5e-6), True),
        ProfiledCopy("d2h", 16, pytest.approx(1e-6), True),
        ProfiledCopy("h2d", 512, pytest.approx(4e-6), None),
    ]


@pytest.mark.parametrize("trace", [[], {}, {"traceEvents": None}, {"traceEvents": ["copy"]}])
def test_a_trace_of_another_form_is_an_error(trace: Any) -> None:
    with pytest.raises(UpstreamChangedError, match="traceEvents"):
        parse_trace(trace)


class WrittenProfile:
    """Stands for torch's profiler: what it exports is a text, or a failure."""

    def __init__(self, exported: str | Exception) -> None:
        self._exported = exported

    def __enter__(self) -> "WrittenProfile":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        if isinstance(self._exported, Exception):
            raise self._exported
        Path(path).write_text(self._exported, encoding="utf-8")


def profile_as(monkeypatch: pytest.MonkeyPatch, exported: str | Exception) -> None:
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: WrittenProfile(exported))


def test_what_is_exported_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    profile_as(monkeypatch, json.dumps(trace_of(event("Memcpy HtoD (Pinned -> Device)", 64, 2.0))))
    with profile_device_copies() as copies:
        assert copies == []
    assert copies == [ProfiledCopy("h2d", 64, pytest.approx(2e-6), False)]


@pytest.mark.parametrize(
    "exported",
    [OSError("No space left on device"), RuntimeError("no profile"), '{"traceEvents": [{"name": "a\\b\\c"', "[]"],
    ids=["no room", "the profiler refuses", "not JSON", "another form"],
)
def test_records_that_cannot_be_had_are_told_apart_from_a_pass_that_failed(
    monkeypatch: pytest.MonkeyPatch, exported: str | Exception
) -> None:
    """The first costs the cross-check alone; what fails inside the block is the cell's."""
    profile_as(monkeypatch, exported)
    with pytest.raises(UnableError), profile_device_copies():
        pass
    with pytest.raises(torch.OutOfMemoryError), profile_device_copies():
        raise torch.OutOfMemoryError("the cell's own")


@pytest.mark.parametrize("changes", [{"args": {"stream": 20}}, {"dur": None}, {"args": {"bytes": "many"}}])
def test_a_record_without_bytes_or_time_is_an_error_and_never_a_zero(changes: dict[str, Any]) -> None:
    with pytest.raises(UpstreamChangedError, match="Memcpy HtoD"):
        parse_trace(trace_of(event("Memcpy HtoD (Pinned -> Device)", 64, 1.0) | changes))


def test_a_trace_without_copies_has_none() -> None:
    assert parse_trace({"traceEvents": []}) == []
    assert parse_trace(trace_of()) == []


def account() -> TransferLog:
    """Two fetches of 5,000 and one of 64 bytes, and one write-back of 640."""
    log = TransferLog(timed=True)
    for direction, size_bytes, busy_s in (("h2d", 5000, 1e-3), ("d2h", 640, 2e-4), ("h2d", 5000, 1e-3)):
        log.add_copy(direction, size_bytes)
        log.add_busy("prefill", direction, busy_s)
    log.phase = "decode"
    log.add_copy("h2d", 64)
    log.add_busy("decode", "h2d", 1e-5)
    return log


FETCHES = [ProfiledCopy("h2d", 5000, 9e-4, False)] * 2 + [ProfiledCopy("h2d", 64, 8e-6, False)]
WRITE_BACK = ProfiledCopy("d2h", 640, 1e-4, False)
TOKENS = [ProfiledCopy("d2h", PROMPT_BYTES, 2e-6, True), ProfiledCopy("d2h", 8, 1e-6, True)]


def compared(copies: list[ProfiledCopy], way: str) -> ProfiledDirection:
    profiled = compare_with_account(copies, account(), output_tokens=17, most_token_bytes=PROMPT_BYTES)
    return profiled.h2d if way == "h2d" else profiled.d2h


def test_what_generate_sends_itself_is_left_out() -> None:
    """The prompt and a token go to the host; neither is of a size that the account has."""
    seen = compared([*FETCHES, WRITE_BACK, *TOKENS], "d2h")
    assert (seen.bytes, seen.num_copies, seen.num_pageable_copies, seen.num_other_copies) == (640, 1, 0, 2)
    assert (seen.accounted_bytes, seen.num_accounted_copies) == (640, 1)
    assert (seen.copy_s, seen.accounted_busy_s) == pytest.approx((1e-4, 2e-4))


def test_both_phases_of_the_account_are_beside_the_whole_pass() -> None:
    seen = compared([*FETCHES, WRITE_BACK, *TOKENS], "h2d")
    assert (seen.bytes, seen.accounted_bytes) == (10_064, 10_064)
    assert (seen.num_copies, seen.num_accounted_copies, seen.num_other_copies) == (3, 3, 0)
    assert (seen.copy_s, seen.accounted_busy_s) == pytest.approx((1.808e-3, 2.01e-3))


@pytest.mark.parametrize(
    ("copies", "seen_bytes"),
    [
        ([*FETCHES, FETCHES[0]], 15_064),
        ([*FETCHES, ProfiledCopy("h2d", 64, 8e-6, False)], 10_128),
        ([*FETCHES, ProfiledCopy("h2d", PROMPT_BYTES + 1, 8e-6, False)], 10_865),
        (FETCHES[1:], 5_064),
    ],
    ids=["a fetch more", "a small fetch more", "one of another size", "a fetch less"],
)
def test_a_copy_that_the_account_has_not_stays_in(copies: list[ProfiledCopy], seen_bytes: int) -> None:
    seen = compared(copies, "h2d")
    assert (seen.bytes, seen.accounted_bytes) == (seen_bytes, 10_064)


def test_pageable_memory_is_counted_and_unknown_where_one_record_does_not_say() -> None:
    pageable = WRITE_BACK._replace(is_pageable=True)
    assert compared([pageable, WRITE_BACK], "d2h").num_pageable_copies == 1
    assert compared([pageable._replace(is_pageable=None), WRITE_BACK], "d2h").num_pageable_copies is None
