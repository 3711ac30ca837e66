"""One short generation, to see after a failure whether a worker still computes what it did before.

It is not capped and not forced: its tokens are the strategy's own, and with its logits they are hashed, so that equal
digests mean equal bits. Nothing is kept of it.
"""

import hashlib
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from transformers import LogitsProcessor

from offload_eval.core.experiment import Workload
from offload_eval.core.run_spec import RunSpec
from offload_eval.errors import CellUnsupportedError
from offload_eval.execution.cell import as_asked
from offload_eval.execution.messages import CheckDone
from offload_eval.execution.passes import CellRun
from offload_eval.execution.reference import ReferenceFiles
from offload_eval.generation import TokenClock
from offload_eval.instruments.device import Device
from offload_eval.strategies.registry import load_strategy

CHECK_PROMPT_TOKENS: Final = 32
CHECK_OUTPUT_TOKENS: Final = 8


class LogitsDigest(LogitsProcessor):
    """Hashes every step's logits as they come."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Takes float32 `[batch, vocab]` and passes it on."""
        self._digest.update(scores.cpu().numpy().tobytes())
        return scores

    def hexdigest(self) -> str:
        """Of all steps so far."""
        return self._digest.hexdigest()


def check_workload(workload: Workload) -> Workload:
    """One session with the beginning of the prompt, prefilled at once unless its chunks are shorter than that."""
    prompt_tokens = min(CHECK_PROMPT_TOKENS, workload.prompt_tokens)
    chunk_tokens = workload.prefill_chunk_tokens
    return msgspec.structs.replace(
        workload,
        batch_size=1,
        prompt_tokens=prompt_tokens,
        output_tokens=min(CHECK_OUTPUT_TOKENS, workload.output_tokens),  # never past the context
        prefill_chunk_tokens=None if chunk_tokens is None or chunk_tokens >= prompt_tokens else chunk_tokens,
    )


def check_generation(spec: RunSpec, model: Any, device: Device, reference_dir: Path) -> CheckDone:
    """Generates briefly under a cell's strategy. Never raises: what goes wrong is the answer's message.

    Args:
        spec: The cell whose strategy, attention and prompt are used.
        model: The loaded model.
        device: Where it runs.
        reference_dir: Where prompts are.
    """
    started = time.perf_counter()
    try:
        tokens_digest, logits_digest = _digests(spec, model, device, reference_dir)
        done = CheckDone(tokens_digest, logits_digest, time.perf_counter() - started)
    except Exception as error:  # whatever upstream raises: the session is to hear of it, and the worker to go on
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"[:1000]
        done = CheckDone(None, None, time.perf_counter() - started, message)
    try:
        device.release()
    except Exception as error:  # a device that is lost says so here once more
        message = done.message or f"{type(error).__name__}: {' '.join(str(error).split())}"[:1000]
        done = CheckDone(None, None, done.seconds, message)
    return done


def _digests(spec: RunSpec, model: Any, device: Device, reference_dir: Path) -> tuple[str, str]:
    logits = LogitsDigest()
    with ExitStack() as open_:
        open_.enter_context(as_asked(spec, model))
        run = _short_run(spec, model, device, reference_dir)
        link = open_.enter_context(device.open_link(timed=False))
        tokens_BN, _ = run.generate(link, TokenClock(), [logits])
        return hashlib.sha256(tokens_BN.cpu().numpy().tobytes()).hexdigest(), logits.hexdigest()


def _short_run(spec: RunSpec, model: Any, device: Device, reference_dir: Path) -> CellRun:
    workload = check_workload(spec.workload)
    strategy = load_strategy(spec.strategy)
    if (refusal := strategy.refusal(device.name, model.config, workload)) is not None:
        raise CellUnsupportedError(refusal)
    strategy.prepare(device.name)
    files = ReferenceFiles(reference_dir, spec.reference_key)  # the cell's own: the short prompt has no file
    prompt_BN = torch.from_numpy(files.load_prompt()[:1, : workload.prompt_tokens]).to(device.torch_device)
    device.adopt([prompt_BN])
    return CellRun(
        model=model,
        device=device,
        strategy=strategy,
        spec=msgspec.structs.replace(spec, workload=workload),
        prompt_BN=prompt_BN,
        tokens_BN=None,
        files=files,
    )
