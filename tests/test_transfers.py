"""Transfer accounting on real runs of the cpu device: a healthy run has no finding, each planted fault its own.

The model: 3 layers, batch 2, 2 kv_heads, head_dim 16, float32. A token's keys and values of one layer are
2 * 2 * 16 * 2 * 4 = 512 bytes for the batch. Prompt 12, 5 tokens out: 4 decode steps, whose fetches bring 12, 13, 14
and 15 tokens of 3 layers: 54 * 3 * 512 = 82,944 bytes in 12 copies, of which the first, 12 * 512 = 6,144 bytes, is
fetched when the prefill ends. Decode writes back 4 * 3 rows: 6,144 bytes in 12 copies.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
from factories import make_conditions, make_facts, make_machine
from tiny_models import tiny_llama

from offload_eval.analysis.findings import find
from offload_eval.analysis.transfers import explain_transfers
from offload_eval.bounds.model_shape import model_shape
from offload_eval.core.experiment import (
    BudgetSpec,
    CpuSpec,
    DynamicSpec,
    MeasurementPlan,
    ModelSpec,
    RandomPrompt,
    StrategySpec,
    StreamedSpec,
    Workload,
)
from offload_eval.core.hardware import HardwareProfile, LinkProfile, PeakFlops, SourcedValue
from offload_eval.core.records import RunRecord, record_id
from offload_eval.core.run_spec import RunSpec, content_hash
from offload_eval.errors import UnableError
from offload_eval.execution.cell import measure_cell, record_reference
from offload_eval.execution.reference import ReferenceFiles
from offload_eval.instruments.copy_profile import ProfiledCopy
from offload_eval.instruments.cpu import CpuDevice, CpuLink, CpuTransfer
from offload_eval.tracing.trace import trace_strategy

BATCH, PROMPT, OUTPUT, LAYERS = 2, 12, 5, 3
PACE_BYTES_PER_S = 300_000
"""A copy of 6,144 bytes takes 20.5 ms, beside which a late wake-up is little."""
CODES = {
    "transfers_differ_from_trace",
    "transfers_differ_from_card",
    "pageable_copies",
    "link_below_calibration",
    "below_ideal_bound",
}
"""What a healthy run has none of, however busy the machine. Exposed time against the baseline depends on its noise."""


class ExtraCopyLink(CpuLink):
    """Writes the first rows back twice."""

    def d2h(self, host: torch.Tensor, device: torch.Tensor, after: Sequence[Any] = ()) -> CpuTransfer:
        if self.log.phase == "decode" and not hasattr(self, "planted"):
            self.planted = super().d2h(host, device, after)
        return super().d2h(host, device, after)


class WrongSizeLink(CpuLink):
    """Fetches half of the tokens, once."""

    def h2d(self, device: torch.Tensor, host: torch.Tensor, after: Sequence[Any] = ()) -> CpuTransfer:
        if self.log.phase == "decode" and not hasattr(self, "planted"):
            self.planted = True
            return super().h2d(device[: len(device) // 2], host[: len(host) // 2], after)
        return super().h2d(device, host, after)


class PageableLink(CpuLink):
    """Hands out the first layer's host buffer past the link."""

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if not hasattr(self, "planted"):
            self.planted = True
            return torch.empty(shape, dtype=dtype)
        return super().empty_host(shape, dtype)


class PlantedDevice(CpuDevice):
    """The cpu device with a link of another class, at a pace of its own."""

    def __init__(self, link_class: type[CpuLink], bytes_per_s: int) -> None:
        super().__init__(bytes_per_s)
        self._link_class, self._planted_bytes_per_s = link_class, bytes_per_s

    def open_link(self, *, timed: bool) -> CpuLink:
        return self._link_class(self.memory, timed=timed, bytes_per_s=self._planted_bytes_per_s)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(
        torch.float32,
        num_hidden_layers=LAYERS,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
    )


def spec_of(strategy: StrategySpec, chunk_tokens: int | None = None) -> RunSpec:
    return RunSpec(
        experiment="planted",
        model=ModelSpec(config="unused", weights="random", dtype="float32"),
        model_fingerprint="0",
        prompt_fingerprint="0",
        device="cpu",
        cpu=CpuSpec(link_bytes_per_s=PACE_BYTES_PER_S),
        budget=BudgetSpec(device_bytes=10**9),
        workload=Workload(
            batch_size=BATCH,
            prompt_tokens=PROMPT,
            output_tokens=OUTPUT,
            prompt=RandomPrompt(),
            prefill_chunk_tokens=chunk_tokens,
        ),
        strategy=strategy,
        baseline=DynamicSpec(),
        measurement=MeasurementPlan(trials=1, fidelity=False),
    )


RunCell = Callable[..., list[RunRecord]]


