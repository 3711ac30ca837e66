"""A run held against another: planted differences are found, noise raises nothing, and unlike runs are refused."""

import csv
import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from factories import (
    DYNAMIC,
    QUANTIZED,
    STREAMED,
    make_budget,
    make_conditions,
    make_experiment,
    make_facts,
    make_failure,
    make_fidelity,
    make_machine,
    make_phase,
    make_quantized,
    make_record,
    make_shape,
    make_spec,
    make_streamed,
    make_timing,
    make_trace,
    make_traced,
    make_trial,
    make_workload,
)
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from test_capacity import make_oom, make_probe
from typer.testing import CliRunner

from offload_eval.analysis.compare_memory import TRACED_PEAKS
from offload_eval.analysis.compare_metrics import TIMED_METRICS, VALUE_METRICS
from offload_eval.analysis.compare_pairs import RunSide
from offload_eval.analysis.compare_runs import compare_runs
from offload_eval.analysis.compare_states import LIMIT_METRICS
from offload_eval.analysis.compare_tokens import METRIC as EQUAL_TOKENS
from offload_eval.analysis.gate import check_gate
from offload_eval.analysis.rank_test import _normal_p, holm, rank_sum_p, smallest_p, trials_to_decide
from offload_eval.cli.app import app
from offload_eval.core.comparison import RAISED, Change, RunComparison
from offload_eval.core.experiment import CpuSpec, ModelSpec, StreamedSpec
from offload_eval.core.gate import GateLimits, GateLine, GateResult, GateSpec, MetricLimit, StrategyGate
from offload_eval.core.machine import Accelerator
from offload_eval.core.records import RunRecord, TrialSample
from offload_eval.errors import InputError
from offload_eval.reporting.compare_files import comparison_csv, comparison_json, gate_junit
from offload_eval.reporting.compare_terminal import render_terminal_comparison
from offload_eval.reporting.compare_text import gate_headline, render_comparison
from offload_eval.store.gate_file import load_gate
from offload_eval.store.run_directory import RunDirectory

HOSTILE = 'a`b|c <script>alert(1)</script> [x](javascript:y) ]]> & "q" \x00\x1b[31m\u202e\ufffe $z$'


def side(*records: RunRecord, name: str = "before", **changes: Any) -> RunSide:
    return RunSide(name=name, experiment=changes.pop("experiment", make_experiment()), records=records, **changes)


def compare(before: Sequence[RunRecord], after: Sequence[RunRecord], **options: Any) -> RunComparison:
    return compare_runs(side(*before), side(*after, name="after"), **options)


def one(comparison: RunComparison, metric: str, strategy: str = "dynamic") -> Change:
    (change,) = [each for each in comparison.changes if (each.metric, each.strategy) == (metric, strategy)]
    return change


def raised(comparison: RunComparison) -> dict[tuple[str, str], str]:
    return {(each.strategy, each.metric): each.verdict for each in comparison.changes if each.verdict in RAISED}


def timed(tpots_s: Sequence[float], ttft_s: float = 0.5, **changes: Any) -> tuple[TrialSample, ...]:
    """Trials with these TPOTs; the first looked at memory too."""
    times = [
        {"ttft_s": ttft_s, "e2e_latency_s": ttft_s + 156 * tpot_s, "inter_token_latencies_s": (tpot_s,) * 156}
        for tpot_s in tpots_s
    ]
    return (make_trial(**times[0] | changes), *(make_timing(**each) for each in times[1:]))


class TestRankTest:
    @pytest.mark.parametrize(
        ("first", "second", "p"),
        [
            # Of C(6, 3) = 20 splits, 2 are as extreme.
            ([1, 2, 3], [4, 5, 6], 2 / 20),
            # Rank sum 7: below it 6, so 2 splits on each side.
            ([1, 2, 4], [3, 5, 6], 4 / 20),
            ([1, 2], [3, 4], 2 / 6),
            ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 2 / 252),
            ([1], [2], 1.0),
            # Mid-ranks 2 2 2 4.5 4.5, pairs: 4 three times, 6.5 six times, 9 once; mean 6, seen 4.
            ([0, 0], [0, 1, 1], 4 / 10),
            # Mid-ranks 2 2 2 5 5 5.
            ([0, 0, 0], [1, 1, 1], 2 / 20),
            # Mid-ranks 2 2 2 4: every pair is 1 from the mean.
            ([1, 1], [1, 2], 1.0),
            ([7, 7, 7], [7, 7, 7], 1.0),
        ],
    )
    def test_p_is_the_share_of_splits_at_least_as_far_from_the_mean(
        self, first: list[float], second: list[float], p: float
    ) -> None:
        assert rank_sum_p(first, second) == pytest.approx(p, abs=1e-12)
        assert rank_sum_p(second, first) == pytest.approx(p, abs=1e-12)

    @given(
        st.lists(st.integers(0, 4), min_size=1, max_size=4),
        st.lists(st.integers(0, 4), min_size=1, max_size=4),
    )
    def test_p_equals_an_enumeration_of_all_splits(self, first: list[int], second: list[int]) -> None:
        values = [*first, *second]
        ranks = [sum(o < v for o in values) + (sum(o == v for o in values) + 1) / 2 for v in values]
        mean = len(first) * sum(ranks) / len(ranks)
        distance = abs(sum(ranks[: len(first)]) - mean)
        sums = [sum(split) for split in combinations(ranks, len(first))]
        far = sum(abs(total - mean) >= distance - 1e-9 for total in sums)
        assert rank_sum_p(first, second) == pytest.approx(far / len(sums))

    def test_no_samples_no_p(self) -> None:
        assert rank_sum_p([], [1.0]) is None

    def test_beyond_exact_counts_the_normal_form_is_close_to_them(self) -> None:
        # 24 values without ties, ranks doubled; the first 12 sum to 2 * 110 of a mean of 2 * 150.
        doubled = [2 * rank for rank in (1, 2, 3, 4, 5, 6, 7, 8, 17, 18, 19, 20)]
        rest = [rank for rank in range(2, 49, 2) if rank not in doubled]
        exact = rank_sum_p(doubled, rest)
        assert _normal_p([*doubled, *rest], 12, sum(doubled)) == pytest.approx(exact, abs=0.003)
        large = rank_sum_p(list(range(20)), list(range(100, 120)))
        assert large is not None
        assert large < 1e-6
        assert rank_sum_p([1.0] * 20, [1.0] * 20) == 1.0

    def test_the_normal_form_by_hand(self) -> None:
        # Rank sum 120 of a mean of 232.5, variance 15 * 15 * 31 / 12 = 581.25; half a rank of continuity.
        by_hand = math.erfc(112 / math.sqrt(581.25) / math.sqrt(2))
        assert rank_sum_p(list(range(15)), list(range(15, 30))) == pytest.approx(by_hand)
        # Ties: 15 of 0 with mid-rank 8, 15 of 1 with 23, variance 15 * 15 / (30 * 29) * 30 * 7.5^2 = 436.4.
        by_hand = math.erfc(112 / math.sqrt(225 / 29 * 7.5**2) / math.sqrt(2))
        assert rank_sum_p([0] * 15, [1] * 15) == pytest.approx(by_hand)

    def test_holm_by_hand(self) -> None:
        # 0.01 * 4, 0.015 * 3, 0.04 * 2, 0.05 * 1 raised to the one before.
        assert holm([0.04, 0.01, 0.05, 0.015]) == pytest.approx([0.08, 0.04, 0.08, 0.045])
        assert holm([]) == []
        assert holm([0.9, 0.9]) == [1.0, 1.0]

    def test_trials_that_can_decide(self) -> None:
        assert smallest_p(3, 3) == pytest.approx(0.1)
        assert trials_to_decide(1, 0.05) == 4  # 2 / 70 = 0.029
        assert trials_to_decide(24, 0.05) == 7  # 24 * 2 / C(12, 6) = 0.052, 24 * 2 / C(14, 7) = 0.014
        assert comb(12, 6) == 924


