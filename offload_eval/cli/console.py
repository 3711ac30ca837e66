"""Where output goes: results to standard output, progress and errors to standard error."""

import os
import sys
from typing import Final, NoReturn

from rich.console import Console

PIPE_WIDTH: Final = 120
PIPE_CLOSED: Final = 141
"""Exit code when the reader of standard output went away, as a shell shows it for any tool."""


def hush_standard_output() -> None:
    """The interpreter flushes standard output once more at exit, and would complain of a reader that has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _PipeConsole(Console):
    """Ends the process quietly when its reader has gone, as in `offload-eval report DIR | head`."""

    def on_broken_pipe(self) -> NoReturn:
        self.quiet = True
        hush_standard_output()
        raise SystemExit(PIPE_CLOSED)


def result_console() -> Console:
    """Returns the console for what was asked for; in a pipe, wide enough for every table."""
    is_free = not (sys.stdout and sys.stdout.isatty()) and "COLUMNS" not in os.environ
    return _PipeConsole(width=PIPE_WIDTH if is_free else None)


def progress_console() -> Console:
    """Returns the console for progress and errors, which never mixes with results."""
    return _PipeConsole(stderr=True)


def print_json(text: str) -> None:
    """Writes a JSON document to standard output as it is: not wrapped, not colored."""
    result_console().out(text, highlight=False)


def print_error(message: str) -> None:
    """Writes one line to standard error."""
    progress_console().out(f"error: {' '.join(message.split())}", highlight=False)
