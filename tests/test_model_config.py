"""A model's config: where it is found, what is said of its weights, and what is refused and how."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from malformed_configs import GOOD, MALFORMED, content, write
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

from offload_eval.bounds.model_shape import model_shape
from offload_eval.errors import ExitCode, InputError, OffloadEvalError
from offload_eval.store.model_config import INDEX_NAME, load_model_config, preset_names, presets_folder

PRESETS = {name: load_model_config(name) for name in preset_names()}
COUNTED = {
    model["name"]: model
    for model in json.loads((Path(__file__).parent / "data" / "kv_models.json").read_text())["models"]
}
REMOTE_CODE_ALONE = {"kimi-k2", "kimi-k3", "llama-3.3-nemotron-super-49b", "openelm-270m"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(GOOD))
    return tmp_path


# Presets


@pytest.mark.parametrize("short_name", sorted(PRESETS))
def test_a_preset_is_found_by_both_names_in_any_case_and_has_a_layout(short_name: str):
    preset = PRESETS[short_name]
    assert load_model_config(preset.name) == load_model_config(short_name.upper()) == preset
    assert preset.name.count("/") == 1
    assert preset.source
    assert preset.source.endswith(".")
    assert "preset" not in preset.config
    assert {"auto_map", "quantization_config"}.isdisjoint(preset.config)
    assert model_shape(preset.config).layer_groups


def test_preset_names_are_unique():
    assert len({preset.name.casefold() for preset in PRESETS.values()}) == len(PRESETS)


def test_every_counted_model_is_a_preset_with_that_layout():
    by_name = {preset.name: preset for preset in PRESETS.values()}
    for name, model in COUNTED.items():
        assert model_shape(by_name[name].config).layer_groups == model_shape(model["config"]).layer_groups


def text_parameters(model: torch.nn.Module) -> int:
    """Unique parameters, without the towers and projectors of other modalities."""
    model.tie_weights()
    unique = {id(parameter): (name, parameter) for name, parameter in model.named_parameters()}
    other = ("model.visual.", "model.vision", "model.multi_modal_projector.")
    return sum(parameter.numel() for name, parameter in unique.values() if not name.startswith(other))


def meta_model(config: Any) -> torch.nn.Module:
    text = config.get_text_config(decoder=True)
    with torch.device("meta"):
        if type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
            return AutoModelForSeq2SeqLM.from_config(config)
        if config.model_type != "whisper" and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
            return AutoModelForCausalLM.from_config(text)
        return AutoModelForImageTextToText.from_config(config)


@pytest.mark.parametrize("short_name", sorted(set(PRESETS) - REMOTE_CODE_ALONE - {"whisper-large-v3"}))
def test_a_presets_parameters_are_those_of_the_model_that_transformers_builds(short_name: str):
    """AutoConfig reads the file as it is; the model has shapes and no data."""
    config = AutoConfig.from_pretrained(PRESETS[short_name].origin)
    parameters = text_parameters(meta_model(config))
    assert PRESETS[short_name].weights_bytes == 2 * parameters
    assert PRESETS[short_name].weights_source == f"{parameters:,} parameters at 16 bits"


def test_a_preset_without_a_parameter_count_is_remote_code():
    unknown = {name for name, preset in PRESETS.items() if preset.weights_bytes is None}
    assert unknown < REMOTE_CODE_ALONE
    assert not any(PRESETS[name].config["model_type"] in CONFIG_MAPPING for name in REMOTE_CODE_ALONE)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-9B", "qwen3-9b", "QWEN3-8"])
def test_what_is_no_preset_is_answered_with_near_ones(name: str):
    with pytest.raises(InputError, match=r"Nothing is downloaded: a config\.json is needed") as refusal:
        load_model_config(name)
    assert str(refusal.value).startswith(f"{name}: no such file or folder, and no preset; near presets: ")
    assert "qwen3-8b" in str(refusal.value)


def test_what_is_near_no_preset_is_said_so():
    with pytest.raises(InputError, match=rf"no preset is near \({len(PRESETS)} are known\)"):
        load_model_config("/nowhere/at/all")


# Files and folders


def test_a_folder_and_its_file_are_read(folder: Path):
    for location in (folder, str(folder), folder / "config.json"):
        model = load_model_config(location)
        assert (model.name, model.config, model.origin) == (folder.name, GOOD, folder / "config.json")
        assert (model.source, model.weights_bytes, model.weights_source) == (None, None, None)


def test_a_file_may_have_any_name_and_a_byte_order_mark(tmp_path: Path):
    path = tmp_path / "mine.txt"
    path.write_bytes(b"\xef\xbb\xbf" + content({}))
    assert load_model_config(path).name == "mine"
    assert load_model_config("mine.txt", relative_to=tmp_path).config == GOOD


def test_bare_infinity_is_read_where_the_layout_does_not_need_the_number(tmp_path: Path):
    """Real configs have it, for instance in a range of time steps."""
    write(json.dumps(GOOD | {"time_step_limit": [0.0, float("inf")], "x": float("nan")}), tmp_path)
    assert model_shape(load_model_config(tmp_path).config).hidden_size == 4096


def test_what_exists_wins_over_a_preset(tmp_path: Path):
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(GOOD))
    assert load_model_config("gpt2", relative_to=tmp_path).config == GOOD
    assert load_model_config("gpt2").config["model_type"] == "gpt2"


def test_a_path_is_never_a_preset():
    with pytest.raises(InputError, match="no such file or folder"):
        load_model_config(Path("gpt2"))


def test_a_copy_of_a_preset_keeps_its_source_and_parameters(tmp_path: Path):
    (tmp_path / "config.json").write_bytes(PRESETS["qwen3-8b"].origin.read_bytes())
    copied = load_model_config(tmp_path)
    assert (copied.name, copied.weights_bytes) == ("Qwen/Qwen3-8B", PRESETS["qwen3-8b"].weights_bytes)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 10)
    assert load_model_config(tmp_path).weights_source == "sum of 1 safetensors file"


@pytest.mark.parametrize("location", ["", "  ", "~no_such_user/config.json", "a\0b", "x" * 5000, os.devnull])
def test_what_is_no_path_is_refused(location: str):
    with pytest.raises(InputError) as refusal:
        load_model_config(location)
    assert "\0" not in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_folder_without_a_config_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"holds no config\.json$"):
        load_model_config(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"holds no config\.json; a GGUF file is not read"):
        load_model_config(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_is_refused(folder: Path):
    (folder / "config.json").chmod(0)
    with pytest.raises(InputError, match=r"config\.json: cannot be read: Permission denied"):
        load_model_config(folder)


def test_a_large_gguf_file_is_named_as_such(tmp_path: Path):
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF")
        file.truncate(20_000_000)
    with pytest.raises(InputError, match="a GGUF file"):
        load_model_config(path)


# Weights


def index(folder: Path, shards: list[str], total_size: Any) -> None:
    weight_map = {f"weight.{number}": shard for number, shard in enumerate(shards)}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}))


def test_weights_are_the_sum_of_the_safetensors_files(folder: Path):
    for number in range(3):
        (folder / f"part-{number}.safetensors").write_bytes(b"x" * 100)
    model = load_model_config(folder)
    assert (model.weights_bytes, model.weights_source) == (300, "sum of 3 safetensors files")


def test_a_second_copy_of_the_weights_does_not_count(folder: Path):
    """Some folders hold model.safetensors, or shards with an index, beside the same weights in one other file."""
    (folder / "consolidated.safetensors").write_bytes(b"x" * 100)
    (folder / "model.safetensors").write_bytes(b"x" * 7)
    assert load_model_config(folder).weights_bytes == 7
    (folder / "model-1.safetensors").write_bytes(b"x" * 11)
    index(folder, ["model-1.safetensors", "model-1.safetensors"], 10)
    assert load_model_config(folder).weights_bytes == 11


@pytest.mark.parametrize("total_size", [400, 400.0])
def test_absent_shards_are_counted_by_the_index(folder: Path, total_size: float):
    (folder / "a.safetensors").write_bytes(b"x")
    index(folder, ["a.safetensors", "b.safetensors"], total_size)
    model = load_model_config(folder)
    assert (model.weights_bytes, model.weights_source) == (400, f"metadata.total_size of {INDEX_NAME}")


@pytest.mark.parametrize("total_size", ["400", True, 0, -1, 0.5, float("inf"), float("nan"), [400]])
def test_an_index_with_a_wrong_total_is_refused(folder: Path, total_size: Any):
    index(folder, ["a.safetensors"], total_size)
    with pytest.raises(InputError, match=r"index\.json: metadata\.total_size is .*; allowed: an integer >= 1"):
        load_model_config(folder)


@pytest.mark.parametrize("text", ['{"metadata": null}', '{"metadata": []}', '{"weight_map": ["a"]}', '{"a": 1}'])
def test_an_index_that_says_nothing_leaves_the_weights_unknown(folder: Path, text: str):
    (folder / INDEX_NAME).write_text(text)
    assert load_model_config(folder).weights_bytes is None


# Malformed files


def read(path: Path) -> Any:
    return model_shape(load_model_config(path).config)


@pytest.mark.parametrize("case", sorted(MALFORMED))
def test_a_malformed_config_ends_in_one_message_and_its_exit_code(case: str, tmp_path: Path):
    file, exit_code, words = MALFORMED[case]
    with pytest.raises(OffloadEvalError) as refusal:
        read(write(file, tmp_path))
    message = str(refusal.value)
    assert refusal.value.exit_code == ExitCode(exit_code)
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message
    assert len(message) < 2500


def test_the_config_that_the_malformed_ones_are_made_of_is_good(tmp_path: Path):
    assert read(write({}, tmp_path)).layer_groups[0].count == 32


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["full_attention", "sliding_attention", "llama", "auto", "M*-E", 10**30, 2**63]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)
DROPPED = object()


def places(config: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a config a value is; of a list's entries, the first two."""
    if at:
        yield at
    if isinstance(config, dict):
        for key, value in config.items():
            yield from places(value, (*at, key))
    elif isinstance(config, list):
        for number, value in enumerate(config[:2]):
            yield from places(value, (*at, number))