class TestPlanted:
    """One difference each is put into an otherwise equal run, and it alone is found."""

    before = (make_record(), make_streamed(), make_quantized())

    def with_streamed(self, trials: Sequence[TrialSample]) -> tuple[RunRecord, ...]:
        return (make_record(), make_streamed(trials=tuple(trials)), make_quantized())

    def test_equal_runs_raise_nothing(self) -> None:
        comparison = compare(self.before, self.before)
        assert raised(comparison) == {}
        assert {each.verdict for each in comparison.changes} == {"same", "undecided"}
        assert comparison.memory == ()
        assert comparison.num_pairs == 3

    def test_three_trials_20_percent_slower_are_likely_worse(self) -> None:
        old = (make_record(trials=timed([0.0100, 0.0102, 0.0101])),)
        new = (make_record(trials=timed([0.0121, 0.0122, 0.0120])),)
        change = one(compare(old, new), "tpot_s")
        assert change.verdict == "likely_worse"
        assert change.p == pytest.approx(0.1)
        assert change.adjusted_p is None
        assert change.ratio == pytest.approx(0.0121 / 0.0101)
        assert change.baseline_interval is not None
        assert (change.baseline_interval.low, change.baseline_interval.high) == pytest.approx((0.0100, 0.0102))
        assert one(compare(new, old), "tpot_s").verdict == "likely_better"

    def test_throughput_that_falls_is_worse(self) -> None:
        old = (make_record(trials=timed([0.0100, 0.0102, 0.0101])),)
        new = (make_record(trials=timed([0.0140, 0.0141, 0.0139])),)
        change = one(compare(old, new), "tokens_per_s")
        assert change.verdict == "likely_worse"
        # 314 tokens over 0.5 + 156 * 0.0140 s, and over 0.5 + 156 * 0.0101 s
        assert change.ratio == pytest.approx((0.5 + 156 * 0.0101) / (0.5 + 156 * 0.0140))

    def test_many_trials_10_percent_slower_are_worse(self) -> None:
        old = [0.0100 + 0.0001 * step for step in range(10)]
        new = [0.0110 + 0.0001 * step for step in range(10)]
        change = one(compare((make_record(trials=timed(old)),), (make_record(trials=timed(new)),)), "tpot_s")
        assert change.verdict == "worse"
        # All separated: 2 / C(20, 10), times the three tests TTFT, TPOT and tokens/s, two of which are as small.
        assert change.p == pytest.approx(2 / 184_756)
        assert change.adjusted_p == pytest.approx(3 * 2 / 184_756)

    def test_a_difference_that_is_shown_but_small_is_the_same(self) -> None:
        old = [0.01000 + 0.00001 * step for step in range(10)]
        new = [0.01020 + 0.00001 * step for step in range(10)]
        change = one(compare((make_record(trials=timed(old)),), (make_record(trials=timed(new)),)), "tpot_s")
        assert change.adjusted_p is not None
        assert change.adjusted_p < 0.05
        assert change.verdict == "same"
        assert "less than 5 % apart" in change.note

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            # 8 % apart: too little for likely.
            ([0.01000, 0.01001, 0.01002], [0.01080, 0.01081, 0.01082]),
            # 20 % apart and separated, but the gap (0.0003) is narrower than a side (0.0015).
            ([0.0100, 0.0105, 0.0115], [0.0118, 0.0126, 0.0130]),
            # 20 % apart and overlapping.
            ([0.0100, 0.0100, 0.0125], [0.0120, 0.0120, 0.0120]),
            # Two against three.
            ([0.0100, 0.0100], [0.0200, 0.0200, 0.0200]),
        ],
    )
    def test_few_trials_that_say_too_little_are_undecided(self, old: list[float], new: list[float]) -> None:
        change = one(compare((make_record(trials=timed(old)),), (make_record(trials=timed(new)),)), "tpot_s")
        assert change.verdict == "undecided"
        assert f"not decidable with so few trials ({len(old)} against 3 trials); 5 on each side can be" in change.note

    @pytest.mark.parametrize(
        ("new", "verdict"),
        [
            # Medians 0.0020 apart, sides 0.0015 and 0.0013 wide.
            ([0.0118, 0.0126, 0.0130, 0.0131, 0.0131], "likely_worse"),
            # One trial overlaps.
            ([0.0114, 0.0126, 0.0130, 0.0131, 0.0131], "undecided"),
            # A side that is 0.0082 wide.
            ([0.0118, 0.0126, 0.0130, 0.0131, 0.0200], "undecided"),
        ],
    )
    def test_from_five_trials_on_the_medians_must_be_as_far_apart_as_a_side_is_wide(
        self, new: list[float], verdict: str
    ) -> None:
        old = [0.0100, 0.0105, 0.0110, 0.0112, 0.0115]
        cells = [make_record(), make_streamed(), make_quantized()]
        changed = [
            [msgspec.structs.replace(cell, trials=timed(tpots)) for cell in cells]
            for tpots in ([0.01] * 5, [0.01] * 5)
        ]
        changed[0][0] = make_record(trials=timed(old))
        changed[1][0] = make_record(trials=timed(new))
        change = one(compare(*changed), "tpot_s")
        # 9 tests of at least 2 / 252 each, 0.071: Holm leaves it open.
        assert change.adjusted_p is not None
        assert change.adjusted_p >= 9 * 2 / 252 - 1e-12
        assert change.verdict == verdict

    def test_an_exposed_time_counts_by_its_share_of_tpot(self) -> None:
        def waiting(seconds: float) -> RunRecord:
            decode = make_phase(1_030_000, 7_800_000, exposed_transfer_s=seconds)
            return make_streamed(trials=(make_trial(0.015, decode=decode),) * 4)

        # 0.001 s to 0.01 s of 2.34 s of decode is ten times as much, and 0.4 % of TPOT.
        assert (
            one(compare((waiting(0.001),), (waiting(0.01),)), "exposed_s_per_token", "streamed").verdict == "undecided"
        )
        # 0.78 s to 1.56 s of 2.34 s: a third of TPOT.
        change = one(compare((waiting(0.78),), (waiting(1.56),)), "exposed_s_per_token", "streamed")
        assert change.verdict == "likely_worse"
        assert (change.baseline, change.candidate) == pytest.approx((0.005, 0.010))

    def test_5_percent_more_memory_is_worse_and_alone(self) -> None:
        decode = make_phase(1_030_000, 7_800_000, exposed_transfer_s=0.78, h2d_busy_s=0.9, d2h_busy_s=0.1)
        changes = {"decode": decode, "kv_cache_device_bytes": 32_768, "kv_cache_host_bytes": 32_768}
        more = make_trial(0.015, prefill=make_phase(1_092_000), **changes)
        after = self.with_streamed((more, make_timing(0.015), make_timing(0.015)))
        comparison = compare(self.before, after)
        assert raised(comparison) == {("streamed", "prefill_peak_bytes"): "worse"}
        assert one(comparison, "prefill_peak_bytes", "streamed").ratio == pytest.approx(1.05)
        assert raised(compare(after, self.before)) == {("streamed", "prefill_peak_bytes"): "better"}

    def test_a_byte_more_is_listed_and_no_verdict(self) -> None:
        old = (make_record(),)
        new = (make_record(trials=(make_trial(prefill=make_phase(1_040_001)), *make_record().trials[1:])),)
        change = one(compare(old, new), "prefill_peak_bytes")
        assert (change.verdict, change.baseline, change.candidate) == ("changed", 1_040_000, 1_040_001)
        # 1 % of 1,040,000 is 10,400.
        at_limit, beyond = (
            (make_record(trials=(make_trial(prefill=make_phase(1_040_000 + more)),)),) for more in (10_400, 10_401)
        )
        assert one(compare(old, at_limit), "prefill_peak_bytes").verdict == "changed"
        assert one(compare(old, beyond), "prefill_peak_bytes").verdict == "worse"

    def test_rss_varies_by_itself(self) -> None:
        old, near, far = (
            (make_record(trials=(make_trial(peak_host_rss_bytes=size),)),) for size in (1000, 1050, 1051)
        )
        assert one(compare(old, near), "peak_host_rss_bytes").verdict == "same"
        assert one(compare(old, far), "peak_host_rss_bytes").verdict == "worse"

    @pytest.mark.parametrize(
        ("field", "metric"),
        [
            ("kv_cache_host_bytes", "kv_host_bytes"),
            ("kv_cache_device_bytes", "kv_device_bytes"),
            ("pinned_requested_bytes", "pinned_requested_bytes"),
            ("pinned_allocated_bytes", "pinned_allocated_bytes"),
        ],
    )
    def test_bytes_of_the_cache_and_the_host(self, field: str, metric: str) -> None:
        old, new = ((make_record(trials=(make_trial(**{field: size}),)),) for size in (1000, 2000))
        change = one(compare(old, new), metric)
        assert (change.verdict, change.ratio, change.unit) == ("worse", 2.0, "bytes")

    @pytest.mark.parametrize("phase", ["prefill", "decode"])
    @pytest.mark.parametrize(
        ("field", "metric"),
        [
            ("h2d_bytes", "h2d_bytes"),
            ("d2h_bytes", "d2h_bytes"),
            ("peak_reserved_bytes", "reserved_bytes"),
            ("peak_device_used_bytes", "device_used_bytes"),
            ("peak_allocated_bytes", "peak_bytes"),
        ],
    )
    def test_bytes_by_phase(self, phase: str, field: str, metric: str) -> None:
        old, new = (
            (make_record(trials=(make_trial(**{phase: make_phase(**{"peak_bytes": None} | extra)}),)),)
            for extra in ({field: 1000}, {field: 2000})
        )
        assert raised(compare(old, new)) == {("dynamic", f"{phase}_{metric}"): "worse"}

    def test_one_pageable_copy_is_worse(self) -> None:
        old, new = (
            (make_record(trials=(make_trial(decode=make_phase(num_pageable_copies=count)),)),) for count in (0, 1)
        )
        assert one(compare(old, new), "num_pageable_copies").verdict == "worse"

    def test_a_cell_that_runs_out_of_memory(self) -> None:
        after = (make_record(), make_streamed(), make_failure("oom", QUANTIZED, message="no memory left"))
        comparison = compare(self.before, after)
        assert raised(comparison) == {("quantized-hqq-int4", "status"): "worse"}
        change = comparison.changes[0]
        assert (change.baseline, change.candidate) == ("ok", "oom")
        assert "no memory left" in change.note

    def test_a_cell_that_runs_now_is_better_and_two_failures_are_a_change(self) -> None:
        unsupported, oom = make_failure("unsupported", QUANTIZED), make_failure("oom", QUANTIZED)
        assert raised(compare((unsupported,), (make_quantized(),))) == {("quantized-hqq-int4", "status"): "better"}
        assert compare((unsupported,), (oom,)).changes[0].verdict == "changed"
        assert compare((oom,), (oom,)).changes == ()

    def test_cells_of_one_side_are_missing_or_new(self) -> None:
        comparison = compare((make_record(), make_streamed()), (make_record(), make_quantized()))
        assert raised(comparison) == {("streamed", "status"): "missing", ("quantized-hqq-int4", "status"): "new"}

    def test_one_position_whose_top_token_is_another(self) -> None:
        # 1 of 2 sessions * 157 positions.
        wrong = make_quantized(fidelity=make_fidelity(0.02, top1_agreement_ratio=313 / 314))
        right = make_quantized(fidelity=make_fidelity(0.02, top1_agreement_ratio=1.0))
        assert raised(compare((right,), (wrong,))) == {("quantized-hqq-int4", "top1_agreement_ratio"): "worse"}
        assert raised(compare((wrong,), (right,))) == {("quantized-hqq-int4", "top1_agreement_ratio"): "better"}

    @pytest.mark.parametrize(
        ("old", "new", "verdict"),
        [
            ((None, None), (None, 41), "worse"),
            ((None, 41), (None, None), "better"),
            # The earliest is the same; the other session diverges where it did not.
            ((30, None), (30, 50), "worse"),
            ((30, 50), (31, 40), "worse"),
            ((30, 50), (30, 51), "better"),
            ((30, 50), (30, 50), "same"),
        ],
    )
    def test_one_session_that_diverges_earlier(self, old: Any, new: Any, verdict: str) -> None:
        before, after = (
            (make_quantized(fidelity=make_fidelity(0.02, first_divergence_tokens=positions)),)
            for positions in (old, new)
        )
        assert one(compare(before, after), "first_divergence_tokens", "quantized-hqq-int4").verdict == verdict

    def test_output_that_is_no_longer_bit_equal(self) -> None:
        after = make_streamed(fidelity=make_fidelity(1e-7, bit_equal=False))
        assert raised(compare((make_streamed(),), (after,))) == {("streamed", "bit_equal"): "worse"}

    @pytest.mark.parametrize(
        ("old", "new", "verdict"),
        [
            (0.02, 0.0211, "worse"),
            (0.02, 0.0209, "changed"),
            # 50 % more, and less than 0.0001 nats.
            (0.0001, 0.00015, "changed"),
            (0.02, 0.0189, "better"),
        ],
    )
    def test_mean_kl_counts_beyond_5_percent_and_a_ten_thousandth(self, old: float, new: float, verdict: str) -> None:
        before, after = ((make_quantized(fidelity=make_fidelity(kl)),) for kl in (old, new))
        assert one(compare(before, after), "mean_kl_nats", "quantized-hqq-int4").verdict == verdict

    def test_a_figure_that_is_not_looked_at_any_more_is_missing(self) -> None:
        comparison = compare((make_quantized(),), (make_quantized(fidelity=None),))
        assert raised(comparison)["quantized-hqq-int4", "mean_kl_nats"] == "missing"

    def test_a_session_fewer_in_a_limit(self) -> None:
        before = (make_probe(20), make_oom(21), make_probe(20, role="verify"))
        after = (make_probe(19), make_oom(20), make_probe(19, role="verify"))
        change = one(compare(before, after), "limit_sessions")
        assert (change.baseline, change.candidate, change.verdict) == (20, 19, "worse")
        assert change.workload.startswith("limit p")
        assert one(compare(after, before), "limit_sessions").verdict == "better"
        assert raised(compare(before, before)) == {}
        assert compare(before, before).num_pairs == 1

    def test_a_limit_on_one_side_only(self) -> None:
        limit = (make_probe(20), make_oom(21))
        comparison = compare((make_record(), *limit), (make_record(),))
        assert raised(comparison) == {("dynamic", "status"): "missing"}

    def test_one_greedy_token_of_the_baseline_strategy(self) -> None:
        record = make_record()
        tokens = tuple(tuple(range(157)) for _ in range(2))
        other = (tokens[0], (*tokens[1][:100], 999, *tokens[1][101:]))
        sides = (
            side(record, tokens={record.run_id: tokens}),
            side(record, name="after", tokens={record.run_id: other}),
        )
        change = one(compare_runs(*sides), EQUAL_TOKENS)
        assert (change.baseline, change.candidate, change.verdict) == (314, 313, "worse")
        assert change.note == "first at position 100 of session 1, counted from 0"
        assert one(compare_runs(sides[0], sides[0]), EQUAL_TOKENS).verdict == "same"

    def test_another_models_tokens_are_no_verdict(self) -> None:
        old, new = make_record(), make_record(spec=make_spec(model_fingerprint="beefbeefbeefbeef"))
        before = side(old, tokens={old.run_id: ((1, 2),)})
        after = side(new, name="after", tokens={new.run_id: ((1, 3),)})
        assert one(compare_runs(before, after), EQUAL_TOKENS).verdict == "changed"


