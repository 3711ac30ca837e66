"""What a plan is computed from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offload_eval.bounds.cached_layers import Lengths
from offload_eval.bounds.grid import PlanStrategy
from offload_eval.bounds.kv_format import KvFormat, kv_format
from offload_eval.bounds.kv_views import Counts
from offload_eval.bounds.long_requests import RequestLimit, check_request, request_limit
from offload_eval.core.experiment import BITS_PER_VALUE, BudgetSpec
from offload_eval.core.hardware import HardwareProfile
from offload_eval.core.plan import LongRequest, PlanSpec
from offload_eval.core.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class PlanWorkload:
    """One combination of lengths and batch."""

    name: str
    prompt_tokens: int
    output_tokens: int
    batch_size: int

    @property
    def cached_tokens(self) -> int:
        """Tokens a session holds when generation ends."""
        return self.prompt_tokens + max(self.output_tokens - 1, 0)


@dataclass(frozen=True, kw_only=True)
class PlanModel:
    """What is known of the model."""

    name: str
    source: str | None
    shape: ModelShape
    weights_bytes: int | None
    """None where nothing states them; only a budget needs them."""
    weights_source: str
    dtype: str
    config_dtype: str | None = None
    """The dtype that the config names; None where it names none."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Everything that is asked."""

    model: PlanModel
    budget: BudgetSpec | None
    workloads: Sequence[PlanWorkload]
    strategies: Sequence[PlanStrategy]
    spec: PlanSpec
    hardware: HardwareProfile | None = None
    """The device and its link; None: the link has no times."""
    budget_is_hardwares: bool = False
    """Whether the profile's memory is the device budget, since no other is stated."""

    @property
    def bits(self) -> int:
        """Of a value in the model's dtype."""
        return BITS_PER_VALUE[self.model.dtype]

    @property
    def limit(self) -> RequestLimit | None:
        """The longest request that is admitted."""
        return request_limit(self.spec.long_requests, self.model.shape.max_position_embeddings)

    def check(self, name: str, prompt_tokens: int, output_tokens: int) -> LongRequest | None:
        """What becomes of a request; None where it is not too long."""
        return check_request(name, prompt_tokens, output_tokens, self.limit, self.spec.long_requests)

    @property
    def stored(self) -> KvFormat:
        """How a paged engine stores a row."""
        return kv_format(self.spec.paging, self.bits)


def columns(workloads: Sequence[PlanWorkload]) -> tuple[Lengths, Counts]:
    """The lengths and the batch sizes of workloads, as arrays."""
    lengths = Lengths(
        prompt_tokens=np.array([each.prompt_tokens for each in workloads], np.int64),
        output_tokens=np.array([each.output_tokens for each in workloads], np.int64),
    )
    return lengths, np.array([each.batch_size for each in workloads], np.int64)
