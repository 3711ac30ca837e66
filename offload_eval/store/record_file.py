"""A JSON Lines file of records: one line a record, on the disk before the next cell starts."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from offload_eval.core.records import PHASES, SCHEMA_VERSION, RunRecord
from offload_eval.errors import InputError, UnableError


class _Header(msgspec.Struct):
    schema_version: int


RawRecord = dict[str, Any]
"""A record as its line has it, of any version."""


def _with_first_fields(raw: RawRecord) -> RawRecord:
    """Completes the first records: no fingerprint of the prompt, and of a failure its pass and phase as one text.

    Which prompt it was stays unknown: its fingerprint is empty, and no newer cell's is.
    """
    completed = dict(raw)
    if isinstance(spec := raw.get("spec"), dict):
        completed["spec"] = {"prompt_fingerprint": ""} | spec
    failure = raw.get("failure")
    if isinstance(failure, dict) and "stage" not in failure and isinstance(place := failure.get("phase"), str):
        phase = place.rpartition("/")[2]
        stage = place.removesuffix(f"/{phase}")
        completed["failure"] = failure | {"stage": stage, "phase": phase if phase in PHASES else None}
    return completed


UPGRADES: Final[dict[int, Callable[[RawRecord], RawRecord]]] = {1: _with_first_fields}
"""For each version what makes its raw record one of the next version; for the newest what completes its earliest
records, whose form changed without a new version. Version 2 turns the entry of 1 into the step to it."""

_HEADERS = msgspec.json.Decoder(_Header)
_RECORDS = msgspec.json.Decoder(RunRecord)


def read_records(path: Path) -> list[RunRecord]:
    """Reads every complete line; a last one without its newline is the cell in flight, and is left out.

    Raises:
        InputError: A complete line is not a record, or is one of an unknown schema version.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    lines = content.split(b"\n")[:-1]
    return [_decode(line, path, number) for number, line in enumerate(lines, start=1)]


def drop_torn_line(path: Path) -> None:
    """Cuts off what follows the last newline: the rest of a line that was never finished."""
    if not path.exists():
        return
    content = path.read_bytes()
    complete_bytes = content.rfind(b"\n") + 1
    if complete_bytes < len(content):
        with path.open("r+b") as file:
            file.truncate(complete_bytes)
            os.fsync(file.fileno())


class RecordWriter:
    """Appends records to one file, which it creates."""

    def __init__(self, path: Path) -> None:
        self._path = path
        is_new = not path.exists()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if is_new:
            sync_directory(path.parent)

    def append(self, record: RunRecord) -> None:
        """Returns once the record is on the disk.

        Raises:
            ValueError: The record would not be read back as it is, as when a number in it is not finite.
            UnableError: The disk refused it; nothing of it is left in the file.
        """
        line = msgspec.json.encode(record)
        _require_round_trip(record, line)
        size_bytes = os.fstat(self._descriptor).st_size
        try:
            _write_all(self._descriptor, line + b"\n")
            os.fsync(self._descriptor)
        except OSError as error:
            # A torn line in the middle would make every later one unreadable.
            os.ftruncate(self._descriptor, size_bytes)
            problem = f"record {record.run_id} cannot be written: {error.strerror}"
            raise UnableError(f"{self._path}: {problem}; mend that, and continue with --resume") from error

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def sync_directory(path: Path) -> None:
    """Puts the names in a directory on the disk: a synced file is lost with a name that isn't."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _require_round_trip(record: RunRecord, line: bytes) -> None:
    try:
        same = _RECORDS.decode(line) == record
    except msgspec.ValidationError as error:
        raise ValueError(f"record {record.run_id} cannot be stored: {error}") from error
    if not same:
        raise ValueError(f"record {record.run_id} cannot be stored: it does not read back equal")


def _decode(line: bytes, path: Path, number: int) -> RunRecord:
    try:
        version = _HEADERS.decode(line).schema_version
        if (refusal := _refusal(version)) is not None:
            raise InputError(f"{path}: line {number}: {refusal}")
        return _record(line, version)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: line {number}: not a record: {error}") from error


def _refusal(version: int) -> str | None:
    if version in UPGRADES:
        return None
    if version > SCHEMA_VERSION:
        return (
            f"schema_version {version} is newer than {SCHEMA_VERSION}, the newest that this release of offload-eval "
            "reads; the release that wrote it, or a later one, reads it"
        )
    return f"schema_version {version} is unknown; allowed: {', '.join(map(str, UPGRADES))}"


def _record(line: bytes, version: int) -> RunRecord:
    """Reads a line of a known version, by way of its raw record only where that is needed: lines are long."""
    if version < SCHEMA_VERSION:
        return _upgraded(line, version)
    try:
        return _RECORDS.decode(line)
    except msgspec.ValidationError:
        return _upgraded(line, version)


def _upgraded(line: bytes, version: int) -> RunRecord:
    raw: RawRecord = msgspec.json.decode(line)
    for each in range(version, SCHEMA_VERSION + 1):
        raw = UPGRADES[each](raw)
    return msgspec.convert(raw | {"schema_version": SCHEMA_VERSION}, RunRecord)
