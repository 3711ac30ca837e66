"""What the user can get wrong, and the exit code each kind of failure ends with."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command."""

    DONE = 0
    FELL_SHORT = 1
    BAD_INPUT = 2
    ENVIRONMENT = 3
    INTERRUPTED = 130


class OffloadEvalError(Exception):
    """A failure with one clear message for the user and a documented exit code."""

    exit_code = ExitCode.FELL_SHORT


class InputError(OffloadEvalError):
    """Bad input: the message names the file, the path inside it, the value and what is allowed."""

    exit_code = ExitCode.BAD_INPUT


class UnableError(OffloadEvalError):
    """This environment cannot do what was asked: the message names the missing piece and how to add it."""

    exit_code = ExitCode.ENVIRONMENT


class CellUnsupportedError(UnableError):
    """A cell asks for what the model or the device turns out not to have; it alone is given up."""


class HostCapError(MemoryError):
    """A buffer of the link would pass the cap on host memory: the budget's ledger ran out, not the machine's."""


class UnknownModelStructureError(UnableError):
    """The arithmetic does not understand a field of the model's config.json, and refuses to guess."""


class UpstreamChangedError(UnableError):
    """transformers or torch no longer offers a seam this package stands on; the message says which."""