@pytest.fixture(scope="module")
def run_cell(model: Any, tmp_path_factory: pytest.TempPathFactory) -> RunCell:
    """Runs `streamed` over a link and returns its record with that of its trace."""
    folder = tmp_path_factory.mktemp("reference")
    prompt = torch.randint(128, (BATCH, PROMPT), generator=torch.Generator().manual_seed(1))
    facts = make_facts(shape=model_shape(model.config.to_dict()))

    def run(
        link_class: type[CpuLink] = CpuLink,
        bytes_per_s: int = PACE_BYTES_PER_S,
        device: CpuDevice | None = None,
        chunk_tokens: int | None = None,
        **knobs: Any,
    ) -> list[RunRecord]:
        baseline = spec_of(DynamicSpec(), chunk_tokens)
        files = ReferenceFiles(folder, baseline.reference_key)
        files.save_prompt(prompt.numpy())
        if files.load_tokens() is None:
            record_reference(baseline, model, CpuDevice(), folder)
        spec = spec_of(StreamedSpec(prefetch_layers=1, **knobs), chunk_tokens)
        trace = trace_strategy(model, spec.strategy, spec.workload, device="cpu")
        device = device or PlantedDevice(link_class, bytes_per_s)
        result = measure_cell(spec, model, device, folder, make_conditions(), lambda *_: None)
        assert result.status == "ok", result.failure
        common = {"spec": spec, "machine": make_machine(), "model": facts, "status": "ok", "duration_s": 1.0}
        started = {"started_at_utc": result.started_at_utc}
        return [
            RunRecord(run_id=content_hash(spec), evidence="emulated", trials=result.trials, **common, **started),
            RunRecord(run_id=record_id(spec, "traced"), evidence="traced", trace=trace, **common, **started),
        ]

    return run


def profile_of(bytes_per_s: float, **changes: Any) -> HardwareProfile:
    """An emulated link, calibrated."""
    rate = SourcedValue(value=bytes_per_s, source="test", date="2026-01-01")
    link = LinkProfile(name="memory copies", emulated=True, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate)
    return HardwareProfile(
        name="here", calibrated=True, machine="this one", link=msgspec.structs.replace(link, **changes)
    )


def codes_of(records: list[RunRecord], hardware: HardwareProfile | None = None) -> set[str]:
    return {finding.code for finding in find(records, hardware)} & CODES


def test_a_healthy_run_counts_what_the_formula_says_and_has_no_finding(run_cell: RunCell) -> None:
    records = run_cell()
    decode = records[0].trials[0].decode
    assert (decode.h2d_bytes, decode.num_h2d_copies) == (82_944 - 6_144, 11)
    assert (decode.d2h_bytes, decode.num_d2h_copies) == (6_144, 12)
    assert decode.num_pageable_copies == 0
    assert codes_of(records) == set()
    assert codes_of(records, profile_of(PACE_BYTES_PER_S)) == set()


@pytest.mark.parametrize(("host_dtype", "row_bytes"), [("native", 512), ("int4", 128)])
def test_a_healthy_chunked_prefill_fetches_what_came_before_each_chunk_and_has_no_finding(
    run_cell: RunCell, host_dtype: str, row_bytes: int
) -> None:
    """Chunks begin at 0, 5 and 10, so that 5 and 10 tokens of 3 layers are fetched for them: 45 rows.

    In int4 a head's 16 values of float32 are 8 bytes of codes, a scale and an offset: 16 bytes instead of 64.
    """
    records = run_cell(chunk_tokens=5, host_dtype=host_dtype)
    prefill, decode = records[0].trials[0].prefill, records[0].trials[0].decode
    assert (prefill.h2d_bytes, prefill.num_h2d_copies) == ((45 + 12) * row_bytes, 2 * 3 + 1)
    assert (decode.h2d_bytes, decode.num_h2d_copies) == ((54 * 3 - 12) * row_bytes, 11)
    assert codes_of(records) == set()


def test_a_real_prefill_is_not_below_its_bounds(run_cell: RunCell) -> None:
    """Its 18,432 bytes of write-back take 246 ms, of which the first token waits for one layer's at most."""
    pace_bytes_per_s = PACE_BYTES_PER_S // 4
    profile = msgspec.structs.replace(
        profile_of(pace_bytes_per_s),
        memory_bytes_per_s=SourcedValue(value=1e12, source="test", date="2026-01-01"),
        peak_flops_per_s=PeakFlops(float32=SourcedValue(value=1e12, source="test", date="2026-01-01")),
    )
    records = run_cell(bytes_per_s=pace_bytes_per_s)
    prefill, _ = explain_transfers(records, profile)
    ttft_s = min(trial.ttft_s for trial in records[0].trials if trial.ttft_s is not None)
    assert prefill.ideal_s is not None
    assert prefill.scheduled_s is not None
    assert prefill.serial_s is not None
    assert 0 < prefill.ideal_s <= prefill.scheduled_s <= ttft_s < 18_432 / pace_bytes_per_s < prefill.serial_s
    assert codes_of(records, profile) == set()


