"""What every test may ask for: a tiny model, an experiment on it, and the demo's model."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

# Before any import of huggingface_hub, here or in a process started from here: no test needs a network.
os.environ["HF_HUB_OFFLINE"] = "1"

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
DEMO_MODEL = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct"

WriteExperiment = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_config_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config.json of a Llama of 3 layers, 2 kv_heads and head_dim 16: no weights, no tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny_experiment(tiny_config_dir: Path) -> WriteExperiment:
    """Writes `experiment.yaml` into a folder and returns its path; keywords replace top-level keys of the file.

    Unchanged, it is three strategies on one workload of batch 2, 12 prompt tokens and 5 output tokens: 16 cached
    tokens a session. Nothing is traced.
    """

    def write(folder: Path, **changes: Any) -> Path:
        content = {
            "name": "tiny",
            "device": "cpu",
            "model": {"config": str(tiny_config_dir), "weights": "random", "dtype": "float32"},
            "cpu": {"compute_threads": 1},
            "budget": {"device_bytes": "8 MiB"},
            "workloads": [tiny_workload("small")],
            "strategies": [
                {"kind": "dynamic"},
                {"kind": "streamed", "name": "streamed", "prefetch_layers": 1},
                {"kind": "quantized", "backend": "fp8"},
            ],
            "measurement": {"trials": 1},
            "trace": False,
        }
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "experiment.yaml"
        path.write_text(yaml.safe_dump(content | changes, sort_keys=False), encoding="utf-8")
        return path

    return write


def tiny_workload(name: str, **changes: Any) -> dict[str, Any]:
    """A workload of random tokens."""
    lengths = {"batch_size": 2, "prompt_tokens": 12, "output_tokens": 5}
    return {"name": name, **lengths, "prompt": {"kind": "random"}} | changes


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the demo's model."""
    if not (DEMO_MODEL / "model.safetensors").is_file():
        pytest.fail(f"{DEMO_MODEL} holds no model: run `make model`")
    return DEMO_MODEL


@pytest.fixture
def plan_config(tmp_path: Path) -> Callable[..., Path]:
    """Writes a config.json of a Llama of 4 layers, 4 kv heads and head_dim 8; keywords replace fields."""

    def write(**changes: Any) -> Path:
        fields = {
            "model_type": "llama",
            "num_hidden_layers": 4,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "vocab_size": 100,
            "max_position_embeddings": 4096,
        }
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields | changes))
        return path

    return write


@pytest.fixture
def plan_experiment(tmp_path: Path, plan_config: Callable[..., Path]) -> Callable[..., Path]:
    """Writes an experiment on that model: 4 layers * 2 * 4 * 8 values * 2 bytes = 512 bytes a token."""

    def write(plan_section: Any = None, **changes: Any) -> Path:
        content = {
            "name": "mix",
            "model": {"config": str(plan_config()), "weights": "random"},
            "budget": {"device_bytes": 3_000_000, "weights_bytes": 1_000_000},
            "workloads": [{"prompt_tokens": 97, "output_tokens": 4, "prompt": {"kind": "random"}}],
            "strategies": [{"kind": "dynamic"}, {"kind": "offloaded"}, {"kind": "streamed"}],
            "plan": {"paging": {"block_tokens": 1}} | (plan_section or {}),
        }
        path = tmp_path / "experiment.yaml"
        path.write_text(yaml.safe_dump(content | changes))
        return path

    return write
