"""Kind of strategy -> "module:Class". Naming a strategy here is all that registers it."""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from offload_eval.core.experiment import StrategySpec

if TYPE_CHECKING:
    from offload_eval.strategies.base import CacheStrategy

STRATEGIES: Final = {
    "dynamic": "offload_eval.strategies.dynamic:Dynamic",
    "static": "offload_eval.strategies.static:Static",
    "offloaded": "offload_eval.strategies.offloaded:Offloaded",
    "offloaded_static": "offload_eval.strategies.offloaded_static:OffloadedStatic",
    "streamed": "offload_eval.strategies.streamed:Streamed",
    "quantized": "offload_eval.strategies.quantized:Quantized",
}


def load_strategy(spec: StrategySpec) -> "CacheStrategy":
    """Imports the strategy's module and constructs it; this imports torch and transformers."""
    module, _, name = STRATEGIES[spec.kind].partition(":")
    strategy: CacheStrategy = getattr(import_module(module), name)(spec)
    return strategy
