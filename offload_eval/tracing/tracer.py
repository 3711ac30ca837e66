"""Follows every operator of a run without data: what it allocates, copies, computes and touches."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload_eval.core.trace import KV_CACHE, PhaseTrace
from offload_eval.errors import UnableError
from offload_eval.tracing.known_values import assume_ones, follow, scalar
from offload_eval.tracing.ledger import PROMPT, Label, TracedMemory
from offload_eval.tracing.link import CopyAccount
from offload_eval.tracing.repeats import Repeats, tensors_in
from offload_eval.tracing.work import WorkAccount

GENERATE: Final = "generate"
"""Stands for the module where no module of the model runs."""
_ATEN: Final = torch.ops.aten
_PRIM: Final = torch.ops.prim
_ASKS_FOR_A_VALUE: Final = (_ATEN._local_scalar_dense.default, _ATEN.is_nonzero.default, _ATEN.item.default)
_NEEDS_DATA: Final = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    NotImplementedError,
)
_MIXES_TIERS: Final = getattr(fake_tensor, "FakeTensorDeviceMismatchError", ())
"""Older torch has no class for it."""
_WORDS_FOR_NO_DATA: Final = ("meta tensor", "meta device", "unallocated storage", "not supported for tensor subclass")
"""How torch says, in errors of no class of their own, that it looked for data."""


class UntraceableError(UnableError):
    """An operator needs data that a run without data does not have; the message names it."""


class Tracer(TorchDispatchMode):
    """Sees every operator first, runs it without data, and accounts for it.

    Args:
        memory: The tiers that results are entered into.
        account: Where copies between the tiers are counted that the model's forward makes. What generate() copies
            around it, such as tokens to the host, is not the strategy's.
        repeats: Results seen in earlier runs.
        work: Where computing and traffic are counted.
    """

    def __init__(self, memory: TracedMemory, account: CopyAccount, repeats: Repeats, work: WorkAccount) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped upstream
        self.memory = memory
        self.account = account
        self.forwards: list[dict[str, int]] = []
        """What had been counted in the phase at each call of the model's forward."""
        self._repeats = repeats
        self._work = work
        self._modules: list[str] = []
        self._outside = PROMPT
        self._answers: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operator without data and accounts for it."""
        if func is _PRIM.device.default:
            return args[0].fake_device
        if any(map(_is_wrapper, types)):
            return NotImplemented  # a wrapper's inner operators come here one by one
        kwargs = kwargs or {}
        if func in _ASKS_FOR_A_VALUE:
            return self._value(func, args[0])
        result = self._run(func, args, kwargs)
        inputs = tensors_in(args, kwargs)
        outputs = [result] if isinstance(result, torch.Tensor) else _tensors(result)
        if func is _ATEN.argmax.default and not self._modules:
            assume_ones(result)  # the next tokens
        else:
            follow(func, args, kwargs, inputs, outputs)
        self.memory.device.label = Label(self._module, func._schema.name.removeprefix("aten::"))
        for output in outputs:
            self.memory.enter(output)
        if not self._count_copy(func, args, outputs):
            self._work.add(func, args, kwargs, result, inputs, outputs)
        return result

    @contextmanager
    def naming(self, model: torch.nn.Module) -> Iterator[None]:
        """Knows which module runs, while the context is open."""
        names = {id(module): name or type(model).__name__ for name, module in model.named_modules()}

        def enter(module: torch.nn.Module, _args: Any) -> None:
            if not self._modules:
                self._outside = GENERATE
                self._work.start_forward()
                self.forwards.append(self._counts())
            self._modules.append(names.get(id(module), type(module).__name__))

        def leave(_module: torch.nn.Module, _args: Any, _result: Any) -> None:
            self._modules.pop()

        hooks = torch.nn.modules.module
        handles = (hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._modules.clear()

    @contextmanager
    def in_cache(self) -> Iterator[None]:
        """Names the cache of the module that runs, while the context is open."""
        self._modules.append(f"{self._module}.{KV_CACHE}")
        try:
            yield
        finally:
            self._modules.pop()

    @contextmanager
    def answering(self, *answers: bool) -> Iterator[None]:
        """Answers questions about values that are not known, in order, while the context is open."""
        self._answers = list(answers)
        try:
            yield
        finally:
            self._answers = []

    def start(self) -> None:
        """Starts a run of generate(): nothing that was counted before belongs to it."""
        self._outside = PROMPT
        self.take_phase()

    def take_phase(self) -> PhaseTrace:
        """Sums up what has happened since the last call, and starts the next phase."""
        device, host = self.memory.device, self.memory.host
        phase = PhaseTrace(
            live_device_bytes=device.live_bytes,
            peak_device_bytes=device.peak_bytes,
            live_host_bytes=host.live_bytes,
            peak_host_bytes=host.peak_bytes,
            **self._counts(),
            contributors=device.contributors(),
            timeline_bytes=device.timeline_bytes(),
        )
        device.restart_peak()
        host.restart_peak()
        self.account.restart()
        self._work.restart()
        self.forwards.clear()
        return phase

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device") or self.memory.torch_device
        crosses = func is _ATEN._to_copy.default and device.type != args[0].device.type
        if not crosses and (recalled := self._repeats.recall(func, args, kwargs)) is not None:
            return recalled
        try:
            with self.memory.without_data(device):
                if crosses:  # torch would look for data to copy
                    return torch.empty_like(args[0], dtype=kwargs.get("dtype") or args[0].dtype, device=device)
                result = _grouped_product(*args) if _is_grouped_product(func, args) else func(*args, **kwargs)
        except _NEEDS_DATA:
            raise self._refusal(f"the operator {func}") from None
        except _MIXES_TIERS:
            raise UnableError(
                f"{self._module}: the operator {func} is given a tensor in host memory beside one on the device, as "
                "on a GPU, where that fails"
            ) from None
        self._repeats.remember(func, args, kwargs, result)
        return result

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Turns what torch raises on a tensor without data, outside of any operator, into a refusal.

        Raises:
            UntraceableError: Code inside the context looked for data.
        """
        try:
            yield
        except (RuntimeError, TypeError) as error:
            words = str(error).splitlines()[0] if str(error) else ""
            if not any(phrase in words for phrase in _WORDS_FOR_NO_DATA):
                raise
            raise self._refusal(f"code after {self.memory.device.label.operator} ({words})") from error

    def _value(self, func: Any, tensor: torch.Tensor) -> Any:
        value = scalar(tensor)
        if value is not None:
            return value
        if self._answers:
            return self._answers.pop(0)
        raise self._refusal(f"the operator {func}")

    def _refusal(self, what: str) -> UntraceableError:
        return UntraceableError(
            f"{self._module}: {what} needs the values of its input, and a trace has none; this model can be measured "
            "with `run`, not traced"
        )

    @property
    def _module(self) -> str:
        return self._modules[-1] if self._modules else self._outside

    def _counts(self) -> dict[str, int]:
        """A copy over the link touches device memory once: that end is counted here, for whoever made the copy."""
        copied, work = self.account.counts(), self._work.counts()
        work["touched_bytes"] += copied["h2d_bytes"] + copied["d2h_bytes"]
        return copied | work

    def _count_copy(self, func: Any, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> bool:
        """Whether the operator copies between the tiers; what generate() copies around the model is not counted."""
        if func not in (_ATEN._to_copy.default, _ATEN.copy_.default):
            return False
        source, target = args[func is _ATEN.copy_.default], outputs[0]
        if source.device.type == target.device.type:
            return False
        if self._modules:
            self.account.add("d2h" if target.device.type == "cpu" else "h2d", target.nbytes)
        return True


def _is_grouped_product(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether experts are multiplied in a dtype that torch's shape function refuses, though its kernels take it."""
    return func is _ATEN._grouped_mm.default and args[0].dtype != torch.bfloat16 and args[1].dim() == 3


def _grouped_product(rows: torch.Tensor, experts: torch.Tensor, *_: Any) -> torch.Tensor:
    """The form of torch's result: `[rows, out]`, each row padded to 16 bytes.

    Source: torch 2.13, torch/_meta_registrations.py (_create_grouped_mm_output_tensor).
    """
    columns, alignment = experts.shape[-1], 16 // rows.itemsize
    padded = -(-columns // alignment) * alignment
    return torch.empty_strided((rows.shape[0], columns), (padded, 1), dtype=rows.dtype, device=rows.device)


@cache
def _is_wrapper(tensor_class: type) -> bool:
    return hasattr(tensor_class, "__tensor_flatten__")


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
