"""Calls of `plan`, and what they are about.

The base model has 32 layers, 8 kv heads and head_dim 128: 2 * 32 * 8 * 128 * 2 = 131,072 bytes a token in 16 bit.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from offload_eval.cli.app import app

ROOT = Path(__file__).parents[1]
GIB = 1024**3
TOKEN_BYTES = 131_072
BASE_MODEL = str(ROOT / "configs" / "base_example_model.json")
BASE = (
    "--model",
    BASE_MODEL,
    "--vram-gib",
    "24",
    "--weights-gib",
    "12",
    "--runtime-gib",
    "3",
    "--reserve-gib",
    "3",
)
CHAT = {
    "name": "chat",
    "sessions": 3,
    "prompt_tokens": 20,
    "max_new_tokens": 11,
    "generated_tokens": {"p95": 6},
}
LONG = {
    "name": "long",
    "sessions": 1,
    "prompt_tokens": 50,
    "max_new_tokens": 21,
    "generated_tokens": {"p95": 11},
}


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def plan(*arguments: str) -> Any:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def cell(document: Any, strategy: str) -> Any:
    (found,) = [each for each in document["cells"] if each["strategy"] == strategy]
    return found


Configure = Callable[..., Path]
