"""Files that are there whole or not at all, whenever the process ends."""

import os
from itertools import count
from pathlib import Path

from offload_eval.store.record_file import sync_directory


def part_name(name: str) -> str:
    """What a file is called until it is whole."""
    return f".{name}.part"


def write_whole(path: Path, text: str) -> None:
    """Puts a whole file at `path`, or nothing; one that is there is replaced."""
    part = path.with_name(part_name(path.name))
    try:
        with part.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def supersede(path: Path, text: str) -> None:
    """Keeps the old file under the first free numbered name, and writes the new one."""
    numbered = (path.with_stem(f"{path.stem}.{number}") for number in count(1))
    write_whole(next(name for name in numbered if not name.exists()), path.read_text(encoding="utf-8"))
    write_whole(path, text)
