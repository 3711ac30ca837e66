"""Planted coefficients come back from records, and what is no plane is said to be none."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from factories import DYNAMIC, STREAMED, WEIGHTS_BYTES, make_conditions, make_phase, make_record, make_spec, make_trial
from msgspec.structs import replace

from offload_eval.analysis.calibration import calibrate, peak_points, predict
from offload_eval.analysis.peak_fit import COEFFICIENTS, PhaseData, fit_phase, fit_plane, leave_one_out
from offload_eval.core.admission import Batch
from offload_eval.core.experiment import Workload
from offload_eval.core.policy import Calibration
from offload_eval.core.records import RunRecord
from offload_eval.units import MIB

RUNTIME, PER_TOKEN, PER_SESSION, PER_PREFILL = 50_000, 64, 3_000, 100
"""What is planted; bytes. Factories' weights: 1,000,000."""
BATCHES = [
    (1, 64, 16),
    (8, 64, 16),
    (15, 64, 48),
    (1, 256, 16),
    (4, 256, 48),
    (7, 256, 16),
    (2, 512, 32),
    (4, 512, 48),
]
"""Sessions, prompt and output tokens; every pair of columns tells something apart, but for an unchunked prefill."""


def batch_of(sessions: int, prompt_tokens: int, output_tokens: int, prefill_chunk_tokens: int | None = None) -> Batch:
    return Batch(
        rows=sessions,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefill_chunk_tokens=prefill_chunk_tokens,
    )


Extra = Callable[[int, int, int], float]
"""Bytes on top of the plane, by sessions, tokens at the end of the phase, and order."""


def nothing(sessions: int, tokens: int, order: int) -> float:
    return 0


def record(sessions: int, prompt: int, output: int, order: int, *, chunk: int | None = None, **more: Any) -> RunRecord:
    """A probe with the planted peaks; `extra` gives what lies on top of them."""
    extra = more.pop("extra", nothing)
    strategy = more.pop("strategy", DYNAMIC)
    at_once = sessions * min(chunk or prompt, prompt)

    def peak(tokens: int) -> int:
        plane = WEIGHTS_BYTES + RUNTIME + PER_TOKEN * sessions * tokens + PER_SESSION * sessions
        return round(plane + PER_PREFILL * at_once + extra(sessions, tokens, order))

    workload = Workload(batch_size=sessions, prompt_tokens=prompt, output_tokens=output, prefill_chunk_tokens=chunk)
    spec = make_spec(strategy, workload=workload, role=more.pop("role", "fit"), **more.pop("spec", {}))
    trial = make_trial(prefill=make_phase(peak(prompt)), decode=make_phase(peak(prompt + output - 1)))
    started = f"2026-01-02T03:04:{order:02d}Z"
    return make_record(spec=spec, **{"trials": (trial,), "started_at_utc": started} | more)


def records(batches: Iterable[tuple[int, int, int]] = BATCHES, **more: Any) -> list[RunRecord]:
    return [record(*batch, order, **more) for order, batch in enumerate(batches)]


def calibration(found: list[RunRecord]) -> Calibration:
    made = calibrate(peak_points(found, "dynamic"))
    assert made is not None
    return made


