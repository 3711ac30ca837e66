"""One writer to a run directory at a time."""

import fcntl
import os
from pathlib import Path
from typing import Final

from offload_eval.errors import InputError

LOCK_NAME: Final = ".lock"


class DirectoryLock:
    """Held from construction until `release`; the kernel releases it when the process dies.

    Raises:
        InputError: Another run holds it, or the directory cannot be locked.
    """

    def __init__(self, directory: Path) -> None:
        self._descriptor = -1
        try:
            self._descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
            # flock belongs to the open file: a second opener in this process is refused too.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            problem = "another run is using this directory; wait for it to end, or choose another --out"
            raise InputError(f"{directory}: {problem}") from error
        except OSError as error:
            self.release()
            raise InputError(f"{directory}: cannot be locked for writing: {error.strerror}") from error

    def release(self) -> None:
        """Lets the next writer in; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
