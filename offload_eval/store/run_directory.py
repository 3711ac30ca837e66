"""A run directory: what was asked, the machine, and one record for each finished cell.

    experiment.yaml   the experiment as it was run, every default filled in
    machine.json      the machine
    hardware.yaml     the hardware profile that the report holds the run against, where one was given
    records.jsonl     one record a line: of a cell, of a probe, or of the trace of either
    policy.yaml       the admission policy that a capacity search ends in
    reference/        the baseline's tokens and logits
    logs/             one file for each worker

Nothing is overwritten: what a changed experiment or machine replaces is kept under a numbered name.
"""

from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from offload_eval.core.experiment import Experiment
from offload_eval.core.hardware import HardwareProfile
from offload_eval.core.machine import Machine
from offload_eval.core.records import RunRecord, Status
from offload_eval.errors import InputError
from offload_eval.store.directory_lock import LOCK_NAME, DirectoryLock
from offload_eval.store.experiment_file import dump_experiment, load_resolved_experiment
from offload_eval.store.hardware_file import dump_hardware, load_hardware
from offload_eval.store.record_file import RecordWriter, drop_torn_line, read_records
from offload_eval.store.whole_file import part_name, supersede, write_whole

EXPERIMENT_NAME: Final = "experiment.yaml"
MACHINE_NAME: Final = "machine.json"
HARDWARE_NAME: Final = "hardware.yaml"
POLICY_NAME: Final = "policy.yaml"
RECORDS_NAME: Final = "records.jsonl"
FINISHED: Final[frozenset[Status]] = frozenset({"ok", "oom", "unsupported"})
"""Statuses that a rerun would only repeat; `timeout` and `failed` are run again on resume."""


