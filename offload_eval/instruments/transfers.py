"""The account of what crossed the link, by phase and direction."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from offload_eval.core.records import Direction, Phase, PhaseSample


class TransferLog:
    """Bytes, copies, busy time and exposed time, added at the copies themselves.

    Bytes and copies are always counted. Times are added only by a link that was opened with `timed=True`; without it
    they are reported as None, since a clock at every copy would disturb the pass.
    """

    def __init__(self, *, timed: bool) -> None:
        self.timed = timed
        self.phase: Phase = "prefill"
        self.sizes: Counter[tuple[Direction, int]] = Counter()
        """Copies by direction and bytes, of both phases."""
        self._bytes: Counter[tuple[Phase, Direction]] = Counter()
        self._copies: Counter[tuple[Phase, Direction]] = Counter()
        self._pageable: Counter[Phase] = Counter()
        self._busy_s: defaultdict[tuple[Phase, Direction], float] = defaultdict(float)
        self._exposed_s: defaultdict[Phase, float] = defaultdict(float)

    def add_copy(self, direction: Direction, num_bytes: int) -> None:
        """Counts one copy in the current phase; one of nothing is none."""
        if num_bytes:
            self.sizes[direction, num_bytes] += 1
            self._bytes[self.phase, direction] += num_bytes
            self._copies[self.phase, direction] += 1

    def add_pageable(self, are_pageable: Iterable[bool]) -> None:
        """Counts those of some copies, counted already, whose host side is pageable memory."""
        self._pageable[self.phase] += sum(are_pageable)

    def add_busy(self, phase: Phase, direction: Direction, seconds: float) -> None:
        """Adds the time one copy kept the link busy, to the phase that submitted it."""
        self._busy_s[phase, direction] += seconds

    def add_exposed(self, phase: Phase, seconds: float) -> None:
        """Adds the time computation stood still for one copy."""
        self._exposed_s[phase] += seconds

    def sample(self, phase: Phase) -> PhaseSample:
        """The transfer fields of a phase; the memory fields stay None."""
        return PhaseSample(
            h2d_bytes=self._bytes[phase, "h2d"],
            d2h_bytes=self._bytes[phase, "d2h"],
            num_h2d_copies=self._copies[phase, "h2d"],
            num_d2h_copies=self._copies[phase, "d2h"],
            num_pageable_copies=self._pageable[phase],
            h2d_busy_s=self._busy_s[phase, "h2d"] if self.timed else None,
            d2h_busy_s=self._busy_s[phase, "d2h"] if self.timed else None,
            exposed_transfer_s=self._exposed_s[phase] if self.timed else None,
        )