def edited(config: dict[str, Any], at: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    parent: Any = changed
    for key in at[:-1]:
        parent = parent[key]
    if value is DROPPED:
        del parent[at[-1]]
    else:
        parent[at[-1]] = value
    return changed


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_config_with_any_one_value_is_read_or_refused_and_never_crashes(data: st.DataObject):
    config = PRESETS[data.draw(st.sampled_from(sorted(PRESETS)))].config
    at = data.draw(st.sampled_from(list(places(config))))
    changed = edited(config, at, data.draw(st.one_of(st.just(DROPPED), JSON)))
    try:
        model_shape(changed)
    except OffloadEvalError as error:
        assert "\n" not in str(error)  # noqa: PT017 - a refusal is one of two outcomes that are fine


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_file_is_read_or_refused_and_never_crashes(tmp_path_factory: pytest.TempPathFactory, data: bytes):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(data)
    try:
        load_model_config(path)
    except InputError as error:
        assert str(path) in str(error)  # noqa: PT017 - as above


def test_no_framework_is_imported_and_presets_come_from_the_checkout():
    code = (
        "import sys; from offload_eval.store.model_config import load_model_config;"
        "load_model_config('Qwen/Qwen3-8B');"
        "print(sorted({'torch', 'transformers', 'pandas', 'numpy', 'yaml'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
    assert presets_folder() == Path(__file__).parent.parent / "configs" / "models"
