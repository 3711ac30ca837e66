"""Measures what offloading or quantizing the KV cache buys, beside the analytic bound.

Importing this package imports neither torch nor transformers nor pandas.
"""

from offload_eval.bounds.admission import admission_limit
from offload_eval.bounds.kv import kv_bytes

__version__ = "0.1.0"
__all__ = ["__version__", "admission_limit", "kv_bytes"]
