"""The two views of 51 models, against bytes that were counted on real caches (see `about` in kv_models.json)."""

import json
from pathlib import Path
from typing import Any

import pytest

from offload_eval.bounds.kv_footprint import KvFootprint, ideal_kv_bytes, transformers_kv_bytes
from offload_eval.bounds.model_shape import model_shape

MODELS = json.loads((Path(__file__).parent / "data" / "kv_models.json").read_text())["models"]
ROWS = [
    pytest.param(model, row, id=f"{model['name'].split('/')[-1]}-{row['tokens']}")
    for model in MODELS
    for row in model["kv"]
]


def assert_bytes(footprint: KvFootprint, total_bytes: int, parts: dict[str, int]):
    assert footprint.total_bytes == total_bytes
    assert {name: footprint.parts.get(name) for name in parts} == parts


@pytest.mark.parametrize(("model", "row"), ROWS)
def test_ideal_view(model: dict[str, Any], row: dict[str, Any]):
    shape = model_shape(model["config"])
    assert_bytes(ideal_kv_bytes(shape, row["tokens"]), row["ideal_bytes"], row["ideal_parts"])


@pytest.mark.parametrize(("model", "row"), ROWS)
def test_transformers_view(model: dict[str, Any], row: dict[str, Any]):
    footprint = transformers_kv_bytes(model_shape(model["config"]), row["tokens"])
    expected_bytes = row["transformers_5_24_dynamic_cache_bytes"]
    if expected_bytes is None:
        assert footprint is None
    else:
        assert footprint is not None
        assert_bytes(footprint, expected_bytes, row["transformers_parts"])
