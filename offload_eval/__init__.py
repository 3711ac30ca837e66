"""Measures what offloading or quantizing the KV cache buys, beside the analytic bound.

Importing this package imports neither torch nor transformers nor pandas.
"""

from typing import TYPE_CHECKING

from offload_eval.bounds.admission import admission_limit
from offload_eval.bounds.kv import kv_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from offload_eval.loaded_run import Run

__version__ = "0.1.0"
__all__ = ["__version__", "admission_limit", "kv_bytes", "load_run"]


def load_run(path: "str | Path") -> "Run":
    """Reads a run directory for a notebook or a script; the directory is not changed.

    Args:
        path: What `offload-eval run --out` wrote, finished or not.

    Returns:
        A `Run`: `.experiment`, `.machine`, `.records` (raw, typed), `.cells`, `.traces`, `.limits`, and tidy pandas
        frames by `.frame()` and `.trials()`. pandas is imported by the first frame.

    Raises:
        InputError: Not a run directory, or a line of its records that cannot be read; the message says which.
    """
    from offload_eval.loaded_run import load_run as load

    return load(path)
