"""What an admission policy becomes in other tools: options and values, each with its derivation and its standing."""

from typing import Final, Literal, get_args

from offload_eval.core.base import Strict
from offload_eval.core.experiment import ModelSpec
from offload_eval.core.limits import Lengths
from offload_eval.core.records import Evidence

Target = Literal["vllm", "sglang", "kubernetes"]
TARGETS: Final[tuple[Target, ...]] = get_args(Target)
Standing = Literal["exact", "carried", "nearest"]
"""exact: arithmetic on what was asked for. carried: a limit of transformers' caches in one batch, which an engine that
pages and schedules does not share: where to start. nearest: the closest that the target offers; not what was run."""


class Setting(Strict, frozen=True, kw_only=True):
    """One option of one target."""

    target: Target
    name: str
    """As the target spells it."""
    value: str | None
    """As it is typed; empty for an option that takes no value. None: leave it out, `derivation` says why."""
    derivation: str
    """Where the value comes from, in words and numbers."""
    standing: Standing
    caution: str | None = None
    """What has to be read before the value is used."""


class HandOff(Strict, frozen=True, kw_only=True):
    """The settings of one strategy of a policy."""

    policy: str
    model: ModelSpec
    strategy: str
    """Label."""
    chosen: str
    """Why this strategy, in words."""
    lengths: Lengths
    """The longest class at which the strategy admits a session."""
    evidence: Evidence
    """Rung of the limit there."""
    cautions: tuple[str, ...] = ()
    """Of all settings; every block that is pasted begins with them."""
    settings: tuple[Setting, ...]
    notes: tuple[str, ...] = ()
