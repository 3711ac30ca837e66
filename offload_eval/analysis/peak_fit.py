"""The peak of one phase as a plane over what a batch holds, with what speaks against it.

peak = weights + runtime + a * sessions * tokens + b * sessions + c * prefill_tokens, with no coefficient below zero:
nothing that a batch holds makes a peak smaller.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

from offload_eval.core.policy import PhaseFit
from offload_eval.core.records import Phase
from offload_eval.units import format_bytes

COEFFICIENTS: Final = ("bytes_per_session_token", "runtime_bytes", "bytes_per_session", "bytes_per_prefill_token")
"""In the order in which they are kept where the data cannot tell them apart. Without chunks a prefill's last column
equals the first: the first stands for both, and so charges a chunked prefill its whole prompt, never too little."""
LEAST_LENGTHS: Final = 3
"""A term per session takes in whatever two lengths do."""
BEND_RATIO: Final = 0.05
"""Of a peak beyond the weights: a residual past it is no rounding of an allocator, and the peak no plane."""
LEAVE_ONE_OUT_RATIO: Final = 0.10
"""The same for a batch that is predicted from the others; the outermost ones are extrapolated to."""
LEAK_LEAST_F: Final = 40.0
"""F statistic of run order as one more column of the fit: noise passes it once in 80 times at two degrees of freedom,
the fewest at which it is asked, and more rarely at more."""
LEAK_LEAST_RATIO: Final = 0.01
"""Of the highest peak beyond the weights: what leaks less over all runs is not told from noise."""
_DEPENDENT_RATIO: Final = 1e-7
"""Of a column's norm: what is left of a dependent one is rounding."""
_TIE_RATIO: Final = 1e-9
"""Of the norm of the peaks: residuals that differ less differ by rounding."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PeakPoint:
    """The measured peaks of one batch."""

    sessions: int
    prompt_tokens: int
    output_tokens: int
    prefill_tokens: int
    """Prompt tokens that all sessions together prefilled at once."""
    prefill_peak_bytes: int | None
    """Weights included; None where no pass looked."""
    decode_peak_bytes: int | None
    weights_bytes: int
    """Live before any session."""
    order: int
    """Runs of the strategy before this one, those without a result included: what leaks, leaks in them too."""
    run_id: str

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What repeats of one batch have in common."""
        return (self.sessions, self.prompt_tokens, self.output_tokens, self.prefill_tokens)

    @property
    def cached_tokens(self) -> int:
        """Tokens that a session holds when generation ends."""
        return self.tokens("decode")

    def peak_bytes(self, phase: Phase) -> int | None:
        """The peak of a phase."""
        return self.prefill_peak_bytes if phase == "prefill" else self.decode_peak_bytes

    def tokens(self, phase: Phase) -> int:
        """Tokens that a session holds when a phase ends."""
        return self.prompt_tokens if phase == "prefill" else self.prompt_tokens + self.output_tokens - 1


def fit_phase(points: Sequence[PeakPoint], phase: Phase) -> PhaseFit | None:
    """Fits the plane of one phase, and says what speaks against it.

    Returns:
        None where fewer than two different batches have a peak.
    """
    seen = [point for point in points if point.peak_bytes(phase) is not None]
    if len({point.shape for point in seen}) < 2:
        return None
    data = PhaseData.of(seen, phase)
    plane = fit_plane(data.columns, data.above_bytes)
    residuals = data.above_bytes - data.columns @ plane.coefficients
    errors = leave_one_out(data)
    # Of whole bytes: what is left below half of one is the arithmetic's own rounding.
    above = np.rint([0.0, *residuals, *(errors if errors is not None else ())])
    ratio = None if errors is None else float(np.max(np.abs(errors) / data.scale_bytes))
    return PhaseFit(
        phase=phase,
        weights_bytes=data.weights_bytes,
        bytes_per_session_token=float(plane.coefficients[0]),
        runtime_bytes=float(plane.coefficients[1]),
        bytes_per_session=float(plane.coefficients[2]),
        bytes_per_prefill_token=float(plane.coefficients[3]),
        not_told_apart=tuple(COEFFICIENTS[index] for index in plane.dependent),
        points=len(seen),
        worst_residual_bytes=float(np.max(np.abs(np.rint(residuals)))),
        worst_above_bytes=float(np.max(above)),
        leave_one_out_ratio=ratio,
        flags=tuple(_flags(data, residuals, ratio)),
    )