def test_busy_time_and_speed_are_those_of_the_pace(run_cell: RunCell) -> None:
    """76,800 bytes at 300,000 bytes a second take 256 ms: late wake-ups of the copy thread are not the link's."""
    _, decode = explain_transfers(run_cell())
    assert decode.h2d.busy_s is not None
    assert decode.h2d.busy_s == pytest.approx(0.256, rel=0.05)
    assert decode.h2d.bytes_per_s == pytest.approx(76_800 / decode.h2d.busy_s)
    assert decode.link == "the pace of cpu.link_bytes_per_s"
    assert decode.exposed_by_waits_s is not None
    assert decode.exposed_by_waits_s > 0.04, "a step of 64 ms of copies computes for a millisecond or so"
    assert decode.hidden_ratio is not None
    assert decode.hidden_ratio < 0.5


def test_one_extra_copy_is_found(run_cell: RunCell) -> None:
    records = run_cell(ExtraCopyLink)
    assert codes_of(records) == {"transfers_differ_from_trace", "transfers_differ_from_card"}
    (message,) = [each.message for each in find(records) if each.code == "transfers_differ_from_trace"]
    assert "6,656 bytes to the host were counted where the trace has 6,144" in message
    assert "13 copies to the host were counted where the trace has 12" in message


def test_a_copy_of_another_size_is_found(run_cell: RunCell) -> None:
    """The first fetch submitted in decode is of 12 tokens; half of them are 3,072 bytes."""
    records = run_cell(WrongSizeLink)
    assert codes_of(records) == {"transfers_differ_from_trace", "transfers_differ_from_card"}
    (message,) = [each.message for each in find(records) if each.code == "transfers_differ_from_trace"]
    assert "73,728 bytes to the device were counted where the trace has 76,800" in message
    assert "copies to the device" not in message, "their number is right"


def test_a_host_buffer_that_is_not_the_links_is_found(run_cell: RunCell) -> None:
    """One of three layers: its 4 fetches, and its write-backs of the prompt and of 4 tokens."""
    records = run_cell(PageableLink)
    assert codes_of(records) == {"pageable_copies"}
    (message,) = [each.message for each in find(records) if each.code == "pageable_copies"]
    start = "b2-p12-o5 / streamed-ahead1: 9 copies are from or to host memory that is not made by the link"
    assert message.startswith(start)


def test_a_link_20_percent_slower_than_its_profile_is_found(run_cell: RunCell) -> None:
    records = run_cell(bytes_per_s=PACE_BYTES_PER_S * 4 // 5)
    assert codes_of(records) == {"link_below_calibration"}
    assert codes_of(records, profile_of(PACE_BYTES_PER_S)) == {"link_below_calibration"}
    assert codes_of(records, profile_of(PACE_BYTES_PER_S * 4 // 5)) == set(), "the same run on the link that it had"


class ProfilingDevice(CpuDevice):
    """The cpu device with a profiler, which writes down every copy as it is submitted, 1 ms each."""

    has_profiler = True

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__()
        self.seen: list[ProfiledCopy] = []
        self._failure = failure

    @contextmanager
    def profile_copies(self) -> Iterator[list[ProfiledCopy]]:
        copies: list[ProfiledCopy] = []
        self.seen.clear()
        yield copies
        if self._failure is not None:
            raise self._failure
        copies += [*self.seen, ProfiledCopy("d2h", BATCH * 8, 1e-3, True)]

    def open_link(self, *, timed: bool) -> CpuLink:
        seen = self.seen

        class Profiled(CpuLink):
            def h2d(self, device: torch.Tensor, host: torch.Tensor, after: Sequence[Any] = ()) -> CpuTransfer:
                seen.append(ProfiledCopy("h2d", host.nbytes, 1e-3, False))
                return super().h2d(device, host, after)

            def d2h(self, host: torch.Tensor, device: torch.Tensor, after: Sequence[Any] = ()) -> CpuTransfer:
                seen.append(ProfiledCopy("d2h", host.nbytes, 1e-3, False))
                return super().d2h(host, device, after)

        return Profiled(self.memory, timed=timed, bytes_per_s=None)


def test_where_the_device_has_a_profiler_a_pass_lays_its_records_beside_the_account(run_cell: RunCell) -> None:
    """Both phases: 12 fetches of 82,944 bytes; 3 prompts' rows of 6,144 bytes and 12 tokens' of 512."""
    profiled = run_cell(device=ProfilingDevice())[0].trials[0].profiled_copies
    assert profiled is not None
    assert profiled.output_tokens == OUTPUT
    assert (profiled.h2d.bytes, profiled.h2d.accounted_bytes) == (82_944, 82_944)
    assert (profiled.h2d.num_copies, profiled.h2d.num_accounted_copies) == (12, 12)
    assert (profiled.d2h.bytes, profiled.d2h.accounted_bytes) == (24_576, 24_576)
    assert (profiled.d2h.num_copies, profiled.d2h.num_other_copies) == (15, 1)
    assert (profiled.h2d.copy_s, profiled.d2h.copy_s) == pytest.approx((0.012, 0.015))


def test_a_profile_that_cannot_be_read_costs_the_cross_check_and_not_the_cell(run_cell: RunCell) -> None:
    trial = run_cell(device=ProfilingDevice(UnableError("another format")))[0].trials[0]
    assert trial.profiled_copies is None
    assert trial.decode.h2d_bytes == 76_800
    assert trial.e2e_latency_s is not None
