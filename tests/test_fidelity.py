"""The comparison of logits, against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

from offload_eval.execution.fidelity import FidelityMeter

HALF = [0.0, 0.0]
QUARTER = [math.log(1 / 4), math.log(3 / 4)]


def meter(reference: list[list[list[float]]], tokens: list[list[int]]) -> FidelityMeter:
    return FidelityMeter(np.array(reference, dtype=np.float32), torch.tensor(tokens))


def test_equal_logits_cost_nothing():
    compared = meter([[HALF], [QUARTER]], [[0, 1]])
    for logits in (HALF, QUARTER):
        compared(torch.empty(0), torch.tensor([logits]))
    sample = compared.sample("baseline")
    assert sample.kl_nats == (0.0, 0.0)
    assert sample.bit_equal
    assert sample.top1_agreement_ratio == 1.0
    assert sample.first_divergence_tokens == (None,)
    assert sample.nll_change_nats == 0.0


def test_kl_and_nll_by_hand():
    """Baseline (1/2, 1/2), strategy (1/4, 3/4): KL = ln 2 - ln(3)/2; NLL of token 0 grows by ln 2."""
    compared = meter([[HALF]], [[0]])
    compared(torch.empty(0), torch.tensor([QUARTER]))
    sample = compared.sample("baseline")
    assert sample.kl_nats[0] == pytest.approx(math.log(2) - math.log(3) / 2, rel=1e-6)
    assert sample.nll_change_nats == pytest.approx(math.log(2), rel=1e-6)
    assert not sample.bit_equal
    assert sample.first_divergence_tokens == (0,), "token 1 is the strategy's most likely one"
    assert sample.baseline_top1_margin_nats == pytest.approx(0.0, abs=1e-6)


def test_a_shift_of_all_logits_changes_bits_and_nothing_else():
    compared = meter([[QUARTER]], [[1]])
    compared(torch.empty(0), torch.tensor([QUARTER]) + 2.0)
    sample = compared.sample("baseline")
    assert sample.kl_nats[0] == pytest.approx(0.0, abs=1e-6)
    assert not sample.bit_equal
    assert sample.first_divergence_tokens == (None,)


def test_mean_is_over_the_batch_and_max_over_everything():
    """Session 0 agrees, session 1 is off by KL = ln 2 - ln(3)/2 at position 1 alone."""
    compared = meter([[HALF, HALF], [HALF, HALF]], [[0, 0], [0, 0]])
    compared(torch.empty(0), torch.tensor([HALF, HALF]))
    compared(torch.empty(0), torch.tensor([HALF, QUARTER]))
    sample = compared.sample("baseline")
    kl = math.log(2) - math.log(3) / 2
    assert sample.kl_nats == pytest.approx((0.0, kl / 2), rel=1e-6)
    assert sample.max_kl_nats == pytest.approx(kl, rel=1e-6)
    assert sample.first_divergence_tokens == (None, 1)
    assert sample.top1_agreement_ratio == 0.75


def test_tokens_that_both_rule_out_add_nothing():
    """A padded vocabulary is masked with minus infinity: KL is over what is left."""
    masked = [*HALF, -math.inf]
    compared = meter([[masked]], [[0]])
    compared(torch.empty(0), torch.tensor([[*QUARTER, -math.inf]]))
    assert compared.sample("baseline").kl_nats[0] == pytest.approx(math.log(2) - math.log(3) / 2, rel=1e-6)


def test_logits_that_are_not_numbers_are_an_error_with_their_position():
    compared = meter([[HALF], [HALF]], [[0, 0]])
    compared(torch.empty(0), torch.tensor([HALF]))
    compared(torch.empty(0), torch.tensor([[float("nan"), 0.0]]))
    with pytest.raises(FloatingPointError, match="output position 1"):
        compared.sample("baseline")
