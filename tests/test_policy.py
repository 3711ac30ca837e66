"""A policy is made of limits and records, kept as YAML, and says when it no longer holds."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import DYNAMIC, make_experiment, make_facts, make_machine, make_record, make_spec, make_trial
from msgspec.structs import replace
from test_calibration import records
from typer.testing import CliRunner

from offload_eval.analysis.admission import ApplyOptions, apply_policy
from offload_eval.analysis.fingerprint import check_fingerprint, differences, make_fingerprint
from offload_eval.analysis.policy import build_policy
from offload_eval.cli.app import app
from offload_eval.core.admission import StrategyAnswer
from offload_eval.core.experiment import BudgetSpec, ModelSpec, OffloadedSpec, QuantizedSpec, StreamedSpec
from offload_eval.core.limits import CapacityLimit, Lengths
from offload_eval.core.machine import Accelerator, Machine
from offload_eval.core.plan import SessionGroup
from offload_eval.core.policy import AdmissionPolicy, Calibration, Fingerprint, PhaseFit, PolicyLimit, PolicyStrategy
from offload_eval.errors import InputError, UnableError
from offload_eval.execution.preflight import read_surroundings
from offload_eval.store.policy_file import dump_policy, load_policy, write_policy
from offload_eval.store.population_file import load_population

QUANTO, HQQ = QuantizedSpec(backend="quanto"), QuantizedSpec(backend="hqq")
GPU = Accelerator(name="H100", uuid="GPU-1", memory_bytes=80 * 1024**3, driver="550.54")
VERSIONS = {"torch": "2.13.0", "transformers": "5.24.0", "optimum-quanto": "0.2.7", "hqq": "0.2.8", "numpy": "2.0"}
SHORT, LONG = Lengths(prompt_tokens=64, output_tokens=16), Lengths(prompt_tokens=512, output_tokens=48)


def fit(phase: str, **changes: Any) -> PhaseFit:
    """1,000 of weights and runtime, 2 bytes a session token, 10 a session, 1 a prefill token."""
    base = {
        "weights_bytes": 900,
        "runtime_bytes": 100.0,
        "bytes_per_session_token": 2.0,
        "bytes_per_session": 10.0,
        "bytes_per_prefill_token": 1.0 if phase == "prefill" else 0.0,
        "points": 8,
        "worst_residual_bytes": 3.0,
        "worst_above_bytes": 2.0,
        "leave_one_out_ratio": 0.01,
    }
    return PhaseFit(phase=phase, **base | changes)


def calibration(**changes: Any) -> Calibration:
    base = {
        "fits": (fit("prefill"), fit("decode")),
        "least_prompt_tokens": 10,
        "most_prompt_tokens": 100,
        "least_output_tokens": 2,
        "most_output_tokens": 11,
        "least_prefill_tokens": 10,
        "most_cached_tokens": 110,
        "most_sessions": 50,
        "most_session_tokens": 1_500,
        "reserve_bytes": 500,
        "run_ids": ("c1", "c2"),
    }
    return Calibration(**base | changes)


def limit(prompt: int, output: int, sessions: int, **changes: Any) -> PolicyLimit:
    lengths = Lengths(prompt_tokens=prompt, output_tokens=output, **changes.pop("lengths", {}))
    base = {"lengths": lengths, "sessions": sessions, "evidence": "emulated", "run_ids": (f"r{prompt}",)}
    return PolicyLimit(**base | changes)


def fingerprint(machine: Machine | None = None, **changes: Any) -> Fingerprint:
    machine = machine or make_machine(versions=VERSIONS)
    return make_fingerprint(machine, make_facts(), ModelSpec(source="tests/tiny"), changes.pop("device", "cpu"))


def policy(*strategies: PolicyStrategy, **changes: Any) -> AdmissionPolicy:
    base = {
        "name": "does-it-pay",
        "created_at_utc": "2026-01-02T03:04:05Z",
        "fingerprint": fingerprint(),
        "budget": BudgetSpec(device_bytes=6_000),
        "cap_bytes": 6_000,
        "context_tokens": 200,
        "baseline": "dynamic",
        "strategies": strategies or (calibrated(),),
    }
    return AdmissionPolicy(**base | changes)


def calibrated(**changes: Any) -> PolicyStrategy:
    """At 6,000 bytes: short sessions by their measured limit of 20, long ones by that of 10."""
    base = {"strategy": DYNAMIC, "limits": (limit(20, 6, 20), limit(100, 11, 10)), "calibration": calibration()}
    return PolicyStrategy(**base | changes)


def group(name: str, sessions: int, prompt: int, output: int, **changes: Any) -> SessionGroup:
    return SessionGroup(name=name, sessions=sessions, prompt_tokens=prompt, max_new_tokens=output, **changes)


def answer(stored: AdmissionPolicy, *groups: SessionGroup, **options: Any) -> StrategyAnswer:
    (found,) = apply_policy(stored, groups, [stored.strategies[0].label], ApplyOptions(**options)).strategies
    return found


def outcome(found: StrategyAnswer) -> list[tuple[int, int, int]]:
    """Admitted, queued and refused of every group."""
    return [(each.admitted, each.queued, each.refused) for each in found.groups]


class TestApply:
    def test_the_measured_limit_binds(self) -> None:
        """20 rows of 20 + 6: prefill 1,000 + 20 * 20 * 3 + 200 = 2,400; decode 1,000 + 20 * 25 * 2 + 200 = 2,200."""
        found = answer(policy(), group("chat", 23, 20, 6))
        assert outcome(found) == [(20, 3, 0)]
        assert found.batch is not None
        assert found.batch.prediction is not None
        assert [peak.bytes for peak in found.batch.prediction.peaks] == [2_400, 2_200]
        assert found.batch.needed_bytes == 2_400 + 500
        assert (found.batch.covering_class, found.batch.covering_sessions) == ("p20-o6", 20)
        assert found.one_more is not None
        assert (found.one_more.stop, found.one_more.batch.rows) == ("measured limit", 21)
        assert found.groups[0].reason == "one more: 21 rows of p20-o6; measured at p20-o6: 20"

    def test_the_terms_add_up(self) -> None:
        found = answer(policy(), group("chat", 3, 20, 6))
        assert found.batch is not None
        assert found.batch.prediction is not None
        terms = {term.name: term.bytes for term in found.batch.prediction.peaks[0].terms}
        assert terms == {
            "weights": 900,
            "runtime": 100,
            "session tokens": 120,
            "sessions": 30,
            "prefill tokens": 60,
        }

    def test_the_calibrated_peak_with_the_reserve_binds(self) -> None:
        """A row of 50 takes 160 in the prefill: 1,000 + 500 + 160 n <= 4,000 for n = 15 (3,900), not for 16 (4,060).

        The class that covers it was measured for 10 rows, all of them longer.
        """
        found = answer(policy(cap_bytes=4_000), group("middle", 20, 50, 9))
        assert outcome(found) == [(15, 5, 0)]
        assert found.batch is not None
        assert found.batch.needed_bytes == 3_900
        assert found.one_more is not None
        assert (found.one_more.stop, found.one_more.needed_bytes) == ("device", 4_060)

    def test_nothing_computed_overrules_a_batch_that_ran(self) -> None:
        """By the plane 9 rows of 100 would need 4,290 of 4,000: 10 of them ran, and 11 did not."""
        found = answer(policy(cap_bytes=4_000), group("long", 12, 100, 11))
        assert outcome(found) == [(10, 2, 0)]
        assert found.one_more is not None
        assert found.one_more.stop == "measured limit"

    def test_a_plane_that_something_speaks_against_answers_only_when_asked_to(self) -> None:
        flagged = calibration(fits=(fit("prefill", flags=("bend: a window",)), fit("decode")))
        stored = policy(calibrated(calibration=flagged))
        assert outcome(answer(stored, group("middle", 20, 50, 9))) == [(10, 10, 0)]
        assert outcome(answer(stored, group("middle", 20, 50, 9), extrapolate=True)) == [(20, 0, 0)]
        alone = policy(calibrated(calibration=flagged, limits=()))
        assert outcome(answer(alone, group("middle", 20, 50, 9))) == [(0, 0, 20)]
        assert outcome(answer(alone, group("middle", 20, 50, 9), extrapolate=True)) == [(20, 0, 0)]

    def test_a_peak_that_equals_the_cap_is_admitted(self) -> None:
        assert outcome(answer(policy(cap_bytes=3_900), group("middle", 20, 50, 9))) == [(15, 5, 0)]
        assert outcome(answer(policy(cap_bytes=3_899), group("middle", 20, 50, 9))) == [(14, 6, 0)]

    def test_a_reserve_on_top(self) -> None:
        """20 more than what 8 rows leave."""
        assert outcome(answer(policy(cap_bytes=4_000), group("long", 12, 100, 11), reserve_bytes=21)) == [(7, 5, 0)]

    def test_a_long_session_lengthens_all_rows(self) -> None:
        """Nine short ones and one long one are ten rows of 100, the limit of the long class: a second one waits."""
        found = answer(policy(cap_bytes=1_000_000), group("chat", 9, 20, 6), group("long", 2, 100, 11))
        assert outcome(found) == [(9, 0, 0), (1, 1, 0)]
        assert found.batch is not None
        assert (found.batch.batch.rows, found.batch.batch.prompt_tokens, found.batch.batch.output_tokens) == (
            10,
            100,
            11,
        )

    def test_rows_with_shorter_prompts_need_a_mask_that_was_not_measured(self) -> None:
        """Ten rows of 100 + 11: 1,000 + 500 + 10 * 310 = 4,600, and of a mask 100 * 110 positions a row.

        Each in two masks, as a bool and as 2 bytes: 10 * 11,000 * 2 * 3 = 660,000.
        """
        groups = group("chat", 9, 20, 6), group("long", 1, 100, 11)
        found = answer(policy(cap_bytes=664_600), *groups)
        assert outcome(found) == [(9, 0, 0), (1, 0, 0)]
        assert found.batch is not None
        assert (found.batch.mask_bytes, found.batch.needed_bytes) == (660_000, 664_600)
        found = answer(policy(cap_bytes=664_599), *groups)
        assert outcome(found) == [(9, 0, 0), (0, 1, 0)]
        assert found.one_more is not None
        assert "the mask of shorter prompts" in found.one_more.reason

    def test_without_a_calibration_nothing_says_what_a_mask_leaves_room_for(self) -> None:
        stored = policy(calibrated(calibration=None))
        assert outcome(answer(stored, group("chat", 2, 20, 6), group("long", 1, 100, 11))) == [(2, 0, 0), (0, 1, 0)]

    def test_the_longest_prompt_and_the_longest_generation_meet(self) -> None:
        """20 + 11 is no class of the short ones: the long one covers it."""
        groups = [group("a", 1, 20, 2), group("b", 1, 5, 11)]
        for ordered in (groups, groups[::-1]):
            found = answer(policy(cap_bytes=1_000_000), *ordered)
            assert found.batch is not None
            assert (found.batch.batch.prompt_tokens, found.batch.batch.output_tokens) == (20, 11)
            assert found.batch.covering_class == "p100-o11"

    def test_a_long_one_that_does_not_fit_beside_the_short_ones_waits_and_nobody_overtakes(self) -> None:
        found = answer(policy(), group("chat", 15, 20, 6), group("long", 1, 100, 11), group("late", 2, 20, 6))
        assert outcome(found) == [(15, 0, 0), (0, 1, 0), (0, 2, 0)]
        assert found.groups[2].reason == "waits behind long"
        assert found.batch is not None
        assert found.batch.batch.prompt_tokens == 20

    def test_a_refused_one_holds_nobody_up(self) -> None:
        found = answer(policy(), group("endless", 3, 190, 11), group("chat", 2, 20, 6))
        assert outcome(found) == [(0, 0, 3), (2, 0, 0)]
        assert found.groups[0].reason == "201 tokens pass the model's context of 200"

    def test_the_context_itself_is_allowed(self) -> None:
        wide = calibration(most_prompt_tokens=190, most_cached_tokens=199)
        assert outcome(answer(policy(calibrated(calibration=wide)), group("a", 1, 190, 10))) == [(1, 0, 0)]

    def test_longer_than_measured_is_refused_unless_extrapolation_is_asked_for(self) -> None:
        longer = group("long", 2, 120, 11)
        found = answer(policy(), longer)
        assert outcome(found) == [(0, 0, 2)]
        assert "120 prompt tokens, and no more than 100 were measured" in found.groups[0].reason
        found = answer(policy(), longer, extrapolate=True)
        assert outcome(found) == [(2, 0, 0)]
        assert any(note.startswith("extrapolates: 120 prompt tokens") for note in found.notes)

    def test_extrapolation_still_ends_at_the_cap_and_at_the_context(self) -> None:
        """1,500 + 370 a row of 120 <= 6,000 for 12 rows (5,940)."""
        found = answer(policy(), group("long", 20, 120, 11), group("endless", 1, 200, 2), extrapolate=True)
        assert outcome(found) == [(12, 8, 0), (0, 0, 1)]

    def test_shorter_than_measured_is_counted_as_the_least_measured(self) -> None:
        found = answer(policy(), group("tiny", 1, 3, 1))
        assert found.batch is not None
        assert found.batch.prediction is not None
        assert (found.batch.prediction.batch.prompt_tokens, found.batch.prediction.batch.output_tokens) == (10, 2)
        assert found.batch.prediction.extrapolates == ()

    def test_without_a_class_the_calibration_decides_within_what_was_measured(self) -> None:
        """1,500 tokens were held at once, so 13 rows of 110 - 1,430 - and no more, though the cap holds 14 of them."""
        stored = policy(calibrated(limits=(limit(20, 6, 20),)))
        found = answer(stored, group("long", 20, 100, 11))
        assert outcome(found) == [(13, 7, 0)]
        assert found.one_more is not None
        assert found.one_more.stop == "not measured"
        assert "1,540 tokens of all sessions, and no more than 1,500" in found.one_more.reason

    def test_without_a_calibration_the_measured_limits_decide(self) -> None:
        stored = policy(calibrated(calibration=None))
        assert outcome(answer(stored, group("chat", 23, 15, 4))) == [(20, 3, 0)]
        found = answer(stored, group("long", 1, 101, 2), extrapolate=True)
        assert outcome(found) == [(0, 0, 1)]
        assert "p101-o2 is covered by no measured length class (p20-o6, p100-o11)" in found.groups[0].reason

    def test_beams_are_rows(self) -> None:
        assert outcome(answer(policy(), group("search", 9, 20, 6, beams=3))) == [(6, 3, 0)]
        assert outcome(answer(policy(), group("search", 2, 20, 6, beams=21))) == [(0, 0, 2)]

    def test_streamed_takes_no_beams(self) -> None:
        stored = policy(calibrated(strategy=StreamedSpec()))
        assert outcome(answer(stored, group("search", 2, 20, 6, beams=2))) == [(0, 0, 2)]

    def test_a_limit_of_none_refuses(self) -> None:
        assert outcome(answer(policy(calibrated(limits=(limit(20, 6, 0),))), group("chat", 2, 20, 6))) == [(0, 0, 2)]

    def test_a_strategy_that_was_refused_admits_nobody(self) -> None:
        stored = policy(calibrated(limits=(), calibration=None, refusal="needs hqq"))
        found = answer(stored, group("chat", 2, 20, 6))
        assert outcome(found) == [(0, 0, 2)]
        assert found.groups[0].reason == "needs hqq"

    def test_the_host_ledger_binds(self) -> None:
        """A row of 50 + 9 holds 58 tokens of 4 bytes on the host: 12 rows in 2,784 bytes, 13 in 3,016."""
        stored = policy(
            calibrated(host_bytes_per_session_token=4.0), budget=BudgetSpec(device_bytes=6_000, host_bytes=3_015)
        )
        found = answer(stored, group("middle", 20, 50, 9))
        assert outcome(found) == [(12, 8, 0)]
        assert found.one_more is not None
        assert (found.one_more.stop, found.one_more.host_bytes) == ("host", 3_016)

    def test_a_chunked_class_covers_no_whole_prefill(self) -> None:
        """Its rows prefilled 32 at once; shorter prompts than that are no larger."""
        stored = policy(
            calibrated(calibration=None, limits=(limit(100, 11, 5, lengths={"prefill_chunk_tokens": 32}),))
        )
        assert outcome(answer(stored, group("a", 6, 100, 11))) == [(0, 0, 6)]
        assert outcome(answer(stored, group("a", 6, 100, 11), prefill_chunk_tokens=32)) == [(5, 1, 0)]
        assert outcome(answer(stored, group("a", 6, 30, 11))) == [(5, 1, 0)]

    def test_the_smallest_covering_class_counts(self) -> None:
        stored = policy(calibrated(calibration=None, limits=(limit(100, 11, 4), limit(50, 11, 8), limit(20, 2, 16))))
        assert outcome(answer(stored, group("a", 20, 20, 3))) == [(8, 12, 0)]

    def test_a_class_of_another_attention_does_not_count(self) -> None:
        eager = limit(100, 11, 4, lengths={"attn_implementation": "eager"})
        assert outcome(answer(policy(calibrated(calibration=None, limits=(eager,))), group("a", 1, 9, 2))) == [
            (0, 0, 1)
        ]

    def test_a_million_sessions_are_answered_at_once(self) -> None:
        found = answer(policy(cap_bytes=5_500), *(group(f"g{index}", 1_000_000, 20, 6) for index in range(20)))
        assert found.groups[0].admitted == 20

    def test_the_flags_of_a_calibration_are_notes(self) -> None:
        bent = calibration(fits=(fit("prefill", flags=("bend: 9%",)), fit("decode")))
        assert "prefill: bend: 9%" in answer(policy(calibrated(calibration=bent)), group("a", 1, 20, 6)).notes


class TestFingerprint:
    def test_an_emulated_one_is_of_the_cpu_and_a_measured_one_of_the_gpu(self) -> None:
        machine = make_machine(accelerator=GPU, cuda="12.8", allocator_config="expandable_segments:True")
        emulated, measured = fingerprint(machine), fingerprint(machine, device="cuda")
        assert (emulated.cpu, emulated.accelerator, emulated.driver, emulated.cuda) == ("Test CPU", None, None, None)
        assert (measured.cpu, measured.accelerator, measured.driver, measured.cuda) == (None, "H100", "550.54", "12.8")
        assert measured.accelerator_memory_bytes == 80 * 1024**3
        assert measured.allocator_config == "expandable_segments:True"

    def test_it_has_this_release_and_what_limits_depend_on(self) -> None:
        assert set(fingerprint().versions) == {"torch", "transformers", "optimum-quanto", "hqq", "offload-eval"}

    def test_nothing_differs_from_itself(self) -> None:
        assert differences(fingerprint(), fingerprint()) == ()

    def test_where_the_model_lies_is_no_difference(self) -> None:
        moved = replace(fingerprint(), model=ModelSpec(source="/elsewhere/tiny"))
        assert differences(fingerprint(), moved) == ()

    @pytest.mark.parametrize(
        ("change", "field", "before", "now"),
        [
            ({"model_fingerprint": "0" * 16}, "model_fingerprint", "feedfacefeedface", "0" * 16),
            ({"cpu": "Other CPU"}, "cpu", "Test CPU", "Other CPU"),
            ({"driver": "560"}, "driver", None, "560"),
            ({"device": "cuda"}, "device", "cpu", "cuda"),
            ({"model": ModelSpec(source="x", dtype="float16")}, "model.dtype", "bfloat16", "float16"),
        ],
    )
    def test_what_differs_is_named_with_both_values(
        self, change: dict[str, Any], field: str, before: str | None, now: str
    ) -> None:
        (found,) = differences(fingerprint(), replace(fingerprint(), **change))
        assert (found.field, found.policy, found.now) == (field, before, now)

    @pytest.mark.parametrize(
        ("package", "concerned"),
        [
            ("optimum-quanto", ["quantized-quanto-int4"]),
            ("hqq", ["quantized-hqq-int4"]),
            ("torch", ["dynamic", "quantized-quanto-int4", "quantized-hqq-int4"]),
            ("transformers", ["dynamic", "quantized-quanto-int4", "quantized-hqq-int4"]),
        ],
    )
    @pytest.mark.parametrize("version", ["9.9", None])
    def test_a_version_concerns_the_strategies_that_use_it(
        self, package: str, concerned: list[str], version: str | None
    ) -> None:
        stored = policy(calibrated(), calibrated(strategy=QUANTO), calibrated(strategy=HQQ))
        versions = {name: text for name, text in (VERSIONS | {package: version}).items() if text is not None}
        (found,) = check_fingerprint(stored, fingerprint(make_machine(versions=versions)))
        assert (found.field, found.policy, found.now) == (f"versions.{package}", VERSIONS[package], version)
        assert [each.label for each in found.concerns] == concerned
        assert found.concerns[0].length_classes == ("p20-o6", "p100-o11")
        assert found.concerns[0].run_ids == ("r20", "r100", "c1", "c2")

    def test_a_package_that_no_limit_uses_concerns_nothing(self) -> None:
        (found,) = check_fingerprint(policy(), fingerprint(make_machine(versions=VERSIONS | {"hqq": "9"})))
        assert found.concerns == ()


class TestBuild:
    def limits(self, **changes: Any) -> CapacityLimit:
        base = {
            "lengths": SHORT,
            "strategy": DYNAMIC,
            "kind": "dynamic",
            "label": "dynamic",
            "evidence": "emulated",
            "cap_bytes": 1_900_000,
            "measured": 15,
            "failed_at": 16,
            "limited_by": "device, decode: KV cache",
            "run_ids": ("a", "b"),
        }
        return CapacityLimit(**base | changes)

    def build(self, *limits: CapacityLimit, found: Any = None, **changes: Any) -> AdmissionPolicy:
        found = records() if found is None else found
        made = make_fingerprint(make_machine(), make_facts(), ModelSpec(source="tests/tiny"), "cpu")
        experiment = make_experiment(strategies=(DYNAMIC, HQQ), **changes)
        return build_policy(experiment, limits, found, made, "2026-01-02T03:04:05Z")

    def test_limits_and_calibration_come_together(self) -> None:
        refused = self.limits(strategy=HQQ, kind="quantized", label=HQQ.label, measured=None, refusal="needs hqq")
        made = self.build(self.limits(), self.limits(lengths=LONG, measured=4, failed_at=9), refused)
        dynamic, quantized = made.strategies
        assert [(each.lengths.label, each.sessions) for each in dynamic.limits] == [("p64-o16", 15), ("p512-o48", 4)]
        assert dynamic.limits[0].run_ids == ("a", "b")
        assert dynamic.calibration is not None
        assert dynamic.calibration.fits[1].bytes_per_session == pytest.approx(3_000)
        assert (quantized.limits, quantized.calibration, quantized.refusal) == ((), None, "needs hqq")
        assert (made.cap_bytes, made.context_tokens) == (1_900_000, 4096)
        assert any("higher: dynamic at p512-o48." in each for each in made.assumptions)
        assert any(each.startswith("Emulated") for each in made.assumptions)

    def test_a_strategy_without_any_limit_says_so(self) -> None:
        assert self.build(self.limits()).strategies[1].refusal == "no limit was measured"

    def test_records_of_other_conditions_are_left_out_and_counted(self) -> None:
        others = [
            replace(each, machine=make_machine(versions={"torch": "1.0", "transformers": "5.24.0"}))
            for each in records()
        ]
        made = self.build(self.limits(), found=others)
        assert made.strategies[0].calibration is None
        assert any("8 records made under other conditions" in each for each in made.assumptions)

    def test_host_figures_are_the_highest(self) -> None:
        """24,000 bytes of 3 rows of 80 tokens, and 4,000 of one row of 20."""
        specs = [
            make_spec(workload=make_spec().workload.__class__(batch_size=b, prompt_tokens=p, output_tokens=2))
            for b, p in ((3, 79), (1, 19))
        ]
        trials = [
            make_trial(kv_cache_host_bytes=h, peak_host_rss_bytes=rss, pinned_allocated_bytes=pin)
            for h, rss, pin in ((24_000, 5, 8), (4_000, 7, 6))
        ]
        found = [make_record(spec=spec, trials=(trial,)) for spec, trial in zip(specs, trials, strict=True)]
        dynamic = self.build(self.limits(), found=found).strategies[0]
        assert dynamic.host_bytes_per_session_token == 200.0
        assert (dynamic.peak_host_rss_bytes, dynamic.pinned_allocated_bytes) == (7, 8)

    def test_a_share_that_follows_the_budget_is_kept_as_it_was_searched(self) -> None:
        auto = StreamedSpec(resident_share="auto")
        limits = [self.limits(), self.limits(strategy=auto, kind="streamed", label=auto.label)]
        made = make_fingerprint(make_machine(), make_facts(), ModelSpec(source="tests/tiny"), "cpu")
        none_resident = StreamedSpec(name=auto.label, resident_share=0.0)
        found = records(strategy=none_resident)
        experiment = make_experiment(strategies=(DYNAMIC, auto))
        stored = build_policy(experiment, limits, found, made, "2026-01-02T03:04:05Z").strategies[1]
        assert (len(stored.limits), stored.strategy) == (1, none_resident)
        assert stored.calibration is not None

    def test_it_loads_back_equal(self, tmp_path: Path) -> None:
        made = self.build(self.limits(), self.limits(strategy=HQQ, label=HQQ.label, kind="quantized"))
        write_policy(tmp_path / "policy.yaml", made)
        assert load_policy(tmp_path / "policy.yaml") == made


class TestFile:
    def test_every_number_is_exact(self, tmp_path: Path) -> None:
        odd = fit("prefill", bytes_per_session_token=0.1 + 0.2, runtime_bytes=2**53 / 3)
        stored = policy(
            calibrated(calibration=calibration(fits=(odd, fit("decode")), most_session_tokens=2**62)),
            calibrated(strategy=OffloadedSpec(name="0123"), host_bytes_per_session_token=1 / 3),
            assumptions=("a: b # c", "\u0085 ünï"),
        )
        write_policy(tmp_path / "policy.yaml", stored)
        assert load_policy(tmp_path / "policy.yaml") == stored

    def test_what_is_absent_is_left_out(self) -> None:
        assert "null" not in dump_policy(policy())

    def test_the_limits_stand_at_the_top_for_people(self) -> None:
        assert "#   dynamic: p20-o6: 20, p100-o11: 10\n" in dump_policy(policy())

    def test_another_policy_that_is_there_is_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "policy.yaml"
        write_policy(path, policy())
        write_policy(path, policy())
        assert [each.name for each in tmp_path.iterdir()] == ["policy.yaml"]
        write_policy(path, policy(cap_bytes=5_000))
        assert load_policy(tmp_path / "policy.1.yaml").cap_bytes == 6_000
        assert load_policy(path).cap_bytes == 5_000

    def test_a_write_that_fails_leaves_what_was_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "policy.yaml"
        write_policy(path, policy())
        # The copy of the old file, its folder, and then the new file itself.
        for num_written in (0, 2):
            monkeypatch.setattr("os.fsync", _disk_that_is_full_after(num_written))
            with pytest.raises(UnableError, match="cannot be written: No space left"):
                write_policy(path, policy(cap_bytes=5_000))
            assert load_policy(path).cap_bytes == 6_000

    @pytest.mark.parametrize(
        ("old", "new", "words"),
        [
            (
                "schema_version: 1",
                "schema_version: 2",
                "schema_version: 2 is not a version that this release reads; al",
            ),
            ("schema_version: 1", "schema_version: true", "schema_version: true is not a version"),
            ("schema_version: 1\n", "", "schema_version: required, and missing; allowed: 1"),
            ("schema_version: 1", "schema_version: 2\nlater: 1", "schema_version: 2 is not"),
            ("baseline: dynamic", "baseline: dynamik", "baseline: 'dynamik' is not the label.*did you mean 'dynamic'"),
            ("cap_bytes: 6000", "cap_bytes: 7000", "cap_bytes: 7000 is more than the device has.*= 6000"),
            (
                "cap_bytes: 6000",
                "cap_bytes: -1",
                r"cap_bytes: -1 \(integer\) is not allowed; allowed: an integer >= 1",
            ),
            ("cap_bytes: 6000", "cap_bites: 6000", "cap_bites: unknown key; allowed: .*cap_bytes"),
            ("2026-01-02T03:04:05Z", "yesterday", "created_at_utc: 'yesterday' is no time"),
            ("sessions: 20", "sessions: -2", r"strategies\[0\].limits\[0\].sessions: -2 .*integer >= 0"),
            ("prompt_tokens: 20", "prompt_tokens: 0", r"limits\[0\].lengths.prompt_tokens: 0 is not allowed"),
            ("evidence: emulated", "evidence: guessed", r"limits\[0\].evidence: 'guessed'.*allowed: .*emulated"),
            ("phase: decode", "phase: prefill", r"calibration.fits: of prefill, prefill; allowed: one of each"),
            (
                "least_prompt_tokens: 10",
                "least_prompt_tokens: 101",
                "least_prompt_tokens: 101 .*most_prompt_tokens = 100",
            ),
            ("runtime_bytes: 100.0", "runtime_bytes: -1.0", r"runtime_bytes: -1.0 .*allowed: a number from 0 to 9.0"),
            ("runtime_bytes: 100.0", "runtime_bytes: .nan", "runtime_bytes: .nan is not allowed; allowed: a finite"),
            ("kind: dynamic", "kind: dynamo", r"strategies\[0\].strategy.kind: 'dynamo'.*did you mean 'dynamic'"),
            ("torch: 2.13.0", "torch: 2", r"fingerprint.versions: .*allowed: a mapping of text to text"),
            ("source: tests/tiny", "revision: x", "fingerprint.model: exactly one of source and config is needed"),
            ("name: does-it-pay", "name: [", "not valid YAML"),
        ],
    )
    def test_a_malformed_file_is_refused_by_path_value_and_what_is_allowed(
        self, tmp_path: Path, old: str, new: str, words: str
    ) -> None:
        text = dump_policy(policy())
        assert old in text
        path = tmp_path / "policy.yaml"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        with pytest.raises(InputError, match=words) as refused:
            load_policy(path)
        assert str(refused.value).startswith(f"{path}:")

    @pytest.mark.parametrize("text", ["", "[]", "a policy", "null"])
    def test_what_is_no_mapping_is_refused(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "policy.yaml"
        path.write_text(text)
        with pytest.raises(InputError, match="allowed: a mapping with schema_version"):
            load_policy(path)

    def test_one_length_class_has_one_limit(self, tmp_path: Path) -> None:
        path = tmp_path / "policy.yaml"
        path.write_text(dump_policy(policy(calibrated(limits=(limit(20, 6, 2), limit(20, 6, 3))))))
        with pytest.raises(InputError, match=r"strategies\[0\].limits: the lengths p20-o6 have 2 limits"):
            load_policy(path)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="No such file"):
            load_policy(tmp_path / "none.yaml")


def _disk_that_is_full_after(num_written: int) -> Callable[[int], None]:
    left = iter(range(num_written))

    def write(_: int) -> None:
        if next(left, None) is None:
            raise OSError(28, "No space left on device")

    return write


WritePopulation = Callable[[str], Path]


@pytest.fixture
def population(tmp_path: Path) -> WritePopulation:
    def write(text: str) -> Path:
        path = tmp_path / "population.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


class TestPopulation:
    GROUPS = "population:\n- {name: chat, sessions: 5, prompt_tokens: 20, max_new_tokens: 6}\n"

    def test_a_file_of_its_own(self, population: WritePopulation) -> None:
        assert load_population(population(self.GROUPS)) == (group("chat", 5, 20, 6),)

    def test_an_experiment(self, population: WritePopulation) -> None:
        nested = "".join(f"  {line}\n" for line in self.GROUPS.splitlines())
        path = population(f"budget: {{device_bytes: 8 GiB}}\nmodel: {{source: not/here}}\nplan:\n{nested}")
        assert load_population(path) == (group("chat", 5, 20, 6),)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "is empty; allowed: a mapping with population"),
            ("population: []", "population: .*at least 1"),
            ("populations: []", "has no population; allowed: a list `population` at the top, or an experiment"),
            ("plan: {population: []}", "has no population"),
            (
                "population: [{name: a, sessions: 0, prompt_tokens: 1, max_new_tokens: 1}]",
                r"population\[0\].sessions: 0",
            ),
            ("population: [{name: a, sessions: 1, prompt_tokens: 1}]", r"population\[0\].max_new_tokens: required"),
            (GROUPS + GROUPS.partition("\n")[2], "population: the name 'chat' is used 2 times"),
            (GROUPS + "strategies: []", "strategies: unknown key"),
        ],
    )
    def test_what_is_wrong_is_named(self, population: WritePopulation, text: str, words: str) -> None:
        with pytest.raises(InputError, match=words):
            load_population(population(text))


TINY_OFFLOAD = Path(__file__).parents[1] / "configs" / "tiny_offload_model.json"
HEAVY = ("torch", "transformers", "pandas", "pynvml", "accelerate")


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["policy", *map(str, arguments)])


@pytest.fixture(scope="module")
def here() -> Fingerprint:
    """Of this machine and the tiny model, read in this process."""
    model = ModelSpec(config=str(TINY_OFFLOAD), weights="random")
    found = read_surroundings(model, "cpu")
    return make_fingerprint(found.machine, found.model, model, found.device)


WritePolicy = Callable[..., Path]


@pytest.fixture
def stored(tmp_path: Path, here: Fingerprint) -> WritePolicy:
    """Writes a policy of dynamic, quanto and hqq that holds here, but for what replaces the fingerprint's fields."""

    def write(**changes: Any) -> Path:
        changes["versions"] = here.versions | changes.get("versions", {})
        strategies = (calibrated(), calibrated(strategy=QUANTO), calibrated(strategy=HQQ))
        path = tmp_path / "policy.yaml"
        write_policy(path, policy(*strategies, fingerprint=replace(here, **changes)))
        return path

    return write


