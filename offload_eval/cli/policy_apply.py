"""`offload-eval policy apply`: a population under a policy, with the arithmetic."""

from pathlib import Path

import msgspec

from offload_eval.analysis.admission import ApplyOptions, apply_policy
from offload_eval.cli.console import print_json, result_console
from offload_eval.core.policy import AdmissionPolicy
from offload_eval.errors import ExitCode, InputError
from offload_eval.reporting.policy_text import render_answer
from offload_eval.store.origin import suggest
from offload_eval.store.policy_file import load_policy
from offload_eval.store.population_file import load_population
from offload_eval.units import GIB


def policy_apply_command(
    *,
    policy: Path,
    population: Path,
    labels: list[str],
    prefill_chunk_tokens: int | None,
    reserve_gib: float,
    extrapolate: bool,
    json_output: bool,
) -> int:
    """Prints what a policy answers for a population.

    Raises:
        InputError: A file is wrong, or a label is none of the policy's.
    """
    stored, groups = load_policy(policy), load_population(population)
    options = ApplyOptions(
        reserve_bytes=round(reserve_gib * GIB), prefill_chunk_tokens=prefill_chunk_tokens, extrapolate=extrapolate
    )
    answer = apply_policy(stored, groups, _labels(stored, labels), options)
    if json_output:
        print_json(msgspec.json.encode(answer).decode())
        return ExitCode.DONE
    console = result_console()
    for part in render_answer(answer):
        console.print(part, highlight=False)
    return ExitCode.DONE


def _labels(policy: AdmissionPolicy, asked: list[str]) -> list[str]:
    known = [strategy.label for strategy in policy.strategies]
    for label in asked:
        if label not in known:
            allowed = f"{', '.join(known)}{suggest(label, known)}"
            raise InputError(f"--strategy {label!r} is no strategy of {policy.name}; allowed: {allowed}")
    return asked or known