class TestFit:
    def test_planted_coefficients_come_back_from_chunked_and_whole_prefills(self) -> None:
        chunked = [record(*batch, order, chunk=32) for order, batch in enumerate(BATCHES[:4], start=len(BATCHES))]
        for fit in calibration(records() + chunked).fits:
            assert fit.weights_bytes == WEIGHTS_BYTES
            assert fit.runtime_bytes == pytest.approx(RUNTIME)
            assert fit.bytes_per_session_token == pytest.approx(PER_TOKEN)
            assert fit.bytes_per_session == pytest.approx(PER_SESSION)
            assert fit.bytes_per_prefill_token == pytest.approx(PER_PREFILL)
            assert (fit.not_told_apart, fit.flags, fit.worst_residual_bytes) == ((), (), 0)

    def test_noise_is_within_the_reserve_and_is_no_flag(self) -> None:
        noise = random.Random(7)
        made = calibration(records(extra=lambda *_: noise.uniform(-1_500, 1_500)))
        (prefill, decode) = made.fits
        assert prefill.bytes_per_session_token == pytest.approx(PER_TOKEN + PER_PREFILL, rel=0.02)
        assert prefill.flags == decode.flags == ()
        assert 0 < prefill.worst_residual_bytes <= 3_000
        assert made.reserve_bytes == MIB

    def test_an_unchunked_prefill_names_the_column_that_the_data_cannot_tell_apart(self) -> None:
        prefill, decode = calibration(records()).fits
        assert prefill.not_told_apart == ("bytes_per_prefill_token",)
        assert prefill.bytes_per_session_token == pytest.approx(PER_TOKEN + PER_PREFILL)
        assert decode.not_told_apart == ()
        assert decode.bytes_per_prefill_token == pytest.approx(PER_PREFILL)

    def test_one_output_length_is_fitted_without_a_loss(self) -> None:
        """There, sessions * tokens = prefill_tokens + 15 * sessions: one of three columns is enough with another."""
        decode = calibration(records([(s, p, 16) for s, p, _ in BATCHES])).fits[1]
        assert len(decode.not_told_apart) == 1
        assert decode.worst_residual_bytes == 0

    def test_no_coefficient_is_below_zero(self) -> None:
        """A peak that shrinks with sessions would need one."""
        plane = fit_plane(np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]]), np.array([30.0, 20.0, 10.0]))
        assert plane.coefficients.tolist() == [0.0, 20.0]

    def test_it_is_the_best_of_all_non_negative_fits(self) -> None:
        """Against projected gradient descent, which knows nothing of supports."""
        noise = np.random.default_rng(3)
        for _ in range(5):
            columns = noise.uniform(0, 1, (12, 4))
            peaks = columns @ np.array([3.0, 0.0, 1.0, 0.5]) + noise.normal(0, 0.4, 12)
            found = np.ones(4)
            for _ in range(20_000):
                found = np.maximum(0, found - 0.02 * columns.T @ (columns @ found - peaks))
            assert fit_plane(columns, peaks).coefficients == pytest.approx(found, abs=1e-5)

    def test_large_columns_lose_nothing(self) -> None:
        """Tokens of a real deployment beside a constant: 2**40 against 1."""
        columns = np.array([[2.0**40, 1, 4], [2.0**41, 1, 16], [2.0**38, 1, 1], [2.0**39, 1, 64]])
        found = fit_plane(columns, columns @ np.array([2.0, 2.0**33, 2.0**20])).coefficients
        assert found == pytest.approx([2.0, 2.0**33, 2.0**20], rel=1e-6)

    def test_one_batch_is_no_calibration(self) -> None:
        assert calibrate(peak_points(records([(2, 64, 16)] * 3), "dynamic")) is None

    def test_an_unseen_phase_is_no_calibration(self) -> None:
        blind = [replace(each, trials=(replace(each.trials[0], decode=make_phase(None)),)) for each in records()]
        assert calibrate(peak_points(blind, "dynamic")) is None


