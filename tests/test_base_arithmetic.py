"""The base arithmetic, against figures worked out by hand."""

import pytest

import offload_eval
from offload_eval import admission_limit, kv_bytes

MIB, GIB = 1024**2, 1024**3


def test_base_example_is_512_mib():
    assert kv_bytes(4096, 32, 8, 128) == 512 * MIB


def test_published_figures_a_token():
    """GPT-2 XL: 300 KiB; Llama-3.1 8B, 70B, 405B: 128, 320, 504 KiB a token in 16 bit."""
    assert kv_bytes(1, 48, 25, 64) == 300 * 1024
    assert [kv_bytes(1, layers, 8, 128) for layers in (32, 80, 126)] == [128 * 1024, 320 * 1024, 504 * 1024]


def test_doubling_the_tokens_doubles_the_bytes():
    assert kv_bytes(8192, 32, 8, 128) == 2 * kv_bytes(4096, 32, 8, 128)


def test_bytes_per_value_scales():
    assert kv_bytes(3, 5, 7, 11, bytes_per_value=4) == 2 * 3 * 5 * 7 * 11 * 4


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("bad", [True, 1.0, 0, -1, "2", None])
def test_kv_bytes_refuses_what_is_not_a_positive_int(position: int, bad: object):
    arguments: list[object] = [4096, 32, 8, 128, 2]
    arguments[position] = bad
    with pytest.raises(ValueError, match="allowed: an int of at least 1"):
        kv_bytes(*arguments)  # type: ignore[arg-type]


def test_base_example_admits_12_sessions():
    assert admission_limit(24 * GIB, 12 * GIB, 3 * GIB, 3 * GIB, 512 * MIB) == 12


def test_twice_the_tokens_admit_half_the_sessions():
    assert admission_limit(24 * GIB, 12 * GIB, 3 * GIB, 3 * GIB, kv_bytes(8192, 32, 8, 128)) == 6


def test_a_budget_that_is_spent_admits_none():
    assert admission_limit(10, 8, 2, 5, 1) == 0
    assert admission_limit(0, 0, 0, 0, 1) == 0


@pytest.mark.parametrize("bad", [True, 1.0, -1, None])
@pytest.mark.parametrize("position", range(4))
def test_admission_limit_refuses_bad_parts(position: int, bad: object):
    arguments: list[object] = [24, 12, 3, 3, 1]
    arguments[position] = bad
    with pytest.raises(ValueError, match="allowed: an int of at least 0"):
        admission_limit(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [True, 1.0, 0, -1, None])
def test_admission_limit_refuses_a_session_without_bytes(bad: object):
    with pytest.raises(ValueError, match="per_session"):
        admission_limit(24, 12, 3, 3, bad)  # type: ignore[arg-type]


def test_both_are_public():
    assert set(offload_eval.__all__) >= {"kv_bytes", "admission_limit"}