class TestNotes:
    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"contention": 1.51}, "other processes wanted the cores in the candidate"),
            ({"swap_in_bytes": 4096}, "swap was in use in the candidate: the time is the disk's"),
            ({}, ""),
        ],
    )
    def test_a_time_that_swap_or_busy_cores_are_in_is_undecided(self, changes: dict[str, Any], said: str) -> None:
        contention = changes.pop("contention", 1.5)
        slow = make_record(
            trials=timed([0.02, 0.02, 0.02], **changes), conditions=make_conditions(contention_ratio=contention)
        )
        comparison = compare((make_record(),), (slow,))
        change = one(comparison, "tpot_s")
        assert change.disturbance == said
        assert change.verdict == ("undecided" if said else "likely_worse")
        assert outcomes(comparison, gate(tpot_s=MetricLimit(worse_by=0))) == [
            ("tpot_s", "undecided" if said else "broken")
        ]

    def test_busy_cores_are_not_what_computes_on_a_device(self) -> None:
        slow = timed([0.02, 0.02, 0.02])
        before, after = (
            make_record(evidence="measured", conditions=make_conditions(contention_ratio=2.0), trials=trials)
            for trials in (timed([0.01, 0.01, 0.01]), slow)
        )
        assert one(compare((before,), (after,)), "tpot_s").verdict == "likely_worse"

    def test_prompts_of_a_workload_that_only_one_run_has_are_no_condition(self) -> None:
        other = make_record(spec=make_spec(workload=make_workload(name="large", batch_size=3)))
        assert compare((make_record(),), (make_record(), other)).conditions == ()

    def test_other_prompts_are_listed(self) -> None:
        other = make_record(spec=make_spec(prompt_fingerprint="beef"))
        (condition,) = compare((make_record(),), (other,)).conditions
        assert (condition.name, condition.candidate) == ("prompts of small", "beef")


