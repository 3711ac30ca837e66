"""transformers' offloading cache with our meters on it, run on tensors without data.

No GPU is needed to count its copies: the fake device `meta` is the device tier and `cpu` is the host, and the two
CUDA calls that upstream makes by name are stand-ins that record their order.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

from offload_eval.bounds.model_shape import model_shape
from offload_eval.bounds.strategy_bound import strategy_bound
from offload_eval.core.experiment import BudgetSpec, OffloadedSpec, Workload
from offload_eval.core.records import Direction
from offload_eval.errors import UpstreamChangedError
from offload_eval.instruments.live_storage import LiveStorageTracker, TieredMemory
from offload_eval.strategies import offloaded
from offload_eval.strategies.offloaded import Offloaded
from offload_eval.strategies.upstream import require_methods

LAYERS, BATCH, KV_HEADS, HEAD_DIM, PROMPT = 4, 3, 2, 8, 11
CONFIG = AutoConfig.for_model(
    "llama", num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM
)
WORKLOAD = Workload(prompt_tokens=PROMPT, output_tokens=4)


class Stream:
    """Stands in for torch.Stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.waits = 0

    def wait_stream(self, _: "Stream") -> None:
        self.waits += 1

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None: ...


class CountingLink:
    """Counts what the meters report."""

    def __init__(self) -> None:
        self.copies: list[tuple[Direction, int]] = []
        self.waits = 0

    @contextmanager
    def _count(self) -> Iterator[None]:
        self.waits += 1
        yield

    @contextmanager
    def meter_copies(
        self,
        direction: Direction,
        sizes_bytes: Sequence[int],
        host_tensors: Callable[[], list[torch.Tensor]],
        device: torch.device,
    ) -> Iterator[None]:
        assert device.type == "meta"
        self.copies += [(direction, size_bytes) for size_bytes in sizes_bytes]
        if direction == "h2d":
            self._check(sizes_bytes, host_tensors())
        yield
        if direction == "d2h":
            self._check(sizes_bytes, host_tensors())

    def meter_wait(self, device: torch.device) -> AbstractContextManager[None]:
        assert device.type == "meta"
        return self._count()

    @staticmethod
    def _check(sizes_bytes: Sequence[int], host_tensors: list[torch.Tensor]) -> None:
        """The host sides are those of the very copies, when they are asked for."""
        assert [tensor.nbytes for tensor in host_tensors] == list(sizes_bytes)
        assert all(tensor.device.type == "cpu" for tensor in host_tensors)

    def take(self, direction: Direction) -> int:
        total = sum(num_bytes for way, num_bytes in self.copies if way == direction)
        self.copies = [copy for copy in self.copies if copy[0] != direction]
        return total


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Stream:
    default = Stream()
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _device=None: default)
    return default


def forward(cache: Any, num_tokens: int) -> None:
    for layer in range(LAYERS):
        states = torch.empty(BATCH, KV_HEADS, num_tokens, HEAD_DIM, dtype=torch.bfloat16, device="meta")
        cache.update(states, states, layer)


