"""The emulated link's clock, on a clock of the test's own whose sleeps all end late."""

import pytest
import torch

from offload_eval.instruments import cpu_pace
from offload_eval.instruments.cpu_pace import PacedCopies

LATE_S = 0.25
"""How much longer than asked every sleep lasts."""


class LateClock:
    """Stands in for `time`: copying takes no time, and whoever sleeps wakes up late."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds + LATE_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> LateClock:
    late = LateClock()
    monkeypatch.setattr(cpu_pace, "time", late)
    return late


def copy_seconds(copies: PacedCopies, seconds: int, submitted_s: float) -> float:
    """A copy that a link of 8 bytes a second needs that long for."""
    source = torch.full((8 * seconds,), 7, dtype=torch.uint8)
    target = torch.zeros_like(source)
    busy_s = copies.copy(target, source, submitted_s)
    assert torch.equal(target, source)
    return busy_s


def test_late_wake_ups_do_not_add_up_on_a_link_that_stays_busy(clock: LateClock) -> None:
    """Ten copies of a second each, all submitted at 100: the last one ends at 110 and one late wake-up, not ten."""
    copies = PacedCopies(8)
    busy_s = [copy_seconds(copies, 1, 100.0) for _ in range(10)]
    assert clock.now_s == 110 + LATE_S
    assert busy_s == [1.0] * 10, "the link was free at each deadline, however long the thread slept"


def test_a_copy_after_an_idle_spell_starts_when_it_is_submitted(clock: LateClock) -> None:
    copies = PacedCopies(8)
    copy_seconds(copies, 1, 100.0)
    clock.now_s = 107.0
    assert copy_seconds(copies, 2, 107.0) == 2
    assert clock.now_s == 109 + LATE_S


def test_a_copy_submitted_while_the_last_wake_up_was_late_has_the_link_at_once(clock: LateClock) -> None:
    """The link was free at 101; the copy is submitted at 101.125, when the thread still slept."""
    copies = PacedCopies(8)
    copy_seconds(copies, 1, 100.0)
    assert clock.now_s == 101 + LATE_S
    assert copy_seconds(copies, 1, 101.125) == 1
    assert clock.now_s == 102.125 + LATE_S


def test_a_copy_picked_up_after_its_deadline_waits_for_nothing(clock: LateClock) -> None:
    copies = PacedCopies(8)
    clock.now_s = 103.0
    assert copy_seconds(copies, 1, 100.0) == 1, "that the thread was late is not the link's time"
    assert clock.now_s == 103


def test_without_a_bandwidth_nothing_sleeps(clock: LateClock) -> None:
    assert copy_seconds(PacedCopies(None), 5, 100.0) == 0
    assert clock.now_s == 100


def test_a_strided_source_is_gathered_at_the_same_pace(clock: LateClock) -> None:
    source = torch.arange(24, dtype=torch.uint8).view(4, 6)[:, 2:]
    target = torch.zeros(4, 4, dtype=torch.uint8)
    assert PacedCopies(8).copy(target, source, 100.0) == 2
    assert torch.equal(target, source)