@dataclass(frozen=True)
class Plane:
    """Non-negative coefficients, and the columns that they cannot be told apart from."""

    coefficients: Array
    dependent: tuple[int, ...]
    squares: float
    """Sum of the squared residuals."""


def fit_plane(columns: Array, above_bytes: Array) -> Plane:
    """Non-negative least squares, exactly: of the unconstrained fits on every set of columns the best feasible one.

    The minimum over coefficients >= 0 is an unconstrained minimum over the columns whose coefficients are not zero
    there, so it is among those. A set of dependent columns is passed over. Of fits that are equal but for rounding
    that on the earlier columns is taken.

    Args:
        columns: `[points, columns]`, none below zero.
        above_bytes: `[points]`, peaks less the weights.
    """
    scale = np.maximum(np.max(np.abs(columns), axis=0), 1.0)
    scaled = columns / scale
    fits = [fit for support in _supports(columns.shape[1]) if (fit := _fit_on(scaled, above_bytes, support))]
    slack = _TIE_RATIO * float(np.linalg.norm(above_bytes))
    least = min(math.sqrt(squares) for _, _, squares in fits)
    support, coefficients, squares = next(fit for fit in fits if math.sqrt(fit[2]) <= least + slack)
    others = (index for index in range(columns.shape[1]) if index not in support)
    dependent = tuple(index for index in others if support and _is_dependent(scaled, support, index))
    return Plane(coefficients / scale, dependent, squares)


def leave_one_out(data: "PhaseData") -> Array | None:
    """Error of every peak when it is predicted from all others: measured less predicted, bytes.

    Repeats of one batch are left out together: one would give the other away.

    Returns:
        `[points]`; None where no more batches than coefficients were measured, so that nothing is left to check with.
    """
    shapes = data.shapes
    if len(set(shapes)) <= data.rank:
        return None
    errors = np.zeros(len(shapes))
    for shape in set(shapes):
        out = np.array([each == shape for each in shapes])
        plane = fit_plane(data.columns[~out], data.above_bytes[~out])
        errors[out] = data.above_bytes[out] - data.columns[out] @ plane.coefficients
    return errors


@dataclass(frozen=True)
class PhaseData:
    """The points of one phase as arrays."""

    columns: Array
    """`[points, coefficients]`."""
    above_bytes: Array
    """`[points]`, peaks less the weights."""
    order: Array
    """`[points]`."""
    shapes: list[tuple[int, int, int, int]]
    weights_bytes: int

    @classmethod
    def of(cls, points: Sequence[PeakPoint], phase: Phase) -> "PhaseData":
        """Takes the points that all have a peak of the phase."""
        # The fewest: what a worker has beyond its first baseline leaked, or is runtime.
        weights_bytes = min(point.weights_bytes for point in points)
        peaks = [peak for point in points if (peak := point.peak_bytes(phase)) is not None]
        rows = [(each.sessions * each.tokens(phase), 1, each.sessions, each.prefill_tokens) for each in points]
        return cls(
            columns=np.array(rows, dtype=np.float64),
            above_bytes=np.array(peaks, dtype=np.float64) - weights_bytes,
            order=np.array([point.order for point in points], dtype=np.float64),
            shapes=[point.shape for point in points],
            weights_bytes=weights_bytes,
        )

    @property
    def scale_bytes(self) -> Array:
        """What errors are held against: a peak beyond the weights, or a byte where nothing lies beyond them."""
        return np.maximum(self.above_bytes, 1.0)

    @property
    def rank(self) -> int:
        """Coefficients that the data can tell apart."""
        return int(np.linalg.matrix_rank(self.columns / np.max(self.columns, axis=0), tol=_DEPENDENT_RATIO))