class TestNoise:
    """Runs whose trials come from one distribution."""

    def noisy(self, seed: int, trials: int, sigma: float) -> tuple[RunRecord, ...]:
        rng = random.Random(seed)

        def near(value: float, relative: float) -> float:
            return value * rng.lognormvariate(0, relative)

        def trial(tpot_s: float, **changes: Any) -> TrialSample:
            phases = {
                phase: make_phase(
                    1_040_000,
                    7_800_000,
                    peak_reserved_bytes=round(near(1_200_000, 0.01)),
                    peak_device_used_bytes=round(near(2_000_000, 0.01)),
                    exposed_transfer_s=near(0.1, 0.1),
                )
                for phase in ("prefill", "decode")
            }
            memory = {"peak_host_rss_bytes": round(near(5e8, 0.01)), **phases}
            ttft_s, tpot = near(0.5, sigma), near(tpot_s, sigma)
            times = {"ttft_s": ttft_s, "e2e_latency_s": ttft_s + 156 * tpot}
            return make_trial(tpot, **times | memory | changes)

        return tuple(
            make_record(strategy, trials=tuple(trial(tpot_s) for _ in range(trials)), fidelity=make_fidelity())
            for strategy, tpot_s in ((DYNAMIC, 0.01), (STREAMED, 0.015), (QUANTIZED, 0.012))
        )

    @pytest.mark.parametrize(("trials", "sigma"), [(3, 0.02), (3, 0.03), (5, 0.03), (10, 0.05)])
    def test_20_pairs_of_equal_runs_raise_no_verdict(self, trials: int, sigma: float) -> None:
        for pair in range(20):
            before, after = (self.noisy(2 * pair + half, trials, sigma) for half in (0, 1))
            assert raised(compare(before, after)) == {}, f"pair {pair}"

    @pytest.mark.parametrize("trials", [3, 5, 10])
    def test_20_percent_slower_is_found_in_such_noise(self, trials: int) -> None:
        found = 0
        for pair in range(20):
            before, after = self.noisy(2 * pair, trials, 0.02), self.noisy(2 * pair + 1, trials, 0.02)
            slow = [
                msgspec.structs.replace(trial, e2e_latency_s=trial.ttft_s + 1.2 * (trial.e2e_latency_s - trial.ttft_s))
                for trial in after[1].trials
            ]
            comparison = compare(before, (after[0], msgspec.structs.replace(after[1], trials=tuple(slow)), after[2]))
            found += raised(comparison).get(("streamed", "tpot_s")) in ("worse", "likely_worse")
            assert {strategy for strategy, _ in raised(comparison)} <= {"streamed"}
        assert found >= 19


class TestPairs:
    def test_a_cell_with_other_options_under_the_same_name_is_another_cell(self) -> None:
        other = make_record(StreamedSpec(name="streamed", prefetch_layers=2))
        assert set(raised(compare((make_streamed(),), (other,))).values()) <= {"missing", "new"}
        assert compare((make_streamed(),), (other,)).num_pairs == 0

    @pytest.mark.parametrize(
        "change", [{"batch_size": 3}, {"prompt_tokens": 101}, {"output_tokens": 158}, {"prefill_chunk_tokens": 50}]
    )
    def test_other_work_under_the_same_name_is_another_cell(self, change: dict[str, int]) -> None:
        other = make_record(spec=make_spec(workload=make_workload(**change)))
        assert compare((make_record(),), (other,)).num_pairs == 0

    def test_another_attention_is_another_cell(self) -> None:
        eager = ModelSpec(source="tests/tiny", attn_implementation="eager")
        assert compare((make_record(),), (make_record(spec=make_spec(model=eager)),)).num_pairs == 0

    def test_a_share_found_for_auto_may_come_out_differently(self) -> None:
        asked = StreamedSpec(name="s", resident_share="auto")
        experiment = make_experiment(strategies=(DYNAMIC, asked))
        before, after = (
            side(make_record(StreamedSpec(name="s", resident_share=share)), name=name, experiment=experiment)
            for name, share in (("before", 0.5), ("after", 0.25))
        )
        comparison = compare_runs(before, after)
        assert comparison.num_pairs == 1
        change = one(comparison, "resident_share", "s")
        assert (change.baseline, change.candidate, change.verdict) == (0.5, 0.25, "changed")

    def test_probes_and_drills_are_no_cells(self) -> None:
        comparison = compare(
            (make_record(), make_probe(20), make_oom(21)), (make_record(), make_probe(20), make_oom(21))
        )
        assert comparison.num_pairs == 2


