"""Run directories below a directory."""

import os
from pathlib import Path

from offload_eval.errors import InputError
from offload_eval.store.run_directory import EXPERIMENT_NAME, MACHINE_NAME, RECORDS_NAME

_SIGNS = frozenset({EXPERIMENT_NAME, MACHINE_NAME, RECORDS_NAME})


def find_run_directories(root: Path) -> list[Path]:
    """Lists `root` and what lies below it wherever a file of a run directory is, by name.

    Not every one is a run directory: reading it tells. Hidden folders and links to folders are not entered.

    Raises:
        InputError: `root` is not a directory.
    """
    if not root.is_dir():
        raise InputError(f"{root}: is not a directory")
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if not name.startswith(".")]
        if _SIGNS & set(files):
            found.append(Path(folder))
    return sorted(found)
