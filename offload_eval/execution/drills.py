"""Brings failures about on purpose, by the means by which they come about: see `core.run_spec.Drill`.

A drill is one memory pass. Nothing raises in the strategy's place: an allocator refuses, a signal kills, a step never
ends.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, Final, NoReturn

import torch

from offload_eval.core.records import TrialSample
from offload_eval.core.run_spec import DRILLS, Drill
from offload_eval.errors import CellUnsupportedError
from offload_eval.execution import passes
from offload_eval.execution.passes import CellRun
from offload_eval.instruments.device import Device
from offload_eval.units import MIB

_INPUTS_OF_PROMPT: Final = 4
"""Mask, positions and copies of the tokens, as large as the prompt's tokens each: the model is to pass the cap."""
_LARGEST_SLACK_BYTES: Final = 32 * MIB
"""A segment of CUDA's allocator has 20 MiB at most, unless one request was larger."""
_LEAST_BLOCK_BYTES: Final = 512
_HANG_S: Final = 3600.0


def drill_of(run: CellRun) -> Drill | None:
    """The failure that a cell is to bring about; None where it is none of these."""
    return next((drill for drill in DRILLS if drill == run.spec.role), None)


def bring_about(run: CellRun, drill: Drill) -> NoReturn:
    """Runs a memory pass in which a failure comes about.

    Raises:
        torch.OutOfMemoryError: Of `oom_prefill` and `oom_decode`, from the device's allocator.
        MemoryError: Of `host_refused`.
        CellUnsupportedError: The strategy never needs what is refused.
        RuntimeError: The pass came to its end all the same.
    """
    with _MEANS[drill](run):
        trial = passes.measure_memory(run, TrialSample())
    if drill != "host_refused":
        raise RuntimeError(f"the drill {drill} brought no failure about: the pass came to its end")
    if trial.kv_cache_host_bytes:
        raise CellUnsupportedError(
            f"{run.spec.strategy.label} allocates on the host past the link: nothing refuses it"
        )
    raise CellUnsupportedError(f"{run.spec.strategy.label} allocates nothing on the host")


@contextmanager
def _full_in_prefill(run: CellRun) -> Iterator[None]:
    """Leaves room for the prompt's inputs and for nothing that the model computes."""
    room_bytes = _INPUTS_OF_PROMPT * run.prompt_BN.nbytes
    with _full(run.device, room_bytes):
        yield


@contextmanager
def _full_in_decode(run: CellRun) -> Iterator[None]:
    """Lets the prefill through; then the device is full at the first decode step, whose first allocation fails."""
    with ExitStack() as cap, _at_first_decode_step(run, lambda: cap.enter_context(_full(run.device, 0))):
        yield


@contextmanager
def _full(device: Device, room_bytes: int) -> Iterator[None]:
    """Caps the device at what is live and `room_bytes`."""
    live_bytes = device.live_bytes()
    if live_bytes is None:
        raise CellUnsupportedError(f"nothing counts the memory of {device.name}: it cannot be capped at what is live")
    with device.capped(live_bytes + room_bytes):
        slack = _fill_slack(device, room_bytes)
        yield
    del slack


def _fill_slack(device: Device, room_bytes: int) -> list[torch.Tensor]:
    """Takes what CUDA's allocator could still hand out under its cap: the rest of segments that it holds already.

    A cap is held against segments; a decode step of a small batch would fit into their remains.
    """
    slack: list[torch.Tensor] = []
    if device.name != "cuda":
        return slack
    size_bytes = _LARGEST_SLACK_BYTES
    while size_bytes >= _LEAST_BLOCK_BYTES:
        try:
            slack.append(torch.empty(size_bytes, dtype=torch.uint8, device=device.torch_device))
        except torch.OutOfMemoryError:
            size_bytes //= 2
    while slack and room_bytes > 0:
        room_bytes -= slack.pop().nbytes
    return slack


@contextmanager
def _host_refused(run: CellRun) -> Iterator[None]:
    """Lets the link's buffers have no byte of host memory."""
    with run.device.capped(None, 0):
        yield


@contextmanager
def _at_first_decode_step(run: CellRun, act: Callable[[], object]) -> Iterator[None]:
    """Acts when the inputs of the first decode step are there and nothing of it is computed: no logits are live.

    generate() asks the model for the inputs of each step; that call is not compiled where the step itself is.
    """
    prepare, pending = run.model.prepare_inputs_for_generation, [act]

    @wraps(prepare)  # generate() looks at its signature
    def prepare_and_act(*args: Any, **kwargs: Any) -> Any:
        inputs = prepare(*args, **kwargs)
        if pending and run.clock.phase == "decode":
            pending.pop()()
        return inputs

    run.model.prepare_inputs_for_generation = prepare_and_act
    try:
        yield
    finally:
        del run.model.prepare_inputs_for_generation


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    while True:
        time.sleep(_HANG_S)


_MEANS: Final[dict[Drill, Callable[[CellRun], AbstractContextManager[None]]]] = {
    "oom_prefill": _full_in_prefill,
    "oom_decode": _full_in_decode,
    "host_refused": _host_refused,
    "killed": lambda run: _at_first_decode_step(run, _kill_self),
    "hung": lambda run: _at_first_decode_step(run, _hang),
}