class TestMemoryParts:
    def test_a_changed_peak_is_taken_apart(self) -> None:
        """The cache's transients grow by 5,000 bytes and activations shrink by 1,000: 4,000 in all."""
        trace = make_trace()
        parts = {each.module: each for each in trace.prefill.contributors}
        kv, mlp = "model.layers.*.self_attn.kv_cache", "model.layers.*.mlp"
        moved = {
            kv: msgspec.structs.replace(parts[kv], bytes=parts[kv].bytes + 5_000),
            mlp: msgspec.structs.replace(parts[mlp], bytes=parts[mlp].bytes - 1_000),
        }
        prefill = msgspec.structs.replace(
            trace.prefill, peak_device_bytes=1_041_488, contributors=tuple((parts | moved).values())
        )
        after = (
            make_record(trials=(make_trial(prefill=make_phase(1_044_000)),)),
            make_traced(trace=msgspec.structs.replace(trace, prefill=prefill)),
        )
        comparison = compare((make_record(), make_traced()), after)
        (memory,) = comparison.memory
        assert (memory.phase, memory.baseline_bytes, memory.candidate_bytes) == ("prefill", 1_040_000, 1_044_000)
        assert [(part.part, part.baseline_bytes, part.candidate_bytes) for part in memory.parts] == [
            ("cache transients", 1_000, 6_000),
            ("activations", 17_688, 16_688),
        ]
        change = one(comparison, "traced_prefill_peak_bytes")
        assert (change.baseline, change.candidate, change.verdict) == (1_037_488, 1_041_488, "changed")

    def test_without_traces_weights_kv_and_all_else(self) -> None:
        facts = make_facts(weights_bytes=1_010_000)
        after = (make_record(model=facts, trials=(make_trial(prefill=make_phase(1_060_000)),)),)
        memory = compare((make_record(),), after).memory[0]
        # Prefill KV: 2 * 100 tokens * 64 bytes = 12,800 on both sides; 27,200 and 37,200 are left.
        assert [(part.part, part.baseline_bytes, part.candidate_bytes) for part in memory.parts] == [
            ("weights", 1_000_000, 1_010_000),
            ("all else", 27_200, 37_200),
        ]

    def test_the_allocator_alone(self) -> None:
        old, new = (
            (make_record(trials=(make_trial(prefill=make_phase(peak_reserved_bytes=size)),)),)
            for size in (1_200_000, 1_300_000)
        )
        (memory,) = compare(old, new).memory
        assert [(part.part, part.baseline_bytes, part.candidate_bytes) for part in memory.parts] == [
            ("allocator", 160_000, 260_000)
        ]


GPU = Accelerator(name="H200", uuid="GPU-1", memory_bytes=140 * 1024**3, driver="550")


class TestMismatch:
    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"machine": make_machine(cpu="Other CPU")}, "machine.cpu: Test CPU -> Other CPU"),
            ({"machine": make_machine(cpu_cores=4)}, "machine.cpu_cores"),
            ({"machine": make_machine(host_memory_bytes=16 * 1024**3)}, "host memory (bytes)"),
            ({"evidence": "measured"}, "evidence: emulated -> measured"),
            ({"model": make_facts(shape=make_shape(vocab_size=98))}, "model structure: vocab_size"),
            ({"spec": make_spec(model=ModelSpec(source="tests/tiny", dtype="float32"))}, "model.dtype"),
            ({"spec": make_spec(cpu=CpuSpec(link_bytes_per_s=1_000_000))}, "emulated device: cpu.link_bytes_per_s"),
        ],
    )
    def test_unlike_runs_are_refused_and_marked_when_allowed(self, changes: dict[str, Any], named: str) -> None:
        before, after = (make_record(),), (make_record(**changes),)
        with pytest.raises(InputError, match=r"not alike .*--allow-mismatch") as refusal:
            compare(before, after)
        assert named in str(refusal.value)
        comparison = compare(before, after, allow_mismatch=True)
        assert comparison.mismatches
        text = render_comparison(comparison)
        assert text.split("\n")[2].startswith("**Not alike")
        assert "Not alike" in printed(comparison)

    def test_every_table_of_unlike_runs_is_marked(self) -> None:
        before = (make_record(), make_quantized())
        trials = (make_trial(prefill=make_phase(2_000_000)),)
        machine = make_machine(cpu="Other CPU", versions={"torch": "2.14.0"})
        after = (make_record(trials=trials, machine=machine), make_failure("oom", QUANTIZED))
        comparison = compare(before, after, allow_mismatch=True)
        text = render_comparison(comparison, check_gate(comparison, gate(ttft_s=MetricLimit(at_most=1))))
        lines = text.splitlines()
        tables = [place for place, line in enumerate(lines) if line.startswith("| --")]
        # Gate, states, figures, times, memory, conditions: each two lines under the mark and a blank.
        assert len(tables) == 6
        assert all(lines[place - 3].startswith("**Not alike") for place in tables)

    def test_another_card_of_another_kind(self) -> None:
        spec = make_spec(device="cuda")
        h200 = make_record(spec=spec, evidence="measured", machine=make_machine(accelerator=GPU))
        h100 = make_record(
            spec=spec, evidence="measured", machine=make_machine(accelerator=msgspec.structs.replace(GPU, name="H100"))
        )
        twin = make_record(
            spec=spec,
            evidence="measured",
            machine=make_machine(accelerator=msgspec.structs.replace(GPU, uuid="GPU-2", driver="560")),
        )
        with pytest.raises(InputError, match=r"accelerator\.name: H200 -> H100"):
            compare((h200,), (h100,))
        names = [each.name for each in compare((h200,), (twin,)).conditions]
        assert names == ["accelerator.uuid", "accelerator.driver"]

    def test_a_run_of_two_machines_is_like_no_run(self) -> None:
        mixed = (make_record(), make_streamed(machine=make_machine(cpu="Other CPU")))
        with pytest.raises(InputError, match=r"machine\.cpu: Test CPU and Other CPU -> Test CPU and Other CPU"):
            compare(mixed, mixed)

    def test_versions_weights_and_budget_are_what_a_comparison_is_for(self) -> None:
        machine = make_machine(versions={"torch": "2.14.0", "transformers": "5.24.0"}, platform="Linux-6.2")
        spec = make_spec(model_fingerprint="beef", budget=make_budget(reserve_bytes=1))
        comparison = compare((make_record(),), (make_record(spec=spec, machine=machine),))
        assert comparison.num_pairs == 1
        changed = {each.name: (each.baseline, each.candidate) for each in comparison.conditions}
        assert changed == {
            "machine.platform": ("Linux-6.1-x86_64", "Linux-6.2"),
            "versions.torch": ("2.13.0", "2.14.0"),
            "model fingerprint": ("feedfacefeedface", "beef"),
            "budget.reserve_bytes": ("0", "1"),
        }

    def test_a_kernel_that_keeps_a_little_more_memory_is_the_same_machine(self) -> None:
        near = make_record(machine=make_machine(host_memory_bytes=8 * 1024**3 - 2**20))
        assert compare((make_record(),), (near,)).mismatches == ()

    def test_a_run_without_a_finished_cell_is_refused(self) -> None:
        with pytest.raises(InputError, match="after: no cell has finished"):
            compare((make_record(),), (make_traced(),))


