"""The baseline's tokens and logits of one workload, on disk, where every worker can read them.

No framework is imported: the session writes prompts without one.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from offload_eval.core.experiment import Workload
from offload_eval.errors import UnableError
from offload_eval.execution.messages import TokenArray


class ReferenceFiles:
    """The prompt, reference tokens and reference logits that all cells with one `RunSpec.reference_key` share."""

    def __init__(self, directory: Path, reference_key: str) -> None:
        self.prompt = directory / f"{reference_key}.prompt.npy"
        self.tokens = directory / f"{reference_key}.tokens.npy"
        self.logits = directory / f"{reference_key}.logits.npy"

    def is_complete(self, workload: Workload, *, with_logits: bool) -> bool:
        """Whether the baseline has left, whole and readable, all that a cell of the workload needs."""
        shape_BN = (workload.batch_size, workload.output_tokens)
        if _shape(self.tokens) != shape_BN:
            return False
        return not with_logits or (_shape(self.logits) or ())[:2] == shape_BN[::-1]

    def save_prompt(self, tokens: TokenArray) -> None:
        """Writes the prompt, whole or not at all."""
        _save_tokens(self.prompt, tokens)

    def load_prompt(self) -> TokenArray:
        """The prompt `[batch, prompt_tokens]`."""
        return _load_tokens(self.prompt)

    def load_tokens(self) -> TokenArray | None:
        """The reference tokens `[batch, output_tokens]`; None where the baseline has recorded none."""
        return None if _shape(self.tokens) is None else _load_tokens(self.tokens)

    def open_logits(self) -> npt.NDArray[np.float32]:
        """The reference logits `[output_tokens, batch, vocab]`, mapped from disk."""
        logits: npt.NDArray[np.float32] = np.load(self.logits, mmap_mode="r")
        return logits

    def create_logits(self, shape_NBV: tuple[int, int, int]) -> npt.NDArray[np.float32]:
        """A file of that shape, mapped for writing; the tokens of an older reference go first."""
        self.tokens.unlink(missing_ok=True)
        return np.lib.format.open_memmap(self.logits, mode="w+", dtype=np.float32, shape=shape_NBV)

    def save_tokens(self, tokens: TokenArray) -> None:
        """Writes the tokens, last of all: a reference whose tokens exist is complete."""
        _save_tokens(self.tokens, tokens)

    def drop_logits(self) -> None:
        """Removes the logits, which are large and serve no finished run."""
        self.logits.unlink(missing_ok=True)


def _shape(path: Path) -> tuple[int, ...] | None:
    """Shape of a stored array; None where there is none that can be read."""
    try:
        return tuple(np.load(path, mmap_mode="r").shape)
    except (OSError, ValueError, EOFError):
        return None


def _save_tokens(path: Path, tokens: TokenArray) -> None:
    partial = path.with_suffix(".partial.npy")
    try:
        np.save(partial, tokens)
    except OSError as error:  # numpy's own has no words for a full disk
        partial.unlink(missing_ok=True)
        reason = error.strerror or str(error) or "the disk refused it"
        raise UnableError(f"{path}: cannot be written: {reason}; mend that, and go on with --resume") from error
    partial.replace(path)


def _load_tokens(path: Path) -> TokenArray:
    tokens: TokenArray = np.load(path)
    return tokens
