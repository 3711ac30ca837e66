"""Every seam of a trace with torch's and transformers' code, undone by one context manager.

A torch built without CUDA cannot even index a fake CUDA tensor. The fake device `meta` therefore stands for the GPU:
upstream takes its paths for accelerators on it, and the few calls that ask the CUDA driver are replaced.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, Final
from unittest import mock

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor
from transformers.utils import import_utils

from offload_eval.errors import UpstreamChangedError
from offload_eval.strategies.upstream import Cache, cache_argument
from offload_eval.tracing.attention import CudaAttention
from offload_eval.tracing.tracer import Tracer

_HQQ_IMPROVES: Final = (True, True, False)
_CACHE_METHODS: Final = ("update", "update_conv_state", "update_recurrent_state", "update_indexer")
"""Source: transformers 5.24, cache_utils.Cache."""
HQQ_ASSUMPTION: Final = (
    "hqq's optimizer is followed for three rounds; each allocates the same, and it may take up to 20."
)


class StandInStream:
    """A stream on which nothing runs."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def wait_stream(self, _other: "StandInStream") -> None:
        """Nothing is under way."""

    def __enter__(self) -> "StandInStream":
        return self

    def __exit__(self, *_exc_info: object) -> None: ...


@contextmanager
def upstream_without_data(tracer: Tracer, backend: str | None) -> Iterator[None]:
    """Lets upstream's code run on tensors without data as it would on real ones.

    Args:
        tracer: What follows the operators.
        backend: The quantizer that the cache uses, None where it uses none.

    Raises:
        UpstreamChangedError: A name that is replaced is not there any more.
    """
    with ExitStack() as stack:
        if hasattr(import_utils, "is_fake_tensor"):
            # "A graph is being traced", transformers would say of fake tensors, and build masks it need not build.
            _replace(stack, import_utils, "is_fake_tensor", lambda _tensor: False)
        for method in _CACHE_METHODS:
            if hasattr(Cache, method):  # an older Cache has none for states and indexers
                _name_cache(stack, tracer, method)
        if backend == "hqq":
            _answer_hqq(stack, tracer)
        if backend == "quanto":
            _pack_quanto(stack)
        if tracer.memory.has_two_devices:
            default_stream = StandInStream()
            _replace(stack, torch, "Stream", StandInStream)
            _replace(stack, torch.cuda, "default_stream", lambda _device=None: default_stream)
            _replace(stack, torch.cuda, "empty_cache", lambda: None)
            stack.enter_context(CudaAttention())
        yield


def forward_arguments(model: Any, cache: Any) -> dict[str, Any]:
    """What generate() gives a model's forward besides its tokens."""
    arguments = {cache_argument(model): cache, "use_cache": True}
    return arguments | ({"logits_to_keep": 1} if model._supports_logits_to_keep() else {})


def _name_cache(stack: ExitStack, tracer: Tracer, method: str) -> None:
    """What the cache allocates in a method is told apart from what the module that calls it does."""
    called = getattr(Cache, method)

    def named(*args: Any, **kwargs: Any) -> Any:
        with tracer.in_cache():
            return called(*args, **kwargs)

    _replace(stack, Cache, method, named)


def _answer_hqq(stack: ExitStack, tracer: Tracer) -> None:
    """The optimizer of hqq stops once its error grows; every round of it allocates the same."""
    quantizer = import_module("hqq.core.quantize").Quantizer
    optimize = quantizer.optimize_weights

    def optimize_weights(*args: Any, **kwargs: Any) -> Any:
        with tracer.answering(*_HQQ_IMPROVES):
            return optimize(*args, **kwargs)

    _replace(stack, quantizer, "optimize_weights", staticmethod(optimize_weights))
    if tracer.memory.has_two_devices:
        # It computes in half precision where the device is called cuda.
        _replace(stack, import_module("hqq.core.optimize"), "float32", torch.float16)


def _pack_quanto(stack: ExitStack) -> None:
    """The values of a quanto tensor are packed where their type is torch.Tensor exactly; a fake tensor's is not."""
    module = import_module("optimum.quanto.tensor.weights.qbits")
    quantized, packed = module.WeightQBitsTensor, module.PackedTensor
    init = quantized.__init__

    def packing_init(
        self: Any, qtype: Any, axis: int, group_size: int, size: Any, stride: Any, data: Any, *rest: Any
    ) -> None:
        if isinstance(data, FakeTensor):
            data = packed.pack(data, qtype.bits)
        init(self, qtype, axis, group_size, size, stride, data, *rest)

    _replace(stack, quantized, "__init__", packing_init)


def _replace(stack: ExitStack, owner: Any, name: str, stand_in: Any) -> None:
    if not hasattr(owner, name):
        raise UpstreamChangedError(
            f"torch {torch.__version__}, transformers {transformers.__version__}: {owner.__name__} has no {name}, "
            "which a trace replaces"
        )
    stack.enter_context(mock.patch.object(owner, name, stand_in))
