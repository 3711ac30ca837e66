"""The driver: exact lengths, the model's own greedy tokens, and a clock that fits a schedule known beforehand."""

import functools
import time
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from tiny_models import tiny_llama
from transformers import AutoTokenizer, GenerationConfig

from offload_eval.core.experiment import DynamicSpec, ModelSpec, StrategySpec, StreamedSpec
from offload_eval.execution.fidelity import ForcedTokens, LogitsRecorder
from offload_eval.execution.model_loading import load_model
from offload_eval.generation import TokenClock, generate
from offload_eval.instruments.cpu import CpuDevice
from offload_eval.strategies.registry import load_strategy

VOCAB = 50


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(
        torch.float32,
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
    )


@pytest.fixture(scope="module")
def real_model(demo_model: Any) -> Any:
    torch.set_num_threads(1)
    return load_model(ModelSpec(source=str(demo_model)), torch.device("cpu"))


@pytest.fixture(scope="module")
def real_tokens(demo_model: Any) -> torch.Tensor:
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(AutoTokenizer.from_pretrained(demo_model)(text[:60_000])["input_ids"])


@pytest.mark.model
@pytest.mark.parametrize(
    ("batch_size", "prompt_tokens"), [(1, 1), (1, 63), (1, 512), (1, 1000), (4, 1), (4, 63), (4, 512)]
)
def test_tokens_equal_plain_generate_and_streamed_logits_equal_dynamics(
    real_model: Any, real_tokens: torch.Tensor, batch_size: int, prompt_tokens: int
):
    prompt = real_tokens[: batch_size * prompt_tokens].reshape(batch_size, prompt_tokens)
    output_tokens = 8
    plain = real_model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=output_tokens,
        min_new_tokens=output_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    logits = {}
    specs: list[StrategySpec] = [DynamicSpec(), StreamedSpec()]
    for spec in specs:
        recorded = torch.empty(output_tokens, batch_size, real_model.config.vocab_size).numpy()
        with CpuDevice().open_link(timed=False) as link:
            cache = load_strategy(spec).build_cache(real_model.config, link, prompt_tokens + output_tokens - 1)
            tokens = generate(real_model, prompt, cache, output_tokens, TokenClock(), [LogitsRecorder(recorded)])
        assert torch.equal(tokens, plain[:, prompt_tokens:])
        logits[spec.kind] = torch.from_numpy(recorded)
    assert torch.equal(logits["streamed"], logits["dynamic"])


def test_end_of_sequence_stops_nothing(model: Any):
    """The model's own most likely token is declared its end-of-sequence token, everywhere it could be."""
    prompt = torch.ones(1, 3, dtype=torch.long)
    (first,) = generate(model, prompt, None, 2, TokenClock())[0, :1].tolist()
    model.config.eos_token_id = first
    model.generation_config = GenerationConfig(eos_token_id=first)
    stopped = model.generate(prompt, max_new_tokens=7, do_sample=False, pad_token_id=0)
    assert stopped.shape[1] < 3 + 7, "the declaration works for a plain generate()"
    assert generate(model, prompt, None, 7, TokenClock()).shape == (1, 7)


def test_forced_tokens_are_generated_whatever_the_model_prefers(model: Any):
    forced = torch.randint(VOCAB, (3, 6), generator=torch.Generator().manual_seed(5))
    prompt = torch.ones(3, 4, dtype=torch.long)
    assert torch.equal(generate(model, prompt, None, 6, TokenClock(), [ForcedTokens(forced)]), forced)


def test_a_wrong_count_is_an_error(model: Any, monkeypatch: pytest.MonkeyPatch):
    original: Callable[..., torch.Tensor] = model.generate
    monkeypatch.setattr(model, "generate", lambda *a, **k: original(*a, **k)[:, :-1])
    with pytest.raises(RuntimeError, match="workload asks for"):
        generate(model, torch.ones(1, 4, dtype=torch.long), None, 5, TokenClock())


def test_the_clock_separates_ttft_from_the_rest():
    """A schedule of known sleeps: 60 ms to the first token, then 20 and 40 ms."""
    phases = []
    clock = TokenClock(on_first_token=lambda: phases.append("first"), on_token=lambda: phases.append("token"))
    clock.put(torch.zeros(1, 9))
    assert clock.phase == "prefill"
    for pause_s in (0.060, 0.020, 0.040):
        time.sleep(pause_s)
        clock.put(torch.zeros(1))
    assert clock.phase == "decode"
    assert phases == ["token", "first", "token", "token"]
    assert clock.ttft_s == pytest.approx(0.060, abs=0.015)
    assert clock.inter_token_latencies_s == pytest.approx((0.020, 0.040), abs=0.015)
    assert clock.e2e_latency_s == pytest.approx(clock.ttft_s + sum(clock.inter_token_latencies_s), abs=1e-9)


def test_every_token_of_a_batch_step_is_one_tick(model: Any):
    clock = TokenClock()
    generate(model, torch.ones(4, 5, dtype=torch.long), None, 6, clock)
    assert len(clock.token_times) == 6
    assert len(clock.inter_token_latencies_s) == 5


def test_each_token_is_put_right_after_its_own_forward(model: Any, monkeypatch: pytest.MonkeyPatch):
    """Phases and latencies rest on it: a generate() that hands tokens over one step late must fail here."""
    events = []
    original = type(model).forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        events.append("forward")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", forward)
    clock = TokenClock(on_token=lambda: events.append("token"))
    generate(model, torch.ones(1, 4, dtype=torch.long), None, 3, clock)
    assert events == ["forward", "token"] * 3


def test_prefill_chunks_reach_the_model_in_the_size_asked_for(model: Any, monkeypatch: pytest.MonkeyPatch):
    lengths = []
    original = type(model).forward

    @functools.wraps(original)
    def forward(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        lengths.append(input_ids.shape[1])
        return original(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", forward)
    from transformers import DynamicCache

    generate(model, torch.ones(1, 10, dtype=torch.long), DynamicCache(), 3, TokenClock(), prefill_chunk_tokens=4)
    assert lengths == [4, 4, 2, 1, 1]
