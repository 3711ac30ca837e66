"""How each column of a report is obtained, and how the report is made again."""

from collections.abc import Sequence
from typing import Final

from offload_eval.analysis.capacity import MEASURED_SESSIONS_ASSUMPTION
from offload_eval.analysis.statistics import CONFIDENCE
from offload_eval.core.experiment import Experiment
from offload_eval.core.records import RunRecord
from offload_eval.reporting.markdown import Verbatim, bullets, code, escape, fence, render_table
from offload_eval.reporting.sentences import EVIDENCE_WORDS

RUN: Final = "run"
"""Stands for the rungs of the records."""
METHODS: Final[tuple[tuple[str, str, str, str], ...]] = (
    (
        "analytic sessions",
        "analytic",
        "(device - weights - runtime - reserve - fixed KV) // KV device bytes per session",
        "An upper bound: see the assumptions of the analytic card.",
    ),
    (
        "measured sessions",
        f"{RUN}, extrapolated",
        "(device - weights - runtime - reserve) // ceil((max(prefill peak, decode peak) - weights) / batch_size)",
        MEASURED_SESSIONS_ASSUMPTION,
    ),
    (
        "prefill peak, decode peak",
        RUN,
        "peak_allocated_bytes",
        "Highest live device bytes of the phase, weights included; prefill ends when the first token is on the host.",
    ),
    (
        "KV device, KV host",
        RUN,
        "kv_cache_device_bytes, kv_cache_host_bytes",
        "Payload of the cache's tensors for the whole batch when generation ends, scales and zero points included.",
    ),
    ("TTFT", RUN, "median(ttft_s)", "From the call of generate() to the first token on the host."),
    (
        "TPOT",
        RUN,
        "median((e2e_latency_s - ttft_s) / (output_tokens - 1))",
        "The first token is not in it; one step serves the whole batch.",
    ),
    ("tokens/s", RUN, "median(batch_size * output_tokens / e2e_latency_s)", "Prefill is in it."),
    (
        "moved/token",
        RUN,
        "(decode h2d_bytes + decode d2h_bytes) / ((output_tokens - 1) * batch_size)",
        "Both directions, for each token of each session.",
    ),
    (
        "exposed/token",
        RUN,
        "decode exposed_transfer_s / (output_tokens - 1)",
        "Time of a step in which computation waited for copies; comparable with TPOT.",
    ),
    (
        "mean KL",
        RUN,
        "mean(KL(baseline || strategy))",
        "Over output positions, on the same tokens. In the baseline's row: the noise floor.",
    ),
    (
        "top-1",
        RUN,
        "top1_agreement_ratio",
        "Share of positions with the same most likely token; 1.0 is all. In the baseline's row: at the noise floor.",
    ),
)
"""Column, rung, formula, how to read it."""


def render_method(experiment: Experiment, records: Sequence[RunRecord]) -> str:
    """How every number came about: the passes, then each column with its rung and formula."""
    return "\n\n".join([bullets(_passes(experiment)), _columns(records)])


def render_evidence(records: Sequence[RunRecord]) -> str:
    """One line for each rung that the records stand on."""
    rungs = dict.fromkeys(record.evidence for record in records)
    return "\n\n".join(f"Evidence: {EVIDENCE_WORDS[rung]}." for rung in rungs)


def _columns(records: Sequence[RunRecord]) -> str:
    rungs = ", ".join(dict.fromkeys(record.evidence for record in records)) or "none yet"
    rows = [
        [column, rung.replace(RUN, rungs), Verbatim(f"{code(formula)}. {escape(how)}")]
        for column, rung, formula, how in METHODS
    ]
    return render_table(["column", "rung", "how"], rows, "lll")


def _passes(experiment: Experiment) -> list[str]:
    plan = experiment.measurement
    fidelity = "one fidelity pass" if plan.fidelity else "no fidelity pass"
    return [
        f"Passes are separate, each one full-length generate(): {plan.trials} for time with nothing else "
        f"attached, {plan.memory_trials} for memory, {plan.transfer_trials} for transfers, and {fidelity}. "
        "Memory and transfer columns come from the first trial that has them.",
        f"Warm-up: {plan.warmups} full-length runs before anything is timed, besides the fidelity pass, "
        "which warms up too.",
        f"Forced tokens: the greedy tokens of {experiment.baseline} are recorded once and given to every "
        "strategy, so that all do the same work and logits compare position by position. EOS is off and "
        "the count is checked.",
        "Noise floor: the baseline against itself, prefilled in chunks of "
        f"{plan.noise_floor_chunk_tokens} tokens (a shorter prompt in about halves).",
        "Interval: two order statistics that hold the true median with the stated coverage, at least "
        f"{CONFIDENCE:.0%}; below six trials there is none, and the range is minimum to maximum. ITL "
        "percentiles are nearest-rank, over all trials together.",
        "A dash is a number that does not exist: not measured, not defined, or not known. It is never zero.",
    ]


def render_reproduction(records: Sequence[RunRecord]) -> str:
    """The commands that run the experiment again and that report its records again."""
    commits = dict.fromkeys(record.machine.git_commit for record in records if record.machine.git_commit)
    at = bullets([Verbatim(f"Code at commit {code(commit)}.") for commit in commits])
    commands = (
        "# In this directory: the same cells again, into a new one\n"
        "offload-eval run experiment.yaml --out again\n"
        "# This report again, from the stored records\n"
        "offload-eval report ."
    )
    return "\n\n".join(block for block in (at, fence(commands)) if block)
