"""The exact prompt tokens of every workload, or a refusal before anything runs."""

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from offload_eval.core.experiment import (
    Experiment,
    JsonlPrompt,
    PromptSource,
    PydocPrompt,
    RandomPrompt,
    TextPrompt,
    Workload,
)
from offload_eval.core.factors import asked_index, expand_workloads
from offload_eval.core.shape import ModelFacts
from offload_eval.errors import InputError
from offload_eval.execution.messages import PromptText, TokenArray
from offload_eval.execution.model_loading import load_tokenizer
from offload_eval.execution.prompt_rows import random_rows

MAX_PROMPT_TOKENS: Final = 2**26
"""Half a GiB of token ids, which every worker loads."""


class Prompts(NamedTuple):
    """Prompts by the label of their workload, and what more of them can be cut from: None where they are random."""

    rows: dict[str, TokenArray]
    texts: dict[str, PromptText | None]


def prepare_prompts(experiment: Experiment, model: ModelFacts) -> Prompts:
    """Builds `[batch, prompt_tokens]` token ids for every workload.

    Text is tokenized once and cut into one piece for each session; the pieces of one batch never overlap. What
    the tokenizer puts before any text, such as a beginning-of-sequence token, starts every prompt and counts in
    its length.

    Raises:
        InputError: A workload is longer than the model's context, or needs more tokens than the text has.
    """
    workloads = [(asked_index(experiment, index), each) for index, each in enumerate(expand_workloads(experiment))]
    for index, workload in workloads:
        _check_context(index, workload, model)
        _check_size(index, workload)
    texts: dict[PromptSource, TokenArray] = {}
    tokenizer = None
    rows: dict[str, TokenArray] = {}
    sources: dict[str, PromptText | None] = {}
    for index, workload in workloads:
        if isinstance(workload.prompt, RandomPrompt):
            sources[workload.label] = None
            rows[workload.label] = random_rows(
                workload.batch_size, workload.prompt_tokens, model.vocab_size, workload.seed
            )
            continue
        if workload.prompt not in texts:
            tokenizer = tokenizer or load_tokenizer(experiment.model)
            texts[workload.prompt] = _tokenize(tokenizer, read_text(workload.prompt), add_special_tokens=False)
        opening = _tokenize(tokenizer, "", add_special_tokens=True)
        rows[workload.label] = _cut(index, workload, texts[workload.prompt], opening)
        sources[workload.label] = PromptText(texts[workload.prompt], opening)
    return Prompts(rows, sources)


def read_text(source: PromptSource) -> str:
    """Reads the text of a prompt source.

    Raises:
        InputError: The file is not UTF-8, or a line of it is not JSON with the field asked for.
    """
    match source:
        case TextPrompt(path=path):
            return _read_utf8(path)
        case JsonlPrompt(path=path, field=field):
            lines = enumerate(_read_utf8(path).split("\n"), start=1)  # the separators of Unicode may stand inside
            return "\n\n".join(_jsonl_field(path, number, line, field) for number, line in lines if line.strip())
        case PydocPrompt():
            from pydoc_data.topics import topics  # half a megabyte, and only here

            return "\n".join(topics[name] for name in sorted(topics))
        case _:
            raise AssertionError(source)


def _read_utf8(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompt text {path}: {error}") from error


def _jsonl_field(path: str, number: int, line: str, field: str) -> str:
    place = f"prompt text {path}, line {number}"
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{place}: not JSON: {error}") from error
    if not isinstance(record, dict) or field not in record:
        raise InputError(f"{place}: allowed: a JSON object with the field {field!r}")
    if not isinstance(record[field], str):
        raise InputError(f"{place}: {field} is {record[field]!r}; allowed: a string")
    return str(record[field])


def _tokenize(tokenizer: Any, text: str, *, add_special_tokens: bool) -> TokenArray:
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    return np.asarray(encoded["input_ids"], dtype=np.int64)


def _check_context(index: int, workload: Workload, model: ModelFacts) -> None:
    total_tokens = workload.prompt_tokens + workload.output_tokens
    if model.context_tokens is not None and total_tokens > model.context_tokens:
        raise InputError(
            f"workloads[{index}] ({workload.label}): prompt_tokens + output_tokens = {total_tokens:,}; allowed: at "
            f"most {model.context_tokens:,}, the model's context. Nothing is truncated."
        )


def _check_size(index: int, workload: Workload) -> None:
    total_tokens = workload.batch_size * workload.prompt_tokens
    if total_tokens > MAX_PROMPT_TOKENS:
        raise InputError(
            f"workloads[{index}] ({workload.label}): batch_size * prompt_tokens = {total_tokens:,}; allowed: at most "
            f"{MAX_PROMPT_TOKENS:,}"
        )


def _cut(index: int, workload: Workload, tokens: TokenArray, opening: TokenArray) -> TokenArray:
    piece_tokens = max(0, workload.prompt_tokens - len(opening))
    needed = workload.batch_size * piece_tokens
    if needed > len(tokens):
        raise InputError(
            f"workloads[{index}] ({workload.label}): batch_size * prompt_tokens needs {needed:,} tokens of text; "
            f"allowed: at most {len(tokens):,}, all that its text has. Nothing is repeated."
        )
    start = workload.seed * needed % (len(tokens) - needed + 1)
    pieces = tokens[start : start + needed].reshape(workload.batch_size, piece_tokens)
    openings = np.broadcast_to(opening, (workload.batch_size, len(opening)))
    return np.concatenate([openings, pieces], axis=1)[:, : workload.prompt_tokens].copy()
