"""`make bench`: what the toolkit itself costs. Prints and writes bench.json: flat keys, each ratio with its spread.

tpot_overhead_ratio            TPOT of the timing pass over TPOT of a bare generate() with the same kind of cache,
                               interleaved in one process. Bare TPOT = (T(n) - T(1)) / (n - 1), T being whole calls.
cli_help_s                     wall of `offload-eval --help`, median of 11.
grid_wall_over_generate_ratio  wall of a run of 3 strategies x 4 workloads x 3 trials over the time it spent inside
                               generate(), all passes together. Goal 1.25.
plan_cells_per_s               cells of `plan` a second: 250 lengths x 1,000 batches x 4 strategies against both
                               ledgers, in one call on one core. Goal 500,000.
trace_405b_s                   wall of a trace of Llama-3.1-405B at 131,072 tokens in its process, imports apart.
                               Goal 5.
trace_405b_rss_bytes           that process's peak resident set. Goal 1.5 GiB.
streamed_over_bound            streamed TPOT over max(compute, transfer) on the cpu device, its link paced so that
                               transfer takes 0.5, 1 and 4 times as long as compute. Goal 1.10 each.
exposed_share_by_resident_share  part of a step in which computing waits for copies, at 4, by resident share.
offloaded_over_streamed_bytes  of a traced step of Llama-3.1-8B at 32,768 tokens. Goal 1.99.
offloaded_over_streamed_tpot   on CUDA only, by prompt tokens: upstream's offloading over streamed.
capacity_probes_max            batches tried for one limit, the most over 24: SmolLM2-135M and a sliding-window model,
                               3 strategies at 4 combinations of lengths each, of 1 to 4,096. Goal 6.
report_10k_records_s           wall of `offload-eval report` of 10,000 records: a tiny run, under many names. Goal 15.
report_10k_over_1k             that over the same on 1,000 records: 10 is in proportion, less what a start takes.
plan_cli_s                     wall of `offload-eval plan` for one model, median of 11. Goal 0.5.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from bench_streamed import bench_streamed
from synthetic_run import write_synthetic_run

from offload_eval.analysis.statistics import summarize
from offload_eval.bounds.cached_layers import Lengths
from offload_eval.bounds.plan_cells import plan_grids
from offload_eval.cli.option_types import Typed
from offload_eval.cli.plan_inputs import plan_request
from offload_eval.core.experiment import DynamicSpec, ModelSpec
from offload_eval.execution.fidelity import ForcedTokens
from offload_eval.execution.model_loading import load_model
from offload_eval.generation import TokenClock, generate
from offload_eval.instruments.cpu import CpuDevice
from offload_eval.instruments.environment import read_machine
from offload_eval.strategies.dynamic import Dynamic
from offload_eval.strategies.upstream import cache_argument

MODEL = Path("models/SmolLM2-135M-Instruct")
CLI = [sys.executable, "-m", "offload_eval"]
PROMPT_TOKENS, OUTPUT_TOKENS, PAIRS = 64, 64, 15
GRIDS = 3

GRID = """
name: grid
model: {{source: {model}, dtype: bfloat16}}
device: cpu
budget: {{device_bytes: 512 MiB}}
workloads:
  - {{prompt_tokens: 128, output_tokens: 16}}
  - {{prompt_tokens: 128, output_tokens: 32}}
  - {{prompt_tokens: 256, output_tokens: 16}}
  - {{prompt_tokens: 256, output_tokens: 32}}
strategies:
  - kind: dynamic
  - kind: streamed
  - {{kind: quantized, backend: fp8}}
