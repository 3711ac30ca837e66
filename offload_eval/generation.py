"""One generate() call with exact lengths, and the clock that listens to it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from offload_eval.core.experiment import CompileMode
from offload_eval.core.records import Phase
from offload_eval.strategies.compilation import GRAPH_MODES, compile_config, initialize_early
from offload_eval.strategies.upstream import cache_argument


class TokenClock(BaseStreamer):
    """Notes when each token reaches the host; generate() hands tokens over one step at a time."""

    def __init__(
        self,
        on_first_token: Callable[[], None] = lambda: None,
        on_token: Callable[[], None] = lambda: None,
    ) -> None:
        self.started: float = time.perf_counter()
        self.token_times: list[float] = []
        self._on_first_token = on_first_token
        self._on_token = on_token
        self._prompt_was_put = False

    def put(self, value: torch.Tensor) -> None:  # noqa: ARG002  # the time matters, not the token
        """Takes the prompt first, then one token of every session at a time."""
        now = time.perf_counter()
        if not self._prompt_was_put:
            self._prompt_was_put = True
            return
        self.token_times.append(now)
        self._on_token()
        if len(self.token_times) == 1:
            self._on_first_token()

    def end(self) -> None:
        """Nothing is held back."""

    @property
    def phase(self) -> Phase:
        """Where generation is: `prefill` until the first token is on the host."""
        return "decode" if self.token_times else "prefill"

    @property
    def ttft_s(self) -> float:
        """From the call of generate() to the first token."""
        return self.token_times[0] - self.started

    @property
    def e2e_latency_s(self) -> float:
        """From the call of generate() to the last token."""
        return self.token_times[-1] - self.started

    @property
    def inter_token_latencies_s(self) -> tuple[float, ...]:
        """Between consecutive tokens."""
        pairs = zip(self.token_times, self.token_times[1:], strict=False)
        return tuple(later - earlier for earlier, later in pairs)


def generate(
    model: Any,
    prompt_BN: torch.Tensor,
    cache: Any,
    output_tokens: int,
    clock: TokenClock,
    processors: Sequence[LogitsProcessor] = (),
    prefill_chunk_tokens: int | None = None,
    compile_mode: CompileMode | None = None,
) -> torch.Tensor:
    """Runs the model's own generate(), greedily, for exactly `output_tokens` tokens.

    Args:
        model: A causal language model.
        prompt_BN: Prompt tokens `[batch, prompt_tokens]` on the model's device.
        cache: The cache to fill; None lets generate() build its default.
        output_tokens: Tokens to generate for each session. End-of-sequence does not stop it.
        clock: Started here, and told of every token.
        processors: Logits processors, in order; each sees float32 logits `[batch, vocab]`.
        prefill_chunk_tokens: Prefill in chunks of this many tokens.
        compile_mode: Mode of torch.compile for the decode steps, and for chunks of a prefill; a whole prefill is never
            compiled. None: nothing is. Only a static cache is compiled.

    Returns:
        The generated tokens `[batch, output_tokens]`.

    Raises:
        RuntimeError: generate() returned another number of tokens.
    """
    config = GenerationConfig(
        max_new_tokens=output_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
        prefill_chunk_size=prefill_chunk_tokens,
        # A static cache would otherwise have itself compiled on CUDA, and be another run.
        disable_compile=compile_mode is None,
        compile_config=None if compile_mode is None else compile_config(compile_mode),
    )
    model.generation_config = config  # generate() fills what a config leaves unset from here: a stop token, say
    arguments = {} if cache is None else {cache_argument(model): cache}
    attention_mask = torch.ones_like(prompt_BN)
    clock.started = time.perf_counter()
    if compile_mode in GRAPH_MODES and prefill_chunk_tokens is not None:
        initialize_early(model, cache, prompt_BN.shape[0])
    sequences = model.generate(
        prompt_BN,
        attention_mask=attention_mask,
        generation_config=config,
        logits_processor=LogitsProcessorList(processors),
        streamer=clock,
        **arguments,
    )
    expected = (prompt_BN.shape[0], prompt_BN.shape[1] + output_tokens)
    if tuple(sequences.shape) != expected or len(clock.token_times) != output_tokens:
        raise RuntimeError(
            f"generate() returned {tuple(sequences.shape)} and put {len(clock.token_times)} tokens; "
            f"the workload asks for {expected}"
        )
    tokens_BN: torch.Tensor = sequences[:, prompt_BN.shape[1] :]
    return tokens_BN