class RunDirectory:
    """Opened by `create`, `resume` or `read`; the first two hold the directory's lock until it is closed."""

    def __init__(self, path: Path, experiment: Experiment, machine: Machine, lock: DirectoryLock | None) -> None:
        """Reads what the directory holds; use `create`, `resume` or `read`.

        Args:
            path: The directory.
            experiment: What is run in it.
            machine: Where.
            lock: Held by a writer; None opens the directory read-only.
        """
        self.path = path
        self.experiment = experiment
        self.machine = machine
        self._lock = lock
        self._records = {record.run_id: record for record in read_records(path / RECORDS_NAME)}
        self._writer = RecordWriter(path / RECORDS_NAME) if lock else None

    @classmethod
    def create(cls, path: Path, experiment: Experiment, machine: Machine) -> Self:
        """Starts a new run in a directory that is missing, or empty but for what a killed `create` left in it.

        Raises:
            InputError: The directory holds something, or another run is using it.
        """
        _require_unused(path)
        _make_directory(path)
        lock = DirectoryLock(path)
        try:
            _require_unused(path)
            write_whole(path / MACHINE_NAME, _machine_text(machine))
            # Last: a directory with an experiment in it is a run directory.
            write_whole(path / EXPERIMENT_NAME, dump_experiment(experiment))
            return cls(path, experiment, machine, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def resume(cls, path: Path, experiment: Experiment, machine: Machine, *, allow_mismatch: bool = False) -> Self:
        """Continues a run: a torn last line is dropped, and what is finished stays.

        Args:
            path: The run directory.
            experiment: What is to be run; the one in the directory, unless `allow_mismatch`.
            machine: Where; the one in the directory, unless `allow_mismatch`.
            allow_mismatch: Continue all the same. The stored experiment or machine is kept under a numbered
                name and replaced; each record keeps the spec and the machine it was made with.

        Raises:
            InputError: Not a run directory, another experiment's or machine's, or in use.
        """
        _require_run_directory(path)
        lock = DirectoryLock(path)
        try:
            _match_stored(path, experiment, machine, allow_mismatch=allow_mismatch)
            drop_torn_line(path / RECORDS_NAME)
            return cls(path, experiment, machine, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def read(cls, path: Path) -> Self:
        """Opens a run directory for reading, as it is now; a run may be writing to it.

        Raises:
            InputError: Not a run directory, or a complete line of records.jsonl that is not a record.
        """
        _require_run_directory(path)
        return cls(path, _stored_experiment(path), _stored_machine(path), lock=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets the next writer in. What was read can still be asked for."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def records(self) -> list[RunRecord]:
        """Lists one record for each cell and one for its trace; a later one takes the place of an earlier one."""
        return list(self._records.values())

    def finished_run_ids(self) -> set[str]:
        """Names the records, of cells and of traces, that a resumed run does not make again."""
        return {run_id for run_id, record in self._records.items() if record.status in FINISHED}

    def append(self, record: RunRecord) -> None:
        """Returns once the record is on the disk.

        Raises:
            RuntimeError: The directory was opened by `read`, or is closed.
            ValueError: The record would not be read back as it is, as when a number in it is not finite.
            UnableError: The disk refused it; what was recorded before is kept.
        """
        if self._writer is None:
            raise RuntimeError(f"{self.path}: not open for writing; use RunDirectory.create or resume")
        self._writer.append(record)
        self._records[record.run_id] = record

    @property
    def hardware(self) -> HardwareProfile | None:
        """The hardware profile of the run, where it has one.

        Raises:
            InputError: hardware.yaml is no profile.
        """
        path = self.path / HARDWARE_NAME
        if self.experiment.hardware is not None and not path.exists():
            raise InputError(
                f"{path}: is missing, and the run was held against it; `run --resume` with the experiment brings it "
                "back"
            )
        return load_hardware(path) if path.exists() else None

    def keep_hardware(self, profile: HardwareProfile) -> None:
        """Writes the profile that the run is held against; another one that is there is kept under a numbered name."""
        path, text = self.path / HARDWARE_NAME, dump_hardware(profile)
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: not a regular file; remove it, and run again")
        if not path.exists():
            write_whole(path, text)
        elif path.read_text(encoding="utf-8") != text:
            supersede(path, text)

    @property
    def reference_dir(self) -> Path:
        """Where the baseline's tokens and logits lie."""
        return self._folder("reference")

    @property
    def logs_dir(self) -> Path:
        """Where the workers' logs lie."""
        return self._folder("logs")

    def _folder(self, name: str) -> Path:
        folder = self.path / name
        if self._writer is not None:
            folder.mkdir(exist_ok=True)
        return folder


def _require_unused(path: Path) -> None:
    try:
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{path}: not a directory for a run: {error.strerror}; choose another --out") from error
    if names - _LEFT_BY_CREATE:
        raise InputError(f"{path}: not empty; continue the run in it with --resume, or choose another --out")
    if MACHINE_NAME in names:
        _stored_machine(path)  # refuses what `create` did not write


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be created: {error.strerror}; choose another --out") from error


def _require_run_directory(path: Path) -> None:
    for name in (EXPERIMENT_NAME, MACHINE_NAME):
        if not (path / name).is_file():
            raise InputError(f"{path}: not a run directory: it has no {name}; `offload-eval run` makes one")


def _match_stored(path: Path, experiment: Experiment, machine: Machine, *, allow_mismatch: bool) -> None:
    stored = _stored_experiment(path)
    parts = [name for name in experiment.__struct_fields__ if getattr(experiment, name) != getattr(stored, name)]
    changes = machine.differences(_stored_machine(path))
    if not allow_mismatch:
        _refuse_mismatch(path, parts, changes)
    if parts:
        supersede(path / EXPERIMENT_NAME, dump_experiment(experiment))
    if changes:
        supersede(path / MACHINE_NAME, _machine_text(machine))


def _refuse_mismatch(path: Path, parts: list[str], changes: list[str]) -> None:
    problems = []
    if parts:
        problems.append(f"a different experiment ({', '.join(parts)} differ)")
    if changes:
        problems.append(f"a different machine ({'; '.join(changes)})")
    if problems:
        remedy = "choose another --out, or continue all the same with --allow-mismatch"
        raise InputError(f"{path}: made by {' on '.join(problems)}; {remedy}")


def _stored_experiment(path: Path) -> Experiment:
    return load_resolved_experiment(path / EXPERIMENT_NAME)


def _stored_machine(path: Path) -> Machine:
    file = path / MACHINE_NAME
    try:
        return msgspec.json.decode(file.read_bytes(), type=Machine)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: not a machine: {error}") from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error


def _machine_text(machine: Machine) -> str:
    return msgspec.json.format(msgspec.json.encode(machine), indent=2).decode() + "\n"


_LEFT_BY_CREATE: Final = frozenset({LOCK_NAME, MACHINE_NAME, part_name(MACHINE_NAME), part_name(EXPERIMENT_NAME)})
"""All that a directory may hold when `create` is killed before the experiment, its last file, is in place."""