class TestCheckCommand:
    def test_a_policy_that_holds_ends_with_0(self, stored: WritePolicy) -> None:
        result = invoke("check", stored())
        assert (result.exit_code, result.stderr) == (0, "")
        assert "does-it-pay holds here" in result.stdout

    def test_one_changed_version_ends_with_1_and_names_only_the_concerned_cells(
        self, stored: WritePolicy, here: Fingerprint
    ) -> None:
        result = invoke("check", stored(versions={"optimum-quanto": "0.0.1"}), "--json")
        document = json.loads(result.stdout)
        assert result.exit_code == 1
        (found,) = document["differences"]
        assert (found["field"], found["policy"], found["now"]) == (
            "versions.optimum-quanto",
            "0.0.1",
            here.versions.get("optimum-quanto"),
        )
        (concerned,) = found["concerns"]
        assert concerned["label"] == "quantized-quanto-int4"
        assert concerned["run_ids"] == ["r20", "r100", "c1", "c2"]
        (command,) = document["commands"]
        assert command.startswith("offload-eval capacity EXPERIMENT.yaml --out runs/does-it-pay-again --set ")
        assert '"backend": "quanto"' in command
        assert '"kind": "dynamic"' in command  # whose tokens it is given
        assert "hqq" not in command

    def test_the_same_for_people(self, stored: WritePolicy) -> None:
        result = invoke("check", stored(versions={"optimum-quanto": "0.0.1"}))
        assert result.exit_code == 1
        assert "versions.optimum-quanto: 0.0.1 -> " in result.stdout
        assert "concerns quantized-quanto-int4\n" in result.stdout
        assert "p20-o6, p100-o11" in result.stdout
        assert "hqq" not in result.stdout

    def test_another_torch_concerns_everything(self, stored: WritePolicy) -> None:
        result = invoke("check", stored(versions={"torch": "1.0"}))
        assert result.exit_code == 1
        assert "concerns dynamic, quantized-quanto-int4, quantized-hqq-int4" in result.stdout
        assert "--set" not in result.stdout

    def test_the_model_may_lie_elsewhere_but_must_be_the_same(self, stored: WritePolicy, tmp_path: Path) -> None:
        same, other = tmp_path / "same.json", tmp_path / "other.json"
        text = TINY_OFFLOAD.read_text()
        same.write_text(text)
        other.write_text(text.replace('"num_hidden_layers": 8', '"num_hidden_layers": 7'))
        assert invoke("check", stored(), "--model", same).exit_code == 0
        result = invoke("check", stored(), "--model", other)
        assert result.exit_code == 1
        assert result.stdout.startswith("model_fingerprint: ")

    def test_a_model_that_is_not_there_is_bad_input(self, stored: WritePolicy, tmp_path: Path) -> None:
        moved = ModelSpec(config="/no/such/model.json", weights="random")
        result = invoke("check", stored(model=moved))
        assert result.exit_code == 2
        assert "fingerprint.model.config: /no/such/model.json does not exist here; give its place with --model" in (
            result.stderr
        )
        result = invoke("check", stored(), "--model", Path(__file__).parent)
        assert result.exit_code == 2
        assert "--model says where the model is here" in result.stderr
        assert invoke("check", stored(), "--model", tmp_path / "none").exit_code == 2
        assert invoke("check", stored(), "--model", "").exit_code == 2

    def test_a_device_that_is_not_there_is_an_environment(self, stored: WritePolicy) -> None:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has one")
        result = invoke("check", stored(), "--device", "cuda")
        assert result.exit_code == 3
        assert "sees no CUDA" in result.stderr

    def test_it_imports_no_framework(self, stored: WritePolicy) -> None:
        code = (
            "from offload_eval.cli.app import app\nimport sys\n"
            f"try: app(['policy', 'check', {str(stored())!r}])\n"
            "except SystemExit as end: assert end.code == 0\n"
            f"assert not [name for name in {HEAVY} if name in sys.modules]"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


class TestApplyCommand:
    def write(self, folder: Path, text: str) -> Path:
        path = folder / "population.yaml"
        path.write_text(text)
        return path

    def test_the_arithmetic_is_shown(self, tmp_path: Path) -> None:
        """16 rows of 50 would need 1,000 + 16 * 160 = 3,560, with the reserve 4,060 of 4,000."""
        write_policy(tmp_path / "policy.yaml", policy(cap_bytes=4_000))
        groups = self.write(
            tmp_path, "population: [{name: middle, sessions: 20, prompt_tokens: 50, max_new_tokens: 9}]"
        )
        result = invoke("apply", tmp_path / "policy.yaml", groups)
        assert result.exit_code == 0
        lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
        assert "admitted: 15 rows of 50 + 9 tokens" in lines
        assert "not admitted: 16 rows of 50 + 9 tokens" in lines
        assert "session tokens: 16 sessions * 50 tokens * 2.00 B = 1.56 KiB" in lines
        assert "prefill tokens: 800 tokens at once * 1.00 B = 800 B" in lines
        assert "3.48 KiB + reserve 500 B = 3.96 KiB > cap 3.91 KiB" in lines
        assert "measured limit at p100-o11: 10 rows" in lines

    def test_as_json_with_one_strategy(self, tmp_path: Path) -> None:
        write_policy(tmp_path / "policy.yaml", policy(calibrated(), calibrated(strategy=HQQ), cap_bytes=4_000))
        groups = self.write(
            tmp_path, "population: [{name: middle, sessions: 20, prompt_tokens: 50, max_new_tokens: 9}]"
        )
        result = invoke("apply", tmp_path / "policy.yaml", groups, "--strategy", HQQ.label, "--json")
        document = json.loads(result.stdout)
        (found,) = document["strategies"]
        assert found["strategy"] == HQQ.label
        assert [found["groups"][0][key] for key in ("admitted", "queued", "refused")] == [15, 5, 0]
        assert sum(term["bytes"] for term in found["batch"]["prediction"]["peaks"][0]["terms"]) == 3_400

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--strategy", "dynamik"], "allowed: dynamic; did you mean 'dynamic'?"),
            (["--reserve-gib", "-1"], "reserve-gib"),
            (["--prefill-chunk-size", "0"], "prefill-chunk-size"),
        ],
    )
    def test_a_wrong_option_is_bad_input(self, tmp_path: Path, options: list[str], words: str) -> None:
        write_policy(tmp_path / "policy.yaml", policy())
        groups = self.write(tmp_path, TestPopulation.GROUPS)
        result = invoke("apply", tmp_path / "policy.yaml", groups, *options)
        assert result.exit_code == 2
        assert words in result.stderr

    def test_files_that_are_not_there(self, tmp_path: Path) -> None:
        assert invoke("apply", tmp_path / "no.yaml", tmp_path / "no.yaml").exit_code == 2
        write_policy(tmp_path / "policy.yaml", policy())
        result = invoke("apply", tmp_path / "policy.yaml", tmp_path / "no.yaml")
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.count("\n") == 1

    @pytest.mark.parametrize("options", [[], ["--json"]])
    def test_a_peak_past_64_bits_is_no_crash(self, tmp_path: Path, options: list[str]) -> None:
        fits = (fit("prefill", bytes_per_session_token=2.0**53), fit("decode"))
        write_policy(tmp_path / "policy.yaml", policy(calibrated(calibration=calibration(fits=fits))))
        groups = "population: [{name: long, sessions: 1, prompt_tokens: 100, max_new_tokens: 11, beams: 1024}]"
        result = invoke("apply", tmp_path / "policy.yaml", self.write(tmp_path, groups), *options)
        assert (result.exit_code, result.exception) == (0, None)

    def test_markup_in_a_name_is_text(self, tmp_path: Path) -> None:
        write_policy(tmp_path / "policy.yaml", policy(calibrated(refusal="needs [bold]hqq[/]", limits=())))
        result = invoke("apply", tmp_path / "policy.yaml", self.write(tmp_path, TestPopulation.GROUPS))
        assert "[bold]hqq[/]" in result.stdout
