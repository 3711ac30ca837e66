"""The emulated link's clock: when a copy may start, how long it takes, and when the next one may."""

import ctypes
import time

import torch


class PacedCopies:
    """Copies of one thread, one after the other, at most at a stated bandwidth.

    A copy's deadline follows from the previous deadline, not from the moment the thread woke up: one that is late by
    a timer's slack or a busy machine delays its own end, and a link that stays busy catches up. Without a bandwidth a
    copy takes what it takes.

    Args:
        bytes_per_s: The bandwidth, of both directions together; None: as fast as memory copies.
    """

    def __init__(self, bytes_per_s: int | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._deadline_s = float("-inf")
        self._ended_s = float("-inf")

    def copy(self, target: torch.Tensor, source: torch.Tensor, submitted_s: float) -> float:
        """Copies, and returns when the link would have.

        Args:
            target: Contiguous, of the source's shape and dtype.
            source: Gathered on the way where it is not contiguous.
            submitted_s: When the copy was handed to the link, on the clock of `time.perf_counter`.

        Returns:
            Seconds that the copy kept the link busy, from when the link was free for it: to its deadline, or for as
            long as its bytes took to move, if that is longer. How late this thread woke up is not in it.
        """
        free_s = max(submitted_s, self._ended_s)
        started_s = time.perf_counter()
        if source.is_contiguous():
            # Not Tensor.copy_: that may start a second team of compute threads here. memmove releases the GIL.
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
        else:
            target.copy_(source)
        self._ended_s = free_s + time.perf_counter() - started_s
        if self._bytes_per_s is not None:
            self._deadline_s = max(submitted_s, self._deadline_s) + target.nbytes / self._bytes_per_s
            self._ended_s = max(self._ended_s, self._deadline_s)
            _sleep_until(self._deadline_s)
        return self._ended_s - free_s


def _sleep_until(deadline_s: float) -> None:
    remaining_s = deadline_s - time.perf_counter()
    if remaining_s > 0:
        time.sleep(remaining_s)
