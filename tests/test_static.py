"""Static caches: the same tokens and logits as the baseline's, in buffers as long as the workload."""

import numpy as np
import pytest
import torch
from test_real_caches import CONFIGS
from tiny_models import tiny_llama
from transformers import AutoConfig

from offload_eval.core.experiment import DynamicSpec, OffloadedStaticSpec, StaticSpec, StrategySpec, Workload
from offload_eval.execution.fidelity import LogitsRecorder
from offload_eval.generation import TokenClock, generate
from offload_eval.instruments.cpu import CpuDevice
from offload_eval.strategies.base import kv_payload_bytes
from offload_eval.strategies.offloaded_static import OffloadedStatic
from offload_eval.strategies.registry import load_strategy
from offload_eval.strategies.static import Static

LAYERS, KV_HEADS, HEAD_DIM, BATCH, PROMPT, OUTPUT = 2, 2, 8, 2, 11, 6
WORKLOAD = Workload(batch_size=BATCH, prompt_tokens=PROMPT, output_tokens=OUTPUT)


def run(strategy: StrategySpec) -> tuple[torch.Tensor, np.ndarray, int]:
    model = tiny_llama(
        torch.float32,
        num_hidden_layers=LAYERS,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        vocab_size=64,
    )
    device = CpuDevice()
    logits_NBV = np.zeros((OUTPUT, BATCH, 64), dtype=np.float32)
    prompt_BN = torch.arange(BATCH * PROMPT).view(BATCH, PROMPT)
    with device.open_link(timed=False) as link:
        cache = load_strategy(strategy).build_cache(model.config, link, WORKLOAD.cached_tokens)
        tokens_BN = generate(model, prompt_BN, cache, OUTPUT, TokenClock(), [LogitsRecorder(logits_NBV)])
        payload = kv_payload_bytes(cache, device.tier_of)
    return tokens_BN, logits_NBV, payload["device"]


def test_a_static_cache_changes_no_token_and_holds_the_whole_workload():
    baseline, static = run(DynamicSpec()), run(StaticSpec())
    assert torch.equal(baseline[0], static[0])
    np.testing.assert_allclose(baseline[1], static[1], atol=1e-5)
    assert static[2] == LAYERS * BATCH * KV_HEADS * 2 * HEAD_DIM * 4 * WORKLOAD.cached_tokens


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("llama", None),
        ("t5", "encoder-decoder"),
        ("mamba", "no attention layer"),
        ("deepseek_v4", "no static cache for layers of type"),
    ],
)
def test_models_without_static_layers_are_refused(model_type: str, words: str | None):
    config = AutoConfig.for_model(model_type, **CONFIGS.get(model_type, {}))
    for refusal in (
        Static(StaticSpec()).refusal("cpu", config, WORKLOAD),
        OffloadedStatic(OffloadedStaticSpec()).refusal("cuda", config, WORKLOAD),
    ):
        assert (refusal is None) == (words is None)
        assert words is None or words in str(refusal)


def test_static_offloading_needs_cuda_and_a_layer_to_move():
    strategy = OffloadedStatic(OffloadedStaticSpec())
    assert "cannot run on cpu" in str(strategy.refusal("cpu", AutoConfig.for_model("llama"), WORKLOAD))
    only_sliding = AutoConfig.for_model("mistral", sliding_window=8)
    assert "has none" in str(strategy.refusal("cuda", only_sliding, WORKLOAD))