class TestLeaveOneOut:
    def test_it_equals_a_loop_by_hand(self) -> None:
        noise = random.Random(11)
        points = peak_points(records(extra=lambda *_: noise.uniform(-9_000, 9_000)), "dynamic")
        fit = fit_phase(points, "decode")
        assert fit is not None
        ratios, above = [], [0.0]
        for out in points:
            rest = fit_phase([point for point in points if point is not out], "decode")
            assert rest is not None
            tokens = out.prompt_tokens + out.output_tokens - 1
            predicted = (
                rest.runtime_bytes
                + rest.bytes_per_session_token * out.sessions * tokens
                + rest.bytes_per_session * out.sessions
                + rest.bytes_per_prefill_token * out.sessions * out.prompt_tokens
            )
            measured = (out.decode_peak_bytes or 0) - WEIGHTS_BYTES
            ratios.append(abs(measured - predicted) / measured)
            above.append(measured - predicted)
        assert fit.leave_one_out_ratio == pytest.approx(max(ratios))
        assert fit.worst_above_bytes >= max(above) - 0.5

    def test_repeats_do_not_give_a_batch_away(self) -> None:
        """A batch that lies 40,000 bytes off is predicted from the others, however often it was repeated."""
        last = len(BATCHES) - 1
        found = records([*BATCHES, BATCHES[last], BATCHES[last]], extra=lambda s, t, _: 40_000 * (s == 4 and t > 300))
        once = PhaseData.of(peak_points(found[: last + 1], "dynamic"), "prefill")
        often = PhaseData.of(peak_points(found, "dynamic"), "prefill")
        errors, repeated = leave_one_out(once), leave_one_out(often)
        assert errors is not None
        assert repeated is not None
        assert errors[last] > 35_000
        assert repeated[last:].tolist() == pytest.approx([errors[last]] * 3)

    def test_too_few_batches_are_said_to_be(self) -> None:
        """A plane through as many points as it has coefficients predicts none of them from the others."""
        points = peak_points(records(BATCHES[:2]), "dynamic")
        fit = fit_phase(points, "prefill")
        assert fit is not None
        assert any("too few points: 2 different batches" in flag for flag in fit.flags)
        assert calibrate(points) is None

    def test_enough_are_not(self) -> None:
        assert calibration(records(BATCHES)).fits[0].leave_one_out_ratio is not None


class TestFlags:
    def test_a_planted_leak_is_named_with_its_bytes(self) -> None:
        noise = random.Random(5)
        made = calibration(records(extra=lambda _s, _t, order: 20_000 * order + noise.uniform(-1_500, 1_500)))
        for fit in made.fits:
            (flag,) = fit.flags
            assert flag.startswith(("leak: peaks grow by 19.", "leak: peaks grow by 18."))
            assert "over the 7 runs" in flag

    def test_runs_without_a_result_leak_as_well(self) -> None:
        """Two failures between the batches: 20,000 bytes a run are found, not 60,000 a batch."""
        found = [
            record(*batch, 3 * index, extra=lambda _s, _t, order: 20_000 * order)
            for index, batch in enumerate(BATCHES)
        ]
        failed = [
            record(99, 64, 16, 3 * index + more, status="oom", trials=()) for index in range(8) for more in (1, 2)
        ]
        assert "by 19.53 KiB with every run" in calibration(found + failed).fits[0].flags[0]

    def test_noise_is_no_leak(self) -> None:
        flagged = 0
        for seed in range(40):
            noise = random.Random(seed)
            made = calibration(records(extra=lambda *_: noise.uniform(-9_000, 9_000)))  # noqa: B023
            flagged += sum("leak" in flag for fit in made.fits for flag in fit.flags)
        assert flagged <= 2

    def test_a_sliding_window_is_a_bend_and_no_leak(self) -> None:
        """KV is kept for 96 tokens at most: 640 bytes a token below, none above."""
        made = calibration(records(extra=lambda s, t, _: 640 * s * min(t, 96) - (PER_TOKEN + PER_PREFILL) * s * t))
        flags = made.fits[0].flags
        assert any(flag.startswith("bend: ") and "sliding window" in flag for flag in flags)
        assert not any("leak" in flag for flag in flags)

    def test_the_reserve_covers_every_peak_above_the_fit(self) -> None:
        made = calibration(records(extra=lambda s, t, _: 6_400 * s * min(t, 96)))
        assert made.reserve_bytes % MIB == 0
        for each in records(extra=lambda s, t, _: 6_400 * s * min(t, 96)):
            workload = each.spec.workload
            lengths = (workload.batch_size, workload.prompt_tokens, workload.output_tokens)
            peaks = {peak.phase: peak.bytes for peak in predict(made, batch_of(*lengths)).peaks}
            assert each.trials[0].prefill.peak_allocated_bytes <= peaks["prefill"] + made.reserve_bytes
            assert each.trials[0].decode.peak_allocated_bytes <= peaks["decode"] + made.reserve_bytes


