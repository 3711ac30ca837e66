"""Files that users name: by path, or by the short name of one that comes with offload-eval."""

import sysconfig
from pathlib import Path
from typing import Final

import offload_eval
from offload_eval.errors import InputError
from offload_eval.store.origin import show_value

_MAX_SHOWN: Final = 500


def shipped_folder(name: str) -> Path:
    """Where the files of one kind are: configs/`name` of the checkout, or the installation's data folder."""
    checkout = Path(offload_eval.__file__).parent.parent / "configs" / name
    installed = Path(sysconfig.get_path("data")) / "share" / "offload-eval" / name
    return checkout if checkout.is_dir() else installed


def existing_path(location: str | Path, relative_to: Path | None) -> Path | None:
    """The path that a location names, if there is something.

    Args:
        location: As typed; `~` is expanded.
        relative_to: The folder that a relative path starts from; None: the working directory.

    Raises:
        InputError: The location cannot be a path, or cannot be looked at.
    """
    try:
        path = (relative_to or Path()) / Path(location).expanduser()
        return path if path.exists() else None
    except OSError as error:
        raise InputError(f"{show_location(location)}: cannot be read: {error.strerror}") from error
    except (RuntimeError, ValueError) as error:
        raise InputError(f"{show_location(location)}: is no path: {error}") from error


def show_location(location: str | Path) -> str:
    """A location for a message: quoted and cut where it would spoil the line."""
    text = str(location)
    return text if text.isprintable() and len(text) <= _MAX_SHOWN else show_value(text)
