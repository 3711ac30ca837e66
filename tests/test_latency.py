"""Latency bounds against arithmetic by hand, and the published worked bound of Llama-3.1-8B on an H100.

Its weights are 16.06 GB in bfloat16 and 32,768 tokens of KV 4.295 GB; the link moves 55 GB/s one way and 41.7 GB/s
each way at once.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_eval.bounds.latency import PhaseWork, bound_phase
from offload_eval.core.hardware import HardwareProfile, LinkProfile, PeakFlops, SourcedValue
from offload_eval.core.records import Phase
from offload_eval.errors import InputError
from offload_eval.store.hardware_file import hardware_names, load_hardware

WEIGHTS, KV, TOKEN = 16_060_522_496, 32_768 * 131_072, 131_072
PHASES: tuple[Phase, ...] = ("prefill", "decode")


def value(number: float) -> SourcedValue:
    return SourcedValue(value=number, source="this test", date="2026-11-29")


def card(**changes: Any) -> HardwareProfile:
    link = LinkProfile(
        name="PCIe 5.0 x16",
        h2d_bytes_per_s=value(55e9),
        d2h_bytes_per_s=value(55e9),
        h2d_with_d2h_bytes_per_s=value(41.7e9),
        d2h_with_h2d_bytes_per_s=value(41.7e9),
    )
    base = {
        "name": "card",
        "memory_bytes_per_s": value(3350e9),
        "peak_flops_per_s": PeakFlops(bfloat16=value(989e12)),
        "link": link,
    }
    return HardwareProfile(**(base | changes))


def step(**changes: int) -> PhaseWork:
    """A decode step of batch 1: two operations a weight; concatenation reads and writes the cache once more each."""
    base = {
        "flops": WEIGHTS,
        "least_bytes": WEIGHTS + KV,
        "touched_bytes": WEIGHTS + 3 * KV,
    }
    return PhaseWork(**(base | changes))


def test_the_in_gpu_step_reads_weights_and_cache_once():
    bound = bound_phase(step(), card(), "bfloat16", "dynamic")
    assert bound.ideal.seconds == pytest.approx(6.1e-3, rel=0.01)
    assert bound.ideal.limited_by == "memory"


def test_streaming_is_bound_by_the_link():
    bound = bound_phase(step(h2d_bytes=KV, d2h_bytes=TOKEN), card(), "bfloat16", "streamed")
    assert bound.ideal.seconds == pytest.approx(78e-3, rel=0.01)
    assert bound.scheduled.seconds == pytest.approx(78e-3, rel=0.01)
    assert bound.ideal.limited_by == bound.scheduled.limited_by == "h2d"


@pytest.mark.parametrize(("contended", "expected_s"), [(False, 87e-3), (True, 112e-3)])
def test_the_write_back_of_transformers_waits_in_line(contended: bool, expected_s: float):
    """About 87 ms uncontended, 112 ms at 41.7 GB/s each way."""
    link = card().link
    assert link is not None
    if not contended:
        link = LinkProfile(name="apart", h2d_bytes_per_s=value(55e9), d2h_bytes_per_s=value(55e9))
    work = step(h2d_bytes=KV, d2h_bytes=KV + TOKEN)
    bound = bound_phase(work, card(link=link), "bfloat16", "offloaded")
    assert bound.scheduled.seconds == pytest.approx(expected_s, rel=0.02)
    assert bound.scheduled.limited_by == "d2h"


def test_both_directions_share_the_links_total():
    """4.295 GB each way at 41.7 GB/s take longer than at 55."""
    bound = bound_phase(step(h2d_bytes=KV, d2h_bytes=KV), card(), "bfloat16", "streamed")
    assert bound.ideal.seconds == pytest.approx(KV / 41.7e9)


def test_a_short_write_back_contends_only_while_it_lasts():
    """10 GB in, 4.17 GB out: 0.1 s at 41.7 each, then the other 5.83 GB at 55."""
    work = PhaseWork(flops=0, least_bytes=0, touched_bytes=0, h2d_bytes=10 * 10**9, d2h_bytes=4_170_000_000)
    assert bound_phase(work, card(), "bfloat16", "streamed").scheduled.seconds == pytest.approx(0.1 + 5.83 / 55)


def test_serial_is_the_sum():
    bound = bound_phase(step(h2d_bytes=KV, d2h_bytes=TOKEN), card(), "bfloat16", "streamed")
    parts = (WEIGHTS / 989e12, (WEIGHTS + 3 * KV) / 3350e9, KV / 55e9, TOKEN / 55e9)
    assert bound.serial.seconds == pytest.approx(sum(parts))
    assert (bound.compute_s, bound.memory_s, bound.h2d_s, bound.d2h_s) == pytest.approx(parts)


def test_a_prefill_is_bound_by_compute():
    work = PhaseWork(flops=10**15, least_bytes=WEIGHTS, touched_bytes=2 * WEIGHTS)
    bound = bound_phase(work, card(), "bfloat16", "dynamic")
    assert bound.ideal.seconds == pytest.approx(10**15 / 989e12)
    assert bound.scheduled.seconds == pytest.approx(10**15 / 989e12)
    assert bound.ideal.limited_by == "compute"


def prompt(**changes: int) -> PhaseWork:
    """989 GFLOP, 1 ms; weights of 3.35 GB, 1 ms, read twice by its operators, 2 ms."""
    base = {"flops": 989 * 10**9, "least_bytes": 3_350_000_000, "touched_bytes": 6_700_000_000}
    return PhaseWork(**(base | changes))


def test_a_first_token_need_not_wait_for_copies_on_streams_of_their_own():
    """5.5 GB each way are 100 ms each: a first token can be out after 1 ms, and as the code reads, after 2."""
    work = prompt(h2d_bytes=5_500_000_000, d2h_bytes=5_500_000_000)
    bound = bound_phase(work, card(), "bfloat16", "streamed", "prefill")
    assert (bound.ideal.seconds, bound.scheduled.seconds) == pytest.approx((1e-3, 2e-3))
    assert (bound.h2d_s, bound.d2h_s, bound.serial.seconds) == pytest.approx((0.1, 0.1, 0.203))
    decode = bound_phase(work, card(), "bfloat16", "streamed")
    assert decode.ideal.seconds == pytest.approx(5.5 / 41.7)


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_a_first_token_waits_for_transformers_write_back_and_not_for_its_prefetches(kind: str):
    """5.5 GB back are 100 ms in line with 2 ms of computing, at the link's own speed: nothing need oppose them."""
    work = prompt(h2d_bytes=55_000_000_000, d2h_bytes=5_500_000_000)
    bound = bound_phase(work, card(), "bfloat16", kind, "prefill")
    assert (bound.ideal.seconds, bound.scheduled.seconds) == pytest.approx((0.1, 0.102))
    assert bound.ideal.limited_by == bound.scheduled.limited_by == "d2h"
    assert bound.serial.seconds == pytest.approx(1.103)