def gate(**limits: MetricLimit) -> GateSpec:
    return GateSpec(limits=GateLimits(**limits))


def outcomes(comparison: RunComparison, spec: GateSpec) -> list[tuple[str, str]]:
    return [(line.metric, line.outcome) for line in check_gate(comparison, spec).lines]


class TestGate:
    def tpots(self, old: Sequence[float], new: Sequence[float]) -> RunComparison:
        return compare((make_record(trials=timed(old)),), (make_record(trials=timed(new)),))

    @pytest.mark.parametrize(
        ("new", "limit", "outcome"),
        [
            # Low end 0.0120 against high end 0.0102: 17.6 % and 1.8 ms more.
            ([0.0120, 0.0121, 0.0122], MetricLimit(worse_by_ratio=0.17), "broken"),
            ([0.0120, 0.0121, 0.0122], MetricLimit(worse_by_ratio=0.18), "kept"),
            ([0.0120, 0.0121, 0.0122], MetricLimit(worse_by=0.0017), "broken"),
            ([0.0120, 0.0121, 0.0122], MetricLimit(worse_by=0.0019), "kept"),
            # The median is 20 % up, and one trial is not.
            ([0.0101, 0.0121, 0.0122], MetricLimit(worse_by_ratio=0.05), "kept"),
            ([0.0080, 0.0081, 0.0082], MetricLimit(worse_by_ratio=0.0), "kept"),
            ([0.0120, 0.0121, 0.0122], MetricLimit(at_most=0.0119), "broken"),
            ([0.0120, 0.0121, 0.0122], MetricLimit(at_most=0.0121), "kept"),
            ([0.0120, 0.0121, 0.0122], MetricLimit(at_least=0.0123), "broken"),
            ([0.0120, 0.0121], MetricLimit(worse_by_ratio=0.0), "undecided"),
            ([0.0120, 0.0121], MetricLimit(at_most=0.001), "undecided"),
        ],
    )
    def test_a_time_is_past_its_limit_by_the_near_ends(
        self, new: list[float], limit: MetricLimit, outcome: str
    ) -> None:
        comparison = self.tpots([0.0100, 0.0101, 0.0102], new)
        assert outcomes(comparison, gate(tpot_s=limit)) == [("tpot_s", outcome)]

    def test_throughput_is_worse_where_it_falls(self) -> None:
        # (0.5 + 156 * 0.0102) / (0.5 + 156 * 0.0138) = 0.788: at most 78.8 % of the low end.
        comparison = self.tpots([0.0100, 0.0101, 0.0102], [0.0138, 0.0139, 0.0140])
        assert outcomes(comparison, gate(tokens_per_s=MetricLimit(worse_by_ratio=0.21))) == [
            ("tokens_per_s", "broken")
        ]
        assert outcomes(comparison, gate(tokens_per_s=MetricLimit(worse_by_ratio=0.22))) == [("tokens_per_s", "kept")]

    def test_bytes_are_past_their_limit_by_value(self) -> None:
        after = make_record(trials=(make_trial(prefill=make_phase(1_050_000)),))
        comparison = compare((make_record(),), (after,))
        for limit, outcome in (
            (MetricLimit(worse_by=9_999), "broken"),
            (MetricLimit(worse_by=10_000), "kept"),
            (MetricLimit(worse_by_ratio=0.009), "broken"),
            (MetricLimit(worse_by_ratio=10_000 / 1_040_000), "kept"),
            (MetricLimit(at_most=1_049_999), "broken"),
            (MetricLimit(at_most=1_050_000), "kept"),
        ):
            assert outcomes(comparison, gate(prefill_peak_bytes=limit)) == [("prefill_peak_bytes", outcome)]

    def test_every_part_of_a_limit_is_a_line(self) -> None:
        limit = MetricLimit(worse_by=1, at_most=2_000_000)
        assert outcomes(compare((make_record(),), (make_record(),)), gate(decode_peak_bytes=limit)) == [
            ("decode_peak_bytes", "kept"),
            ("decode_peak_bytes", "kept"),
        ]

    def test_bit_equality_and_divergence_are_numbers_of_a_gate(self) -> None:
        after = make_streamed(fidelity=make_fidelity(0.01, first_divergence_tokens=(None, 9)))
        comparison = compare((make_streamed(),), (after,))
        spec = gate(bit_equal=MetricLimit(worse_by=0), first_divergence_tokens=MetricLimit(at_least=10))
        assert set(outcomes(comparison, spec)) == {("bit_equal", "broken"), ("first_divergence_tokens", "broken")}
        same = compare((make_streamed(),), (make_streamed(),))
        spec = gate(first_divergence_tokens=MetricLimit(worse_by=0, at_least=10))
        assert {outcome for _, outcome in outcomes(same, spec)} == {"kept"}

    def test_a_strategys_own_limit_takes_the_place_of_the_general_one(self) -> None:
        after = [make_record(trials=(make_trial(prefill=make_phase(1_050_000)),)), make_streamed()]
        own = StrategyGate(strategy="dynamic", limits=GateLimits(prefill_peak_bytes=MetricLimit(worse_by=20_000)))
        spec = GateSpec(limits=GateLimits(prefill_peak_bytes=MetricLimit(worse_by=0)), strategies=(own,))
        result = check_gate(compare((make_record(), make_streamed()), after), spec)
        assert [(line.strategy, line.limit, line.outcome) for line in result.lines] == [
            ("dynamic", "at most 20000 bytes worse than the baseline", "kept"),
            ("streamed", "at most 0 bytes worse than the baseline", "kept"),
        ]

    @pytest.mark.parametrize(
        ("after", "words", "broken"),
        [
            (make_failure("oom", QUANTIZED), "ok -> oom", True),
            (make_failure("unsupported", QUANTIZED), "ok -> unsupported", True),
            (None, "ok -> missing", True),
        ],
    )
    def test_a_state_that_gets_worse_breaks_it_unless_allowed(
        self, after: RunRecord | None, words: str, broken: bool
    ) -> None:
        comparison = compare((make_record(), make_quantized()), [make_record(), *([after] if after else [])])
        assert bool(check_gate(comparison, GateSpec()).broken) is broken
        assert not check_gate(comparison, GateSpec(allow=(words,))).broken
        mine = StrategyGate(strategy="quantized-hqq-int4", allow=(words,))
        assert not check_gate(comparison, GateSpec(strategies=(mine,))).broken
        others = StrategyGate(strategy="dynamic", allow=(words,))
        assert check_gate(comparison, GateSpec(strategies=(others,))).broken

    def test_a_state_that_gets_better_and_a_new_cell_break_nothing(self) -> None:
        comparison = compare((make_failure("oom", QUANTIZED),), (make_quantized(), make_streamed()))
        assert outcomes(comparison, GateSpec()) == [("status", "kept"), ("status", "kept")]

    def test_a_figure_that_is_missing_breaks_its_limit(self) -> None:
        comparison = compare((make_quantized(),), (make_quantized(fidelity=None),))
        assert outcomes(comparison, gate(mean_kl_nats=MetricLimit(worse_by=1))) == [("mean_kl_nats", "broken")]

    def test_a_limit_without_any_figure_is_said_to_be_undecided(self) -> None:
        own = StrategyGate(strategy="streamed", limits=GateLimits(tpot_s=MetricLimit(at_most=1)))
        spec = GateSpec(limits=GateLimits(kv_host_bytes=MetricLimit(at_most=1)), strategies=(own,))
        record = make_record(trials=(make_trial(kv_cache_host_bytes=None),))
        lines = check_gate(compare((record,), (record,)), spec).lines
        assert [(line.strategy, line.metric, line.outcome) for line in lines] == [
            ("any strategy", "kv_host_bytes", "undecided"),
            ("streamed", "tpot_s", "undecided"),
        ]

    def test_a_gate_knows_every_metric_that_has_a_better_side(self) -> None:
        metrics = {metric.name for metric in (*VALUE_METRICS, *LIMIT_METRICS) if metric.lower_is_better is not None}
        metrics |= {metric.name for metric in (*TIMED_METRICS, *TRACED_PEAKS.values())} | {EQUAL_TOKENS}
        assert set(GateLimits.__struct_fields__) == metrics


