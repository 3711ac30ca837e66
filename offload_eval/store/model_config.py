"""Reads a model's config.json: a file, a folder that holds one, or a preset that comes with offload-eval.

Nothing is downloaded. A preset is a config.json with one more top-level key, `preset`; see configs/models/README.md.
"""

import difflib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offload_eval.errors import InputError
from offload_eval.store.locations import existing_path, shipped_folder, show_location
from offload_eval.store.origin import show_value

CONFIG_NAME: Final = "config.json"
INDEX_NAME: Final = "model.safetensors.index.json"
MAX_BYTES: Final = 10_000_000
"""Of a config.json; real ones have some thousand bytes."""
PRESET_BITS: Final = 16
"""Bits that a preset's parameters count with."""
_MAX_INDEX_BYTES: Final = 200_000_000
_NEEDED: Final = "a config.json is needed, or a folder that holds one"
_UTF16: Final = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model's config, and what is known of its weights without reading any."""

    name: str
    """The preset's hub name, or the folder's or the file's name."""
    config: dict[str, Any]
    """What the file holds, without the key `preset`."""
    origin: Path
    """The file that was read."""
    source: str | None = None
    """Where a preset's fields come from; None for a file without the key `preset`."""
    weights_bytes: int | None = None
    """A folder's safetensors, or a preset's parameters; None where neither is there."""
    weights_source: str | None = None
    """Where `weights_bytes` comes from, in words."""


def load_model_config(
    location: str | Path, relative_to: Path | None = None, weight_bits: int = PRESET_BITS
) -> ModelConfig:
    """Reads the config that a location names.

    Args:
        location: A config.json under any name, a folder with one, or a preset's short or hub name in any case. A file
            or folder that exists wins over a preset; a `Path` is never a preset.
        relative_to: The folder that a relative path starts from; None: the working directory.
        weight_bits: Bits that a preset's parameters count with.

    Returns:
        The config, with the bytes of its weights where they can be told.

    Raises:
        InputError: There is no such thing, or it is no config; the message names the file.
    """
    if not str(location).strip():
        raise InputError(f"the model is given as {str(location)!r}; {_NEEDED}, or the name of a preset")
    path = existing_path(location, relative_to)
    if path is None and isinstance(location, str):
        path = _find_preset(location)
    if path is None:
        raise InputError(f"{show_location(location)}: {_not_found(str(location))}")
    if path.is_dir():
        return _from_folder(path, weight_bits)
    return _described(path, _read_object(path, MAX_BYTES), weight_bits)


def preset_names() -> list[str]:
    """The short names of all presets, sorted."""
    return sorted(path.stem for path in presets_folder().glob("*.json"))


def presets_folder() -> Path:
    """Where the presets are: configs/models of the checkout, or the installation's data folder."""
    return shipped_folder("models")


def _find_preset(name: str) -> Path | None:
    """By short name; the files are opened only for a name with a slash, as hub names have."""
    wanted, files = name.casefold(), sorted(presets_folder().glob("*.json"))
    by_short_name = {path.stem.casefold(): path for path in files}
    if wanted in by_short_name or "/" not in name:
        return by_short_name.get(wanted)
    return next((path for path in files if _hub_name(path).casefold() == wanted), None)


def _hub_name(path: Path) -> str:
    preset = _read_object(path, MAX_BYTES).get("preset")
    return str(preset.get("name")) if isinstance(preset, dict) else path.stem


def _not_found(name: str) -> str:
    known = preset_names()
    near = difflib.get_close_matches(name.rstrip("/").rpartition("/")[2].casefold(), known, n=3)
    presets = f"near presets: {', '.join(near)}" if near else f"no preset is near ({len(known)} are known)"
    return f"no such file or folder, and no preset; {presets}. Nothing is downloaded: {_NEEDED}, or a preset's name"


def _from_folder(folder: Path, weight_bits: int) -> ModelConfig:
    path = folder / CONFIG_NAME
    if not path.exists():
        has_gguf = any(folder.glob("*.gguf"))
        raise InputError(f"{folder}: holds no {CONFIG_NAME}" + ("; a GGUF file is not read" if has_gguf else ""))
    described = _described(path, _read_object(path, MAX_BYTES), weight_bits)
    weights_bytes, weights_source = _folder_weights(folder) or (described.weights_bytes, described.weights_source)
    return ModelConfig(
        name=described.name,
        config=described.config,
        origin=path,
        source=described.source,
        weights_bytes=weights_bytes,
        weights_source=weights_source,
    )


