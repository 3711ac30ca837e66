"""One cell: everything that decides its result, and the name that follows from it."""

import hashlib
from typing import Final, Literal, get_args

import msgspec

from offload_eval.core.base import Strict
from offload_eval.core.experiment import (
    BudgetSpec,
    CpuSpec,
    DeviceName,
    MeasurementPlan,
    ModelSpec,
    StrategySpec,
    Workload,
)

Probe = Literal["fit", "verify", "time", "point"]
"""What a probe of the capacity search is for. fit: whether a batch runs to its end under the cap. verify: the limit
again. time: TTFT and TPOT at a batch. point: a peak for the calibration."""
Drill = Literal["oom_prefill", "oom_decode", "host_refused", "killed", "hung"]
"""A failure that is brought about on purpose, to see how the worker comes back."""
Role = Literal["cell", "fit", "verify", "time", "point", "oom_prefill", "oom_decode", "host_refused", "killed", "hung"]
"""What a record is of: a cell of the experiment, a probe, or a drill."""
PROBES: Final[tuple[Probe, ...]] = get_args(Probe)
DRILLS: Final[tuple[Drill, ...]] = get_args(Drill)


class RunSpec(Strict, frozen=True, kw_only=True):
    """One cell: everything that decides its result, and nothing else."""

    experiment: str
    model: ModelSpec
    model_fingerprint: str
    """Hash over the model's config and its weight files' names, sizes and first and last bytes."""
    prompt_fingerprint: str
    """Hash of the prompt tokens."""
    device: DeviceName
    cpu: CpuSpec
    budget: BudgetSpec
    workload: Workload
    strategy: StrategySpec
    baseline: StrategySpec
    measurement: MeasurementPlan
    role: Role = "cell"

    @property
    def is_baseline(self) -> bool:
        """Whether this cell records the tokens the others are given."""
        return self.strategy == self.baseline

    @property
    def reference_key(self) -> str:
        """Names the files of the prompt and of the baseline's tokens and logits: equal where those are equal."""
        decides = (self.model, self.model_fingerprint, self.workload, self.prompt_fingerprint, self.baseline)
        return f"{self.workload.label}-{content_hash(decides)}"

    @property
    def attn_implementation(self) -> str:
        """The attention that the cell runs with."""
        return self.workload.attn_implementation or self.model.attn_implementation

    @property
    def label(self) -> str:
        """Workload and strategy, for people."""
        return f"{self.workload.label} / {self.strategy.label}"


_LEFT_OUT_AT: Final[dict[str, object]] = {
    "prefill_chunk_tokens": None,
    "attn_implementation": None,
    "compile": None,
    "resident_share": None,
    "resident_bytes": None,
    "host_dtype": "native",
    "role": "cell",
    "host_bytes": None,
}
"""Fields that came after the first records, and the value that says what was so before: there they are left out of a
cell's name, which stays what it was."""


def content_hash(value: object) -> str:
    """Sixteen hex digits over the canonical JSON of a value: equal content, equal hash."""
    # Unordered collections are put in order here; fields of a struct keep theirs, which the encoder would not know.
    content = _as_before(msgspec.to_builtins(value, order="deterministic"))
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]


def _as_before(value: object) -> object:
    if isinstance(value, dict):
        return {
            key: _as_before(each)
            for key, each in value.items()
            if key not in _LEFT_OUT_AT or each != _LEFT_OUT_AT[key]
        }
    return [_as_before(each) for each in value] if isinstance(value, list | tuple) else value