class TestGateHeadline:
    @pytest.mark.parametrize(
        ("outcomes_", "said"),
        [
            (["undecided"], "The gate judged nothing: 0 broken, 1 undecided, 0 kept."),
            (["undecided", "kept"], "The gate is kept: 0 broken, 1 undecided, 1 kept."),
            (["broken", "kept"], "The gate is broken: 1 broken, 0 undecided, 1 kept."),
        ],
    )
    def test_a_gate_that_judged_nothing_is_not_called_kept(self, outcomes_: list[Any], said: str) -> None:
        fields = dict.fromkeys(("workload", "strategy", "metric", "limit", "message"), "x")
        assert gate_headline(GateResult(lines=tuple(GateLine(outcome=each, **fields) for each in outcomes_))) == said


class TestGateFile:
    def test_a_whole_gate(self, tmp_path: Path) -> None:
        file = tmp_path / "gate.yaml"
        file.write_text(
            "limits: {tpot_s: {worse_by_ratio: 0.1, at_most: 5e-2}}\n"
            "allow: [ok -> unsupported]\n"
            "strategies: [{strategy: streamed, limits: {tpot_s: {worse_by: 0.002}}, allow: [ok -> missing]}]\n"
        )
        limits = GateLimits(tpot_s=MetricLimit(worse_by_ratio=0.1, at_most=0.05))
        own = GateLimits(tpot_s=MetricLimit(worse_by=0.002))
        strategies = (StrategyGate(strategy="streamed", limits=own, allow=("ok -> missing",)),)
        assert load_gate(file) == GateSpec(limits=limits, allow=("ok -> unsupported",), strategies=strategies)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("limits: {tpot: {worse_by: 1}}", r"limits\.tpot: unknown key; allowed: ttft_s, .*did you mean 'tpot_s'"),
            ("limits: {tpot_s: {worse_by: -1}}", r"limits\.tpot_s\.worse_by: -1 .*allowed: a number >= 0"),
            ("limits: {tpot_s: {worse_by: fast}}", r"limits\.tpot_s\.worse_by: 'fast' \(text\) .*a number >= 0"),
            ("limits: {tpot_s: {}}", r"limits\.tpot_s: states no limit; allowed: at least one of worse_by_ratio"),
            ("limits: {tpot_s: {at_most: 1, at_least: 2}}", r"tpot_s\.at_least: 2 .*at most at_most = 1"),
            ("allow: [ok -> broken]", r"allow\[0\]: 'ok -> broken' is no change of state; allowed: ok -> oom, "),
            ("strategies: [{limits: {}}]", r"strategies\[0\]\.strategy: required, and missing"),
            ("strategies: [{strategy: a}, {strategy: a}]", r"strategies: the strategy 'a' is given 2 times"),
            ("strategies: [{strategy: a, allow: [x]}]", r"strategies\[0\]\.allow\[0\]: 'x' is no change of state"),
            ("[]", r"is \[\]; allowed: a mapping with limits, allow, strategies"),
            ("", r"is empty; allowed: a mapping"),
            ("limits: {tpot_s: .inf}", r"\.inf is not allowed; allowed: a finite number"),
        ],
    )
    def test_what_is_wrong_is_named_with_what_is_allowed(self, tmp_path: Path, text: str, said: str) -> None:
        file = tmp_path / "gate.yaml"
        file.write_text(text)
        with pytest.raises(InputError, match=said) as refusal:
            load_gate(file)
        assert str(refusal.value).startswith(f"{file}:")

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="cannot be read"):
            load_gate(tmp_path / "none.yaml")


def printed(comparison: RunComparison, width: int = 100) -> str:
    from rich.console import Console

    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(render_terminal_comparison(comparison))
    return console.export_text()


class TestText:
    def comparison(self) -> RunComparison:
        failed = make_failure("oom", QUANTIZED, message=HOSTILE)
        machine = make_machine(versions={"torch": HOSTILE}, platform=HOSTILE)
        slow = make_streamed(trials=timed([0.0181, 0.0182, 0.0180]), machine=machine)
        before = (make_record(), make_streamed(), make_quantized())
        return compare_runs(side(*before, name=HOSTILE), side(make_record(), slow, failed, name="after"))

    def test_the_verdict_comes_first_and_fits_100_columns(self) -> None:
        text = printed(self.comparison())
        lines = text.splitlines()
        assert lines[0].startswith("after is worse than a`b|c")
        assert max(map(len, lines)) <= 100
        assert "TPOT (ms)" in text
        assert "likely worse" in text

    def test_long_names_fold(self) -> None:
        long = "x" * 80
        spec = make_spec(workload=make_workload(name=long))
        after = make_record(spec=spec, trials=(make_trial(prefill=make_phase(2_000_000)),))
        text = printed(compare((make_record(spec=spec),), (after,)))
        assert max(map(len, text.splitlines())) <= 100
        assert "worse" in text

    def test_no_name_breaks_the_markdown(self) -> None:
        html = MarkdownIt("commonmark", {"html": True}).enable("table").render(render_comparison(self.comparison()))
        assert "<script" not in html
        assert 'javascript:y"' not in html
        assert all(mark not in html for mark in ("\x00", "\x1b", "\u202e"))
        rows = [row for row in html.split("<tr>") if "oom" in row]
        assert rows
        assert all(row.count("<td") in (0, 7) for row in rows)

    def test_more_verdicts_than_a_screen_holds_are_counted(self) -> None:
        cells = [make_spec(workload=make_workload(name=f"w{number}", batch_size=number)) for number in range(1, 46)]
        before = [make_record(spec=spec) for spec in cells]
        text = printed(compare(before, before[:1]))
        assert "and 4 more, in compare.md and in --json" in text
        assert " w42 " not in text
        assert "w45" in render_comparison(compare(before, before[:1]))

    def test_equal_runs_say_so(self) -> None:
        comparison = compare((make_record(),), (make_record(),))
        assert printed(comparison).startswith("Nothing got worse or better in after against before")
        text = render_comparison(comparison)
        assert "No verdict was raised." in text
        assert "Undecided times: 3 with too few trials, of which 5 on each side could decide." in text
        assert "not decidable with so few trials (3 against 3 trials)" in text

    def test_bytes_that_differ_never_read_the_same(self) -> None:
        after = (make_record(trials=(make_trial(prefill=make_phase(1_040_001)), *make_record().trials[1:])),)
        text = render_comparison(compare((make_record(),), after))
        row = next(line for line in text.splitlines() if "prefill peak allocated" in line)
        assert [cell.strip() for cell in row.split("|")[3:7]] == [
            "prefill peak allocated (B)",
            "1,040,000",
            "1,040,001",
            "1.000001x",
        ]

    def test_shares_that_differ_never_read_the_same(self) -> None:
        before, after = (
            (make_quantized(fidelity=make_fidelity(0.02, top1_agreement_ratio=x)),) for x in (1.0, 0.99999)
        )
        row = next(line for line in render_comparison(compare(before, after)).splitlines() if "| top-1" in line)
        assert [cell.strip() for cell in row.split("|")[4:7]] == ["1.000000", "0.9999900", "0.999990x"]

    def test_json_and_csv_have_every_change_in_si_units(self) -> None:
        comparison = self.comparison()
        document = json.loads(comparison_json(comparison))
        rows = list(csv.DictReader(comparison_csv(comparison).splitlines()))
        assert len(document["changes"]) == len(rows) == len(comparison.changes)
        (tpot,) = [
            each for each in document["changes"] if (each["metric"], each["strategy"]) == ("tpot_s", "streamed")
        ]
        assert tpot["baseline"] == pytest.approx(0.015)
        assert tpot["candidate"] == pytest.approx(0.0181)
        assert tpot["ratio"] == pytest.approx(0.0181 / 0.015)
        assert tpot["unit"] == "s"
        assert tpot["verdict"] == "likely_worse"
        assert {"p", "baseline_run_id", "candidate_run_id", "workload"} <= tpot.keys()

    def test_junit_parses_whatever_the_names_are(self) -> None:
        comparison = self.comparison()
        result = check_gate(comparison, gate(tpot_s=MetricLimit(worse_by=0), ttft_s=MetricLimit(at_most=0.001)))
        root = ElementTree.fromstring(gate_junit(comparison, result))
        cases = root.findall("./testsuite/testcase")
        assert len(cases) == len(result.lines) == int(root.attrib["tests"])
        failed = [case for case in cases if case.find("failure") is not None]
        assert gate_junit(comparison, result).startswith("<?xml version='1.0' encoding='utf-8'?>")
        assert len(failed) == len(result.broken) == int(root.attrib["failures"]) > 0
        messages = [case.find("failure").attrib["message"] for case in failed]  # type: ignore[union-attr]
        assert any("<script>alert(1)</script>" in message for message in messages)