def test_bytes_of_a_decode_step_are_the_whole_cache_both_ways(streams: Stream):
    """With S cached tokens: H2D 2*B*Hkv*S*D*b a layer, D2H 2*B*Hkv*(S+1)*D*b a layer."""
    link = CountingLink()
    token_bytes = LAYERS * BATCH * KV_HEADS * 2 * HEAD_DIM * 2
    with FakeTensorMode(allow_non_fake_inputs=True):
        cache = Offloaded(OffloadedSpec()).build_cache(CONFIG, link, 99)
        forward(cache, PROMPT)
        # The last layer's update prefetches the first again, for the step to come.
        assert (link.take("h2d"), link.take("d2h")) == (PROMPT * token_bytes // LAYERS, PROMPT * token_bytes)
        for cached in range(PROMPT, PROMPT + 3):
            forward(cache, 1)
            fetched, written = link.take("h2d"), link.take("d2h")
            assert fetched == cached * token_bytes + token_bytes // LAYERS
            assert written == (cached + 1) * token_bytes


def test_every_layer_waits_for_its_prefetch_and_for_its_own_copy_back(streams: Stream):
    link = CountingLink()
    with FakeTensorMode(allow_non_fake_inputs=True):
        forward(Offloaded(OffloadedSpec()).build_cache(CONFIG, link, 99), 1)
    assert link.waits == 2 * LAYERS
    assert streams.waits == 2 * LAYERS, "our wait comes before upstream's own, which is kept"


class DeviceTier(TieredMemory):
    """Counts what is on the fake device, and not what is on the host."""

    def enter(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            super().enter(tensor)


def test_the_card_is_the_peak_of_the_real_cache(streams: Stream):
    """Two and a half layers; the new token's own states, and nothing else, come on top."""
    memory = DeviceTier()
    with FakeTensorMode(allow_non_fake_inputs=True), LiveStorageTracker(memory):
        cache = Offloaded(OffloadedSpec()).build_cache(CONFIG, CountingLink(), 99)
        forward(cache, PROMPT)
        for _ in range(3):
            memory.device.restart_peak()
            forward(cache, 1)
    workload = Workload(batch_size=BATCH, prompt_tokens=PROMPT, output_tokens=4)
    shape = model_shape(CONFIG.to_dict())
    card = strategy_bound(shape, 1, "bfloat16", workload, OffloadedSpec(), BudgetSpec(device_bytes=10**9))
    layer_token_bytes = BATCH * KV_HEADS * 2 * HEAD_DIM * 2
    # At the last step the layer fetched ahead lacks the new token, and the states handed in are half a row.
    excess_bytes = BATCH * card.kv_device_bytes_per_session - memory.device.peak_bytes
    assert abs(excess_bytes) <= 2 * layer_token_bytes


def test_no_cache_outlives_its_last_reference(streams: Stream):
    link = CountingLink()
    gc.collect()
    gc.disable()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            cache = Offloaded(OffloadedSpec()).build_cache(CONFIG, link, 99)
            forward(cache, PROMPT)
            layer = weakref.ref(cache.layers[0])
            del cache
        assert layer() is None
    finally:
        gc.enable()


def test_a_metered_layer_is_not_registered_as_upstreams_own():
    from transformers import cache_utils

    before = dict(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING)
    assert offloaded.metered(cache_utils.DynamicSlidingWindowLayer).__name__ == "MeteredDynamicSlidingWindowLayer"
    assert before == cache_utils.DYNAMIC_LAYER_TYPE_MAPPING


def test_a_cpu_is_refused_before_any_model_is_loaded():
    strategy = Offloaded(OffloadedSpec())
    assert "cannot run on cpu" in (strategy.refusal("cpu", CONFIG, WORKLOAD) or "")
    assert strategy.refusal("cuda", CONFIG, WORKLOAD) is None


def test_upstream_on_a_cpu_really_fails():
    """The refusal is upstream's own: were this to pass one day, the refusal must go."""
    from transformers import DynamicCache

    cache = DynamicCache(config=CONFIG, offloading=True)
    with pytest.raises((AssertionError, RuntimeError)):
        cache.update(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), 0)


def test_encoder_decoder_models_are_refused():
    refusal = Offloaded(OffloadedSpec()).refusal("cuda", AutoConfig.for_model("t5"), WORKLOAD)
    assert "encoder-decoder" in (refusal or "")


def test_a_changed_upstream_is_named(monkeypatch: pytest.MonkeyPatch):
    class Changed:
        def update(self) -> None: ...

    with pytest.raises(UpstreamChangedError, match="Changed has no offload, prefetch"):
        require_methods(Changed, "update", "offload", "prefetch")
    monkeypatch.setattr(offloaded, "DynamicCache", Changed)
    with pytest.raises(UpstreamChangedError, match="offload, prefetch"):
        Offloaded(OffloadedSpec()).build_cache(CONFIG, CountingLink(), 9)