def _flags(data: PhaseData, residuals: Array, leave_one_out_ratio: float | None) -> Iterator[str]:
    if leave_one_out_ratio is None:
        batches = len(set(data.shapes))
        yield (
            f"too few points: {batches} different batches for {data.rank} coefficients; at least {data.rank + 1} let "
            "one be left out and predicted"
        )
    lengths = sorted({prompt_tokens for _, prompt_tokens, _, _ in data.shapes})
    if len(lengths) < LEAST_LENGTHS:
        yield (
            f"few lengths: prompts of {', '.join(f'{each:,}' for each in lengths)} tokens alone, and a bend between "
            f"them cannot be seen; measure at least {LEAST_LENGTHS}"
        )
    leak = _leak(data, residuals)
    if leak is not None:
        yield leak
        return
    worst_ratio = float(np.max(np.abs(residuals) / data.scale_bytes))
    if worst_ratio > BEND_RATIO:
        yield (
            f"bend: a peak lies {worst_ratio:.1%} of what it has beyond the weights off the plane; allowed: "
            f"{BEND_RATIO:.0%}. It does not grow in proportion, as with a sliding window"
        )
    elif leave_one_out_ratio is not None and leave_one_out_ratio > LEAVE_ONE_OUT_RATIO:
        yield (
            f"bend: a peak that is predicted from the others is {leave_one_out_ratio:.1%} off; allowed: "
            f"{LEAVE_ONE_OUT_RATIO:.0%}. Measure more lengths and batches around it"
        )


def _leak(data: PhaseData, residuals: Array) -> str | None:
    """Residuals that grow with run order, and vanish where it is one more column of the fit."""
    spare = len(residuals) - data.rank - 1
    if spare < 2 or np.ptp(data.order) == 0:
        return None
    with_order = fit_plane(np.column_stack([data.columns, data.order]), data.above_bytes)
    per_run_bytes = float(with_order.coefficients[-1])
    leaked_bytes = per_run_bytes * float(np.ptp(data.order))
    explained = float(residuals @ residuals) - with_order.squares
    is_large = leaked_bytes >= LEAK_LEAST_RATIO * float(np.max(data.scale_bytes))
    if not is_large or explained * spare < LEAK_LEAST_F * with_order.squares:
        return None
    return (
        f"leak: peaks grow by {format_bytes(per_run_bytes)} with every run, whatever the batch: "
        f"{format_bytes(leaked_bytes)} over the {round(float(np.ptp(data.order)))} runs; the fit counts some of it as "
        "memory of sessions"
    )


_Fit = tuple[tuple[int, ...], Array, float]
"""Columns, coefficients of all columns, and the sum of squared residuals."""


def _fit_on(columns: Array, above_bytes: Array, support: tuple[int, ...]) -> _Fit | None:
    """The unconstrained fit on some columns; None where they are dependent, or a coefficient is below zero."""
    chosen = columns[:, support]
    if np.linalg.matrix_rank(chosen, tol=_DEPENDENT_RATIO * math.sqrt(len(columns))) < len(support):
        return None
    found = np.linalg.lstsq(chosen, above_bytes, rcond=None)[0]
    if (found < 0).any():
        return None
    residuals = above_bytes - chosen @ found
    coefficients = np.zeros(columns.shape[1])
    coefficients[list(support)] = found
    return support, coefficients, float(residuals @ residuals)


def _supports(num_columns: int) -> list[tuple[int, ...]]:
    """All sets of columns: those with the first one before the others, and small ones before large ones."""
    sets = [each for size in range(num_columns + 1) for each in combinations(range(num_columns), size)]
    return sorted(sets, key=lambda support: (0 not in support, len(support)))


def _is_dependent(columns: Array, support: tuple[int, ...], index: int) -> bool:
    """Whether a column is a sum of multiples of the others."""
    chosen, column = columns[:, support], columns[:, index]
    rest = column - chosen @ np.linalg.lstsq(chosen, column, rcond=None)[0]
    return bool(np.linalg.norm(rest) <= _DEPENDENT_RATIO * np.linalg.norm(column))
