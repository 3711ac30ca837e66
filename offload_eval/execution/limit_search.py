"""Tries batches for one limit, from the traced one on, until it is known."""

import time
from typing import Final

from offload_eval.analysis.capacity import worst_peak_bytes
from offload_eval.analysis.probes import exhausted, largest_passing, traced_peak_bytes, was_killed
from offload_eval.bounds.host_ledger import is_held_to_host
from offload_eval.bounds.limit_search import largest_that_fits, next_batch
from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.experiment import BudgetSpec
from offload_eval.core.judgement import Bound
from offload_eval.core.run_spec import Role
from offload_eval.core.trace import Trace
from offload_eval.execution.probes import Probes, Searched

_TRIES_AFTER_A_FAILED_REPEAT: Final = 2
"""A limit that does not hold is not to end a search that has used up its tries."""


class LimitSearch:
    """The search for the largest batch of one strategy at one combination of lengths."""

    def __init__(
        self, probes: Probes, searched: Searched, capacity: CapacitySpec, budget: BudgetSpec, weights_bytes: int
    ) -> None:
        self._weights_bytes = weights_bytes
        self._probes = probes
        self._searched = searched
        self._capacity = capacity
        self._cap_bytes = budget.cap_bytes(weights_bytes)
        self._host_bytes = budget.host_bytes
        self._most_tries = capacity.max_probes
        self._seen: dict[int, int | None] = {}

    def run(self, bound: Bound | None, *, with_trace: bool) -> int | None:
        """Tries batches until the limit is known, or the tries or the time are used up.

        Args:
            bound: Sessions by arithmetic, where the traces begin; None: they begin at one.
            with_trace: Whether to begin the tries at the traced limit.

        Returns:
            The largest batch that ran to its end each time it was tried; None where the strategy cannot run.
        """
        is_held = is_held_to_host(self._searched.strategy)
        host_sessions = bound.host_sessions if bound is not None and is_held else None
        start = self._analytic_start(bound)
        slope_bytes = None
        if with_trace and self._searched.refusal is None:
            start, slope_bytes = self._traced(start)
        start = start if host_sessions is None else max(1, min(start, host_sessions))
        deadline = time.monotonic() + self._capacity.search_timeout_s
        while True:
            batch = self._next(start, slope_bytes, host_sessions, deadline)
            limit = largest_passing(self._seen)
            if batch is not None:
                if not self._try(batch, "fit"):
                    return None
            elif limit == 0 or self._capacity.repeats == 1:
                break
            elif not self._try(limit, "verify"):
                return None
            elif self._seen[limit] is not None:
                break
            else:
                self._most_tries += _TRIES_AFTER_A_FAILED_REPEAT
        if with_trace:
            self._trace_around(limit)
        return limit

    def trace(self, bound: Bound | None) -> None:
        """Finds the largest batch whose traced peaks fit the cap and the host's budget, and runs nothing.

        It is traced, and so is the next one; on the way there are the traces that `run` begins with.

        Args:
            bound: Sessions by arithmetic, where the traces begin; None: they begin at one.
        """
        try:
            limit, _ = self._device_limit(self._analytic_start(bound))
            if limit and self._host_bytes is not None:
                most = limit
                limit = largest_that_fits(self._traced_host_bytes, self._host_bytes, start=most, most=most)
            if bound is not None and bound.host_sessions is not None:  # it knows how a pinned allocator rounds
                self._trace_around(min(limit, bound.host_sessions))
        except _NotTracedError:
            return  # the trace that was lost says why
        self._trace_around(limit)

    def _analytic_start(self, bound: Bound | None) -> int:
        analytic = 1 if bound is None or not bound.sessions else bound.sessions
        return min(analytic, self._capacity.most_sessions)

    def _trace_around(self, limit: int) -> None:
        for sessions in (limit, limit + 1):
            self._probes.trace(self._searched, min(max(1, sessions), self._capacity.most_sessions))

    def _next(self, start: int, slope_bytes: float | None, host_sessions: int | None, deadline: float) -> int | None:
        # The first batch is tried whatever the time: a search without any says nothing.
        if len(self._seen) >= self._most_tries or (self._seen and time.monotonic() > deadline):
            return None
        return next_batch(
            self._seen,
            self._cap_bytes,
            start=start,
            most=self._capacity.most_sessions,
            slope_bytes=slope_bytes,
            base_bytes=self._weights_bytes,
            host_sessions=host_sessions,
        )

    def _try(self, sessions: int, role: Role) -> bool:
        """Runs a batch and notes how it ended; whether that says anything about its size."""
        record = self._probes.run(self._searched, sessions, role)
        if was_killed(record):  # by the kernel, or by anybody: a batch that is too large is killed again
            record = self._probes.run(self._searched, sessions, role)
        self._seen |= {batch: None for batch in (sessions,) if record.status != "ok"}
        if record.status == "ok":
            self._seen.setdefault(sessions, worst_peak_bytes(record))
        return record.status == "ok" or exhausted(record) is not None

    def _traced(self, start: int) -> tuple[int, float | None]:
        """Where the tries begin: the largest batch whose traced peak fits, and what one session more takes there."""
        try:
            limit, slope_bytes = self._device_limit(start)
        except _NotTracedError:
            return start, None
        return max(1, limit), slope_bytes

    def _device_limit(self, start: int) -> tuple[int, float | None]:
        """The largest batch whose traced peak fits the cap, and what one session more takes there."""
        peaks: dict[int, int] = {}

        def traced_peak(sessions: int) -> int:
            peaks[sessions] = traced_peak_bytes(self._trace_of(sessions))
            return peaks[sessions]

        start = self._in_proportion(start, traced_peak(start))
        limit = largest_that_fits(traced_peak, self._cap_bytes, start, most=self._capacity.most_sessions)
        two = sorted(peaks, key=lambda sessions: abs(sessions - limit))[:2]
        slope_bytes = None if len(two) < 2 else (peaks[two[0]] - peaks[two[1]]) / (two[0] - two[1])
        return limit, slope_bytes

    def _traced_host_bytes(self, sessions: int) -> int:
        return self._trace_of(sessions).kv_host_peak_bytes

    def _trace_of(self, sessions: int) -> Trace:
        trace = self._probes.trace(self._searched, sessions)
        if trace is None:
            raise _NotTracedError
        return trace

    def _in_proportion(self, sessions: int, peak_bytes: int) -> int:
        """Where a batch whose peak does not fit would, if all that it adds to the weights grew with it."""
        room_bytes = self._cap_bytes - self._weights_bytes
        if peak_bytes <= self._cap_bytes or room_bytes <= 0:
            return sessions
        return max(1, sessions * room_bytes // (peak_bytes - self._weights_bytes))


class _NotTracedError(Exception):
    """A batch on the way to the limit cannot be traced."""
