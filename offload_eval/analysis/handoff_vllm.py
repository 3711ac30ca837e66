"""Settings of `vllm serve`.

Source: vLLM at commit 002f10e0, vllm/config/cache.py: gpu_memory_utilization (a share of the whole card for this
instance; 0.92 by default, 0.9 in 0.16), cache_dtype, kv_offloading_size (GiB, summed over tensor-parallel
ranks; None: no offloading), kv_offloading_backend (`native` or `lmcache`). vllm/v1/worker/utils.py, request_memory:
ceil(total memory * utilization), refused unless that much is free at start-up. vllm/v1/worker/gpu_worker.py: of it,
weights, the profiled activation peak and the growth of what is not torch's are subtracted, and the KV cache gets the
rest; the snapshot is taken after the device context exists. vllm/config/vllm.py: `native` becomes the connector
OffloadingConnector with cpu_bytes_to_use = size * 2**30.

Source: vLLM pull requests 27621 (the two offloading options, October 2025), 32421 (`native` by default, asked for
0.14), 24498 (cpu_bytes_to_use, January 2026, for num_cpu_blocks of 0.11), 36216 and 48549 (swap_space removed from
0.18.0 on); "Inside vLLM's New KV Offloading Connector", blog.vllm.ai, 8 January 2026: offloaded blocks serve shared
prefixes and preempted requests.
"""

import json
from typing import Final

from offload_eval.analysis.handoff_choice import Choice
from offload_eval.analysis.handoff_engine import (
    card,
    dtype_setting,
    format_setting,
    fraction,
    host_rows_words,
    length_setting,
    memory_caution,
    rows_caution,
    running_setting,
)
from offload_eval.core.handoff import Setting
from offload_eval.units import GIB, format_bytes

_NARROWER: Final = (
    "Recent releases also take int4_per_token_head and others on some attention backends: other scales, to be "
    "measured there."
)


def vllm_settings(choice: Choice) -> tuple[Setting, ...]:
    """The options, in the order they are typed."""
    return (
        dtype_setting(choice, "vllm"),
        _utilization(choice),
        length_setting(choice, "vllm", "--max-model-len"),
        running_setting(choice, "vllm", "--max-num-seqs"),
        format_setting(choice, "vllm", _NARROWER),
        *_offloading(choice),
    )


def _utilization(choice: Choice) -> Setting:
    budget, whole = choice.policy.budget, card(choice)
    share = fraction(budget.device_bytes - budget.reserve_bytes, whole.memory_bytes)
    sizes = (
        f"({format_bytes(budget.device_bytes)} budget - {format_bytes(budget.reserve_bytes)} reserve) / {whole.text}"
    )
    return Setting(
        target="vllm",
        name="--gpu-memory-utilization",
        value=share if whole.is_known else None,
        derivation=f"{sizes} is not a share of it: the budget does not fit this card."
        if share is None
        else f"{sizes} = {share}, rounded down. The engine takes this share of the card for weights, the activation "
        "peak that it profiles, what libraries allocate, and the KV pool, so the "
        f"{format_bytes(budget.runtime_bytes)} runtime of the budget stay in. Not in it is the device context, which "
        "exists before the engine looks: where the budget is strict, lower the share by that.",
        standing="exact",
        caution=memory_caution(choice, whole.caution),
    )


def _offloading(choice: Choice) -> tuple[Setting, ...]:
    """Host rows as a buffer for reuse; nothing where the strategy holds none."""
    rows_bytes = choice.host_rows_bytes
    if rows_bytes == 0:
        return ()
    hundredths = -(-rows_bytes * 100 // GIB)
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": rows_bytes},
    }
    size = Setting(
        target="vllm",
        name="--kv-offloading-size",
        value=f"{hundredths // 100}.{hundredths % 100:02d}",
        derivation=f"{host_rows_words(choice)}, in GiB, rounded up; of all tensor-parallel ranks together. It is a "
        "buffer of blocks for reuse, not room for running requests. The same for releases with cpu_bytes_to_use but "
        f"without this option: --kv-transfer-config '{json.dumps(connector, separators=(',', ':'))}'. Models with "
        "windows or states also need --disable-hybrid-kv-cache-manager before 0.21.",
        standing="nearest",
        caution=rows_caution(choice),
    )
    backend = Setting(
        target="vllm",
        name="--kv-offloading-backend",
        value="native",
        derivation="vLLM's own copies to host memory. The default of recent releases; the first ones with the option "
        "had none.",
        standing="nearest",
    )
    return (size, backend)