def test_one_direction_may_be_all_that_is_known_of_contention():
    link = LinkProfile(
        name="C2C", h2d_bytes_per_s=value(40e9), d2h_bytes_per_s=value(40e9), h2d_with_d2h_bytes_per_s=value(20e9)
    )
    bound = bound_phase(step(h2d_bytes=20 * 10**9, d2h_bytes=40 * 10**9), card(link=link), "bfloat16", "streamed")
    assert bound.ideal.seconds == pytest.approx(1.0)


def test_directions_that_hinder_each_other_go_one_after_the_other():
    """1 GB each way at 20 GB/s together, 55 alone."""
    link = LinkProfile(
        name="bad",
        h2d_bytes_per_s=value(55e9),
        d2h_bytes_per_s=value(55e9),
        h2d_with_d2h_bytes_per_s=value(20e9),
        d2h_with_h2d_bytes_per_s=value(20e9),
    )
    work = PhaseWork(flops=0, least_bytes=0, touched_bytes=0, h2d_bytes=10**9, d2h_bytes=10**9)
    bound = bound_phase(work, card(link=link), "bfloat16", "streamed")
    assert bound.ideal.seconds == bound.scheduled.seconds == bound.serial.seconds == pytest.approx(2 / 55)


sizes = st.integers(0, 10**13)
rates = st.floats(1e8, 1e12)


@given(sizes, sizes, sizes, sizes, sizes, rates, rates, st.floats(0.05, 1), st.floats(0.05, 1), st.data())
def test_ideal_is_never_above_scheduled_nor_scheduled_above_serial(
    flops: int,
    least: int,
    again: int,
    h2d: int,
    d2h: int,
    h2d_rate: float,
    d2h_rate: float,
    h2d_share: float,
    d2h_share: float,
    data: st.DataObject,
):
    kind, phase = data.draw(st.sampled_from(["dynamic", "offloaded", "streamed"])), data.draw(st.sampled_from(PHASES))
    work = PhaseWork(flops=flops, least_bytes=least, touched_bytes=least + again, h2d_bytes=h2d, d2h_bytes=d2h)
    link = LinkProfile(
        name="any",
        h2d_bytes_per_s=value(h2d_rate),
        d2h_bytes_per_s=value(d2h_rate),
        h2d_with_d2h_bytes_per_s=value(h2d_rate * h2d_share),
        d2h_with_h2d_bytes_per_s=value(d2h_rate * d2h_share),
    )
    bound = bound_phase(work, card(link=link), "bfloat16", kind, phase)
    assert bound.ideal.seconds <= bound.scheduled.seconds * (1 + 1e-9)
    assert bound.scheduled.seconds <= bound.serial.seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"memory_bytes_per_s": None}, "memory_bytes_per_s is needed"),
        ({"peak_flops_per_s": PeakFlops()}, "peak_flops_per_s.bfloat16 is needed"),
        ({"link": None}, "has no link"),
        ({"link": LinkProfile(name="x", d2h_bytes_per_s=value(1.0))}, "link.h2d_bytes_per_s is needed"),
    ],
)
def test_a_figure_that_is_missing_is_named(changes: dict[str, Any], named: str):
    with pytest.raises(InputError, match=named):
        bound_phase(step(h2d_bytes=1, d2h_bytes=1), card(**changes), "bfloat16", "streamed")


def test_an_in_gpu_strategy_needs_no_link():
    assert bound_phase(step(), card(link=None), "bfloat16", "dynamic").h2d_s == 0


@pytest.mark.parametrize("name", hardware_names())
def test_every_shipped_profile_with_a_peak_bounds_a_step(name: str):
    hardware = load_hardware(name)
    dtype = "bfloat16" if hardware.peak_flops_per_s.bfloat16 else "float32"
    bound = bound_phase(step(h2d_bytes=KV, d2h_bytes=TOKEN), hardware, dtype, "streamed")
    assert 0 < bound.ideal.seconds < bound.serial.seconds < 10