def write_run(path: Path, *records: RunRecord) -> Path:
    with RunDirectory.create(path, make_experiment(), make_machine()) as directory:
        for record in records:
            directory.append(record)
    return path


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


class TestCommand:
    def test_it_imports_no_framework(self, runs: tuple[Path, Path]) -> None:
        code = (
            "import sys\nfrom offload_eval.cli.compare import compare_command\nfrom pathlib import Path\n"
            f"compare_command(baseline=Path({str(runs[0])!r}), candidate=Path({str(runs[1])!r}), out=None, gate=None, "
            "junit=None, allow_mismatch=False, json_output=False)\n"
            "print([name for name in ('torch', 'transformers', 'pandas') if name in sys.modules])"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout.splitlines()[-1] == "[]"

    @pytest.fixture
    def runs(self, tmp_path: Path) -> tuple[Path, Path]:
        before = write_run(tmp_path / "before", make_record(), make_quantized())
        worse = make_quantized(trials=(make_trial(0.012, prefill=make_phase(2_000_000)),) * 3)
        return before, write_run(tmp_path / "after", make_record(), worse)

    def test_a_worse_run_without_a_gate_is_no_failure(self, runs: tuple[Path, Path], tmp_path: Path) -> None:
        result = invoke(*runs, "--out", tmp_path / "out")
        assert result.exit_code == 0
        assert result.stdout.startswith("after is worse than before")
        endings = ("md", "html", "json", "csv")
        assert {file.name for file in (tmp_path / "out").iterdir()} == {f"compare.{ending}" for ending in endings}

    def test_json(self, runs: tuple[Path, Path]) -> None:
        document = json.loads(invoke(*runs, "--json").stdout)
        (peak,) = [
            each
            for each in document["changes"]
            if (each["metric"], each["strategy"]) == ("prefill_peak_bytes", "quantized-hqq-int4")
        ]
        assert (peak["baseline"], peak["candidate"], peak["verdict"]) == (1_038_000, 2_000_000, "worse")

    @pytest.mark.parametrize(("at_most", "code"), [(1_999_999, 1), (2_000_000, 0)])
    def test_a_gate_decides_the_exit_code(
        self, runs: tuple[Path, Path], tmp_path: Path, at_most: int, code: int
    ) -> None:
        gate_file, junit = tmp_path / "gate.yaml", tmp_path / "new" / "junit.xml"
        gate_file.write_text(f"limits: {{prefill_peak_bytes: {{at_most: {at_most}}}}}")
        result = invoke(*runs, "--gate", gate_file, "--junit", junit)
        assert result.exit_code == code
        assert ("broken: small / quantized-hqq-int4: prefill_peak_bytes" in result.stdout) is bool(code)
        assert int(ElementTree.parse(junit).getroot().attrib["failures"]) == code
        document = json.loads(invoke(*runs, "--gate", gate_file, "--json").stdout)
        assert document["gate"]["broken"] is bool(code)

    def test_bad_input_is_code_2(self, runs: tuple[Path, Path], tmp_path: Path) -> None:
        wrong = tmp_path / "gate.yaml"
        wrong.write_text("strategies: [{strategy: stremed}]")
        for arguments, said in (
            ((runs[0], tmp_path / "none"), "not a run directory"),
            ((*runs, "--junit", tmp_path / "x.xml"), "--junit needs --gate"),
            (
                (*runs, "--gate", wrong),
                "gate.yaml: strategies[0].strategy: 'stremed' is in neither run; allowed: dynamic",
            ),
            ((*runs, "--gate", tmp_path), "is not a file"),
        ):
            result = invoke(*arguments)
            assert result.exit_code == 2
            assert said in " ".join(result.stderr.split())

    def test_unlike_runs_are_code_2_unless_allowed(self, runs: tuple[Path, Path], tmp_path: Path) -> None:
        other = write_run(tmp_path / "other", make_record(machine=make_machine(cpu="Other CPU")))
        assert invoke(runs[0], other).exit_code == 2
        allowed = invoke(runs[0], other, "--allow-mismatch")
        assert allowed.exit_code == 0
        assert "Not alike" in allowed.stdout

    def test_a_file_that_cannot_be_written_is_code_3(self, runs: tuple[Path, Path], tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert invoke(*runs, "--out", tmp_path / "file" / "out").exit_code == 3

    def test_one_wrong_token_in_a_reference_file(self, tmp_path: Path) -> None:
        record = make_record()
        tokens = np.arange(314).reshape(2, 157)
        paths = [write_run(tmp_path / name, record) for name in ("before", "after")]
        for path, wrong in zip(paths, (0, 1), strict=True):
            (path / "reference").mkdir()
            tokens[1, 3] += wrong
            np.save(path / "reference" / f"{record.spec.reference_key}.tokens.npy", tokens)
        document = json.loads(invoke(*paths, "--json").stdout)
        (change,) = [each for each in document["changes"] if each["metric"] == EQUAL_TOKENS]
        assert (change["candidate"], change["verdict"]) == (313, "worse")

    def test_a_broken_reference_file_is_none(self, tmp_path: Path) -> None:
        record = make_record()
        path = write_run(tmp_path / "before", record)
        (path / "reference").mkdir()
        (path / "reference" / f"{record.spec.reference_key}.tokens.npy").write_bytes(b"\x93NUMPY torn")
        assert invoke(path, path).exit_code == 0
