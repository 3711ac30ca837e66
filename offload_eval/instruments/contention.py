"""Whether somebody else wants the cores that a measurement is about to use."""

import hashlib
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from offload_eval.instruments.environment import usable_cores

SPIN_CPU_S: Final = 0.06
"""CPU time each thread spends: many of the scheduler's time slices of a few milliseconds."""
SPIN_WALL_S: Final = 0.2
"""A thread that has not had its CPU time by then stops: the ratio is clear already."""
_ROUNDS: Final = 8_000
"""Rounds of one call, about 2 ms: long against taking the interpreter lock, short against `SPIN_CPU_S`."""


class _Spin(NamedTuple):
    wall_s: float
    cpu_s: float


def measure_contention() -> float | None:
    """Keeps every usable core busy for a moment and compares the time that took with the CPU time received.

    The threads hash with the interpreter lock released, so they run in parallel without an OpenMP pool. They
    are not pinned: they use whatever core is idle, as compute threads do.

    Returns:
        Wall over CPU time, summed over the threads: 1.0 when nobody else wants the cores, about 2 when as
        many busy threads compete as there are cores, less when only some of the cores are wanted. None where
        threads have no CPU clock.
    """
    if not hasattr(time, "thread_time"):
        return None
    spins: list[_Spin] = []
    start = threading.Barrier(cores := usable_cores())
    threads = [threading.Thread(target=_spin, args=(start.wait, spins)) for _ in range(cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(spin.wall_s for spin in spins) / sum(spin.cpu_s for spin in spins)


def _spin(wait_for_all: Callable[[], object], spins: list[_Spin]) -> None:
    wait_for_all()
    wall_started_s, cpu_started_s = time.perf_counter(), time.thread_time()
    wall_s = cpu_s = 0.0
    while cpu_s < SPIN_CPU_S and wall_s < SPIN_WALL_S:
        hashlib.pbkdf2_hmac("sha256", b"", b"", _ROUNDS)
        wall_s, cpu_s = time.perf_counter() - wall_started_s, time.thread_time() - cpu_started_s
    spins.append(_Spin(wall_s, cpu_s))