measurement: {{trials: 3}}
"""


def with_spread(key: str, samples: Sequence[float]) -> dict[str, Any]:
    """The median under `key`, and the range that holds the true one beside it."""
    interval = summarize(samples)
    assert interval is not None
    return {
        key: interval.median,
        f"{key}_low": interval.low,
        f"{key}_high": interval.high,
        f"{key}_samples": interval.samples,
        f"{key}_confidence": interval.confidence,
    }


def bench_tpot_overhead() -> dict[str, Any]:
    torch.set_num_threads(1)
    model = load_model(ModelSpec(source=str(MODEL)), torch.device("cpu"))
    prompt = torch.arange(PROMPT_TOKENS)[None] * 7 + 11
    forced = generate(model, prompt, None, OUTPUT_TOKENS, TokenClock())

    def bare_s(output_tokens: int) -> float:
        with CpuDevice().open_link(timed=False) as link:
            cache = Dynamic(DynamicSpec()).build_cache(model.config, link, PROMPT_TOKENS + output_tokens)
            started = time.perf_counter()
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=output_tokens,
                do_sample=False,
                **{cache_argument(model): cache},
            )
            return time.perf_counter() - started

    def bare_tpot_s() -> float:
        return (bare_s(OUTPUT_TOKENS) - bare_s(1)) / (OUTPUT_TOKENS - 1)

    def timed_tpot_s() -> float:
        clock = TokenClock()
        with CpuDevice().open_link(timed=False) as link:
            cache = Dynamic(DynamicSpec()).build_cache(model.config, link, PROMPT_TOKENS + OUTPUT_TOKENS)
            generate(model, prompt, cache, OUTPUT_TOKENS, clock, [ForcedTokens(forced)])
        return (clock.e2e_latency_s - clock.ttft_s) / (OUTPUT_TOKENS - 1)

    return with_spread("tpot_overhead_ratio", interleaved_ratios(timed_tpot_s, bare_tpot_s))


def interleaved_ratios(above: Callable[[], float], below: Callable[[], float]) -> list[float]:
    """Ratios of neighbouring measurements, in ABBA order, so that a drift of the machine cancels."""
    ratios = []
    for pair in range(PAIRS):
        if pair % 2:
            denominator = below()
            ratios.append(above() / denominator)
        else:
            numerator = above()
            ratios.append(numerator / below())
    return ratios


def bench_help() -> dict[str, Any]:
    def help_s() -> float:
        started = time.perf_counter()
        subprocess.run([*CLI, "--help"], check=True, capture_output=True)
        return time.perf_counter() - started

    return with_spread("cli_help_s", [help_s() for _ in range(11)])


def bench_plan() -> dict[str, Any]:
    counts = {"prompt_tokens": "1", "output_tokens": None, "batch_size": None}
    strategies = ["paged,dynamic,offloaded,streamed"]
    budget = {"vram_gib": 80.0, "host_gib": 500.0}
    request = plan_request(
        Typed(experiment=None, model="gemma-3-27b", counts=counts, strategies=strategies, options=budget)
    )
    prompt_tokens = np.linspace(64, 130_000, 250).astype(np.int64)[:, None]
    lengths = Lengths(prompt_tokens=prompt_tokens, output_tokens=np.full_like(prompt_tokens, 512))
    batch_sizes = np.arange(1, 1001)[None, :]

    def cells_per_s() -> float:
        started = time.perf_counter()
        grids = plan_grids(request, lengths, batch_sizes)
        wall_s = time.perf_counter() - started
        num_cells = sum(grid.batch_device_bytes.size for _, grid in grids if not isinstance(grid, str))
        assert num_cells == 1_000_000
        return num_cells / wall_s

    def cli_s() -> float:
        started = time.perf_counter()
        subprocess.run(
            [*CLI, "plan", "--model", "llama-3.1-8b", "--prompt-tokens", "8192"], check=True, capture_output=True
        )
        return time.perf_counter() - started

    return with_spread("plan_cells_per_s", [cells_per_s() for _ in range(11)]) | with_spread(
        "plan_cli_s", [cli_s() for _ in range(11)]
    )


def bench_grid() -> dict[str, Any]:
    grids = [run_grid() for _ in range(GRIDS)]
    results = with_spread("grid_wall_over_generate_ratio", [wall_s / generate_s for wall_s, generate_s, _ in grids])
    results["grid_wall_s"], results["grid_generate_s"], _ = grids[-1]
    return results | {"grid_contention_ratio_max": max(contention for *_, contention in grids)}


def run_grid() -> tuple[float, float, float]:
    """Wall of one run, its time inside generate(), and the highest contention a worker met."""
    with tempfile.TemporaryDirectory() as scratch:
        experiment, out = Path(scratch) / "grid.yaml", Path(scratch) / "out"
        experiment.write_text(GRID.format(model=MODEL.resolve()))
        started = time.perf_counter()
        subprocess.run([*CLI, "run", str(experiment), "--out", str(out)], check=True, capture_output=True)
        wall_s = time.perf_counter() - started
        records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    conditions = [record["conditions"] for record in records if record["evidence"] != "traced"]
    assert len(conditions) == 12
    return (
        wall_s,
        sum(condition["generate_s"] for condition in conditions),
        max(condition["contention_ratio"] for condition in conditions),
    )


TRACE_405B = """
import json, resource, time
import torch
torch.set_num_threads(1)
from offload_eval.core.experiment import DynamicSpec, ModelSpec, Workload
from offload_eval.execution.model_loading import build_traceable, load_config
from offload_eval.store.model_config import load_model_config
from offload_eval.tracing.trace import trace_strategy
config = str(load_model_config("llama-3.1-405b").origin)
spec = ModelSpec(config=config, weights="random", attn_implementation="flash_attention_2")
started = time.perf_counter()
model = build_traceable(spec, load_config(spec))
trace_strategy(model, DynamicSpec(), Workload(prompt_tokens=130_815, output_tokens=257))
wall_s = time.perf_counter() - started
print(json.dumps([wall_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


def bench_trace() -> dict[str, Any]:
    def measured() -> tuple[float, float]:
        result = subprocess.run([sys.executable, "-c", TRACE_405B], check=True, capture_output=True, text=True)
        wall_s, rss_bytes = json.loads(result.stdout.splitlines()[-1])
        return wall_s, rss_bytes

    samples = [measured() for _ in range(5)]
    return with_spread("trace_405b_s", [wall_s for wall_s, _ in samples]) | with_spread(
        "trace_405b_rss_bytes", [rss_bytes for _, rss_bytes in samples]
    )


def bench_capacity() -> dict[str, Any]:
    """Searches for the limits alone: nothing is timed, no failure brought about."""
    started = time.perf_counter()
    limits = [limit for config in ("capacity", "capacity_sliding") for limit in search_limits(config)]
    assert len(limits) == 24
    return {
        "capacity_probes_max": max(limit["probes"] for limit in limits),
        "capacity_limits_exact": sum(limit["is_exact"] for limit in limits),
        "capacity_limits_as_traced": sum(limit["measured"] == limit["traced"] for limit in limits),
        "capacity_wall_s": time.perf_counter() - started,
    }


def search_limits(config: str) -> list[dict[str, Any]]:
    plain = ("capacity.drills=false", "capacity.timing_trials=0", "capacity.tpot_limit_s=null", "device=cpu")
    sets = [word for each in plain for word in ("--set", each)]
    with tempfile.TemporaryDirectory() as scratch:
        command = [*CLI, "capacity", f"configs/{config}.yaml", "--out", f"{scratch}/out", "--json", *sets]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    limits: list[dict[str, Any]] = json.loads(done.stdout)["limits"]
    return limits


def bench_report() -> dict[str, Any]:
    """A real run of a tiny model, its records multiplied under other names, and the report of them."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        command = [*CLI, "run", "configs/tiny_offload.yaml", "--out", str(folder / "tiny")]
        subprocess.run(command, check=True, capture_output=True)

        def report_s(num_records: int) -> float:
            out = folder / str(num_records)
            if not out.exists():
                assert write_synthetic_run(folder / "tiny", out, num_records) >= num_records
            started = time.perf_counter()
            subprocess.run([*CLI, "report", str(out)], check=True, capture_output=True)
            return time.perf_counter() - started

        many, few = [report_s(10_000) for _ in range(3)], [report_s(1_000) for _ in range(3)]
    return with_spread("report_10k_records_s", many) | {
        "report_10k_over_1k": statistics.median(many) / statistics.median(few)
    }


BENCHES = {
    "report": bench_report,
    "help": bench_help,
    "trace": bench_trace,
    "plan": bench_plan,
    "capacity": bench_capacity,
    "streamed": bench_streamed,
    "tpot": bench_tpot_overhead,
    "grid": bench_grid,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(BENCHES), action="append", help="run this one alone; repeatable")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name in arguments.only or BENCHES:
        results |= BENCHES[name]()
        print(json.dumps(results, indent=2), file=sys.stderr)
    machine = msgspec.to_builtins(read_machine(with_accelerator=torch.cuda.is_available()))
    results |= {f"machine_{key}": value for key, value in machine.items() if not isinstance(value, dict)}
    results |= {f"version_{name}": version for name, version in machine["versions"].items()}
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
