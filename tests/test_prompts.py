"""Prompts: exact lengths, real text, and refusals before anything runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from offload_eval.core.experiment import (
    BudgetSpec,
    DynamicSpec,
    Experiment,
    JsonlPrompt,
    ModelSpec,
    PromptSource,
    PydocPrompt,
    RandomPrompt,
    TextPrompt,
    Workload,
)
from offload_eval.core.shape import ModelFacts
from offload_eval.errors import InputError
from offload_eval.execution.messages import TokenArray
from offload_eval.execution.prompts import prepare_prompts, read_text


def prepare(source: str, *workloads: Workload, context_tokens: int | None = 8192) -> dict[str, TokenArray]:
    experiment = Experiment(
        name="x",
        model=ModelSpec(source=source),
        budget=BudgetSpec(device_bytes=1),
        workloads=workloads,
        strategies=(DynamicSpec(),),
    )
    facts = ModelFacts(fingerprint="0", parameters=1, weights_bytes=2, vocab_size=100, context_tokens=context_tokens)
    return prepare_prompts(experiment, facts).rows


def workload(prompt: PromptSource, **lengths: Any) -> Workload:
    return Workload(**({"batch_size": 3, "prompt_tokens": 50, "output_tokens": 2} | lengths), prompt=prompt)


@pytest.mark.model
def test_prompts_are_consecutive_pieces_of_the_tokenized_text(demo_model: Path):
    expected = AutoTokenizer.from_pretrained(demo_model)(read_text(PydocPrompt()))["input_ids"][:150]
    (tokens,) = prepare(str(demo_model), workload(PydocPrompt())).values()
    assert tokens.shape == (3, 50)
    assert tokens.reshape(-1).tolist() == expected


@pytest.mark.model
def test_another_seed_takes_other_text(demo_model: Path):
    prompts = prepare(str(demo_model), workload(PydocPrompt(), name="a"), workload(PydocPrompt(), name="b", seed=1))
    assert not np.array_equal(prompts["a"], prompts["b"])


@pytest.mark.model
def test_a_text_that_is_too_short_is_refused_with_both_lengths(demo_model: Path, tmp_path: Path):
    text = tmp_path / "short.txt"
    text.write_text("one two three")
    with pytest.raises(InputError, match=r"workloads\[0\] .*needs 150 tokens of text; allowed: at most [345],"):
        prepare(str(demo_model), workload(TextPrompt(path=str(text))))


def test_a_workload_past_the_context_is_refused():
    with pytest.raises(InputError, match=r"workloads\[1\] .*= 101; allowed: at most 100"):
        prepare("unused", workload(RandomPrompt()), workload(RandomPrompt(), prompt_tokens=99), context_tokens=100)


def test_a_workload_that_fills_the_context_is_not():
    assert prepare("unused", workload(RandomPrompt(), prompt_tokens=98), context_tokens=100)


@pytest.mark.model
def test_what_a_tokenizer_puts_before_a_text_starts_every_prompt(demo_model: Path, tmp_path: Path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    template = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained(tmp_path)
    plain = AutoTokenizer.from_pretrained(demo_model)(read_text(PydocPrompt()))["input_ids"]
    (tokens,) = prepare(str(tmp_path), workload(PydocPrompt(), batch_size=2, prompt_tokens=4)).values()
    assert tokens.tolist() == [[1, *plain[:3]], [1, *plain[3:6]]]


def test_random_tokens_repeat_with_their_seed_and_stay_in_the_vocabulary():
    (first,) = prepare("unused", workload(RandomPrompt(), prompt_tokens=2000)).values()
    (again,) = prepare("unused", workload(RandomPrompt(), prompt_tokens=2000)).values()
    (other,) = prepare("unused", workload(RandomPrompt(), prompt_tokens=2000, seed=1)).values()
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert (first.min(), first.max()) == (0, 99)


def test_jsonl_joins_one_field_of_every_line(tmp_path: Path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "a", "n": 1}\n\n{"text": "b"}\n')
    assert read_text(JsonlPrompt(path=str(path))) == "a\n\nb"


def test_a_separator_of_unicode_inside_a_line_ends_no_line(tmp_path: Path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "a\u2028b"}\r\n{"text": "c\x85d"}\n', encoding="utf-8")
    assert read_text(JsonlPrompt(path=str(path))) == "a\u2028b\n\nc\x85d"


def test_more_tokens_than_memory_are_refused_before_any_is_made():
    with pytest.raises(InputError, match=r"= 1,048,576,000,000; allowed: at most"):
        prepare("unused", workload(RandomPrompt(), batch_size=2**16, prompt_tokens=16_000_000), context_tokens=None)


@pytest.mark.parametrize("line", ['{"other": 1}', "not json", "[1]", '{"text": 5}', '"text"'])
def test_a_bad_line_is_named(tmp_path: Path, line: str):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(InputError, match="line 2"):
        read_text(JsonlPrompt(path=str(path)))


def test_text_that_is_not_utf8_is_refused(tmp_path: Path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"latin\.txt"):
        read_text(TextPrompt(path=str(path)))