def _folder_weights(folder: Path) -> tuple[int, str] | None:
    """The files that the index names, or its total where one of them is absent; without an index, what is there."""
    index_path = folder / INDEX_NAME
    files = [path for path in sorted(folder.glob("*.safetensors")) if path.is_file()]
    if index_path.is_file():
        index = _read_object(index_path, _MAX_INDEX_BYTES)
        shards = _shards(folder, index)
        if not shards or not all(path.is_file() for path in shards):
            return _index_total(index_path, index)
        files = shards
    elif folder / "model.safetensors" in files:
        files = [folder / "model.safetensors"]
    if not files:
        return None
    noun = "file" if len(files) == 1 else "files"
    return sum(path.stat().st_size for path in files), f"sum of {len(files)} safetensors {noun}"


def _shards(folder: Path, index: dict[str, Any]) -> list[Path]:
    weight_map = index.get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    return [folder / name for name in sorted({name for name in names if isinstance(name, str)})]


def _index_total(path: Path, index: dict[str, Any]) -> tuple[int, str] | None:
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is None:
        return None
    if isinstance(total, bool) or not isinstance(total, int | float) or total < 1 or total != total // 1:
        raise InputError(f"{path}: metadata.total_size is {show_value(total)}; allowed: an integer >= 1")
    return int(total), f"metadata.total_size of {path.name}"


def _described(path: Path, content: dict[str, Any], weight_bits: int) -> ModelConfig:
    config = {key: value for key, value in content.items() if key != "preset"}
    if not config:
        raise InputError(f"{path}: holds no field of a config; {_NEEDED}")
    absolute = path.absolute()
    if "preset" not in content:
        name = absolute.resolve().parent.name if path.name == CONFIG_NAME else absolute.stem
        return ModelConfig(name=name, config=config, origin=path)
    preset = content["preset"]
    name, source, parameters = _preset_fields(path, preset)
    return ModelConfig(
        name=name,
        config=config,
        origin=path,
        source=source,
        weights_bytes=None if parameters is None else parameters * weight_bits // 8,
        weights_source=None if parameters is None else f"{parameters:,} parameters at {weight_bits} bits",
    )


def _preset_fields(path: Path, preset: Any) -> tuple[str, str, int | None]:
    if not isinstance(preset, dict) or set(preset) != {"name", "source", "parameters"}:
        raise InputError(f"{path}: preset: {show_value(preset)}; allowed: an object of name, source and parameters")
    for key in ("name", "source"):
        if not isinstance(preset[key], str) or not preset[key]:
            raise InputError(f"{path}: preset.{key}: {show_value(preset[key])}; allowed: text")
    parameters = preset["parameters"]
    if parameters is not None and (type(parameters) is not int or parameters < 1):
        raise InputError(f"{path}: preset.parameters: {show_value(parameters)}; allowed: an integer >= 1 or null")
    return preset["name"], preset["source"], parameters


class _DuplicateKeyError(ValueError):
    """A JSON object names a key twice."""


def _read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Reads a JSON object. Bare Infinity and NaN are taken, as Python writes them; a byte order mark is skipped."""
    text = _read_text(path, max_bytes)
    try:
        content = json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error
    except _DuplicateKeyError as error:
        raise InputError(f"{path}: the key {error.args[0]!r} is given twice in one object; keep one") from error
    except RecursionError as error:
        raise InputError(f"{path}: nested too deeply for a config") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON that can be read: {error}") from error
    if not isinstance(content, dict) or not content:
        seen = "an empty object" if content == {} else show_value(content)
        raise InputError(f"{path}: holds {seen}; allowed: a JSON object with the model's fields")
    return content


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise _DuplicateKeyError(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return content


def _read_text(path: Path, max_bytes: int) -> str:
    if not path.is_file():
        raise InputError(f"{path}: not a regular file; {_NEEDED}")
    try:
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                raise InputError(f"{path}: a GGUF file; {_NEEDED}")
            file.seek(0)
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if b"\0" in data and not data.startswith(_UTF16):
        raise InputError(f"{path}: a binary file; {_NEEDED}")
    if len(data) > max_bytes:
        raise InputError(f"{path}: more than {max_bytes:,} bytes, which no config has; {_NEEDED}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