class TestPoints:
    def test_only_runs_that_ended_well_and_are_no_drill_count(self) -> None:
        others = [
            record(9, 64, 16, 20, status="oom", trials=()),
            record(9, 64, 16, 21, role="oom_decode"),
            record(9, 64, 16, 22, evidence="traced"),
            record(9, 64, 16, 23, strategy=STREAMED),
        ]
        assert [point.sessions for point in peak_points(others + records(), "dynamic")] == [s for s, _, _ in BATCHES]

    def test_another_attention_has_other_peaks(self) -> None:
        eager = record(9, 64, 16, 0)
        workload = replace(eager.spec.workload, attn_implementation="eager")
        assert peak_points([replace(eager, spec=replace(eager.spec, workload=workload))], "dynamic") == []

    def test_what_an_allocator_keeps_beyond_its_tensors_is_no_peak(self) -> None:
        """Under a cap it keeps what it is given, whatever the batch: the reserve has it, by the batch that failed."""
        trial = make_trial(prefill=make_phase(1_100_000, peak_reserved_bytes=1_300_000), decode=make_phase(1_200_000))
        (point,) = peak_points([record(1, 64, 16, 0, trials=(trial,), spec={"device": "cuda"})], "dynamic")
        assert (point.prefill_peak_bytes, point.decode_peak_bytes) == (1_100_000, 1_200_000)

    def test_weights_are_what_was_live_before(self) -> None:
        conditions = make_conditions(baseline_bytes=1_004_000)
        (point,) = peak_points([record(3, 64, 16, 0, chunk=16, conditions=conditions)], "dynamic")
        assert (point.weights_bytes, point.prefill_tokens) == (1_004_000, 48)


class TestPredict:
    def test_terms_by_hand(self) -> None:
        prediction = predict(calibration(records()), batch_of(3, 128, 17))
        prefill, decode = prediction.peaks
        # 3 * 128 tokens * 164 bytes + 3 * 3,000; 3 * 144 * 64 + 3 * 3,000 + 384 * 100.
        assert prefill.bytes == pytest.approx(1_050_000 + 62_976 + 9_000, abs=4)
        assert decode.bytes == pytest.approx(1_050_000 + 27_648 + 9_000 + 38_400, abs=4)
        assert [peak.bytes for peak in prediction.peaks] == [sum(t.bytes for t in p.terms) for p in prediction.peaks]
        assert prediction.worst is decode
        assert prediction.extrapolates == ()

    @pytest.mark.parametrize(
        ("batch", "words"),
        [
            ((16, 64, 16), "16 sessions, and no more than 15"),
            ((1, 513, 16), "513 prompt tokens, and no more than 512"),
            ((1, 63, 16), "63 prompt tokens, and no fewer than 64"),
            ((1, 64, 49), "49 output tokens, and no more than 48"),
            ((1, 64, 15), "15 output tokens, and no fewer than 16"),
            ((15, 512, 48), "8,385 tokens of all sessions, and no more than 2,236"),
            ((1, 64, 16, 8), "8 prompt tokens at once, and no fewer than 64"),
        ],
    )
    def test_extrapolation_is_refused_unless_it_is_asked_for_and_then_marked(
        self, batch: tuple[int, ...], words: str
    ) -> None:
        made = calibration(records())
        assert any(words in each for each in predict(made, batch_of(*batch)).extrapolates)

    def test_every_measured_batch_is_within(self) -> None:
        made = calibration(records())
        for batch in BATCHES:
            assert predict(made, batch_of(*batch)).extrapolates == ()

    def test_a_session_longer_than_any_is_outside_though_both_of_its_lengths_are_within(self) -> None:
        made = calibration(
            records([(1, 512, 16), (1, 64, 200), (2, 64, 16), (3, 64, 100), (2, 256, 16), (4, 128, 32)])
        )
        words = "; ".join(predict(made, batch_of(1, 512, 200)).extrapolates)
        assert "711 cached tokens a session, and no more than 527" in words


def test_the_names_of_coefficients_are_fields_of_a_fit() -> None:
    assert set(COEFFICIENTS) <= set(calibration(records()).fits[0].__struct_fields__)
