"""What each column of a report is: its rung, its formula and how to read it."""

from typing import Final

from offload_eval.analysis.capacity import SESSIONS_BY_PEAK_ASSUMPTION
from offload_eval.reporting.method_type import RUN, Method
from offload_eval.reporting.method_verdict_columns import VERDICT_METHODS

_HOST_LEDGER: Final = (
    "Where the budget states host_bytes, the smaller of both ledgers; (host): the host's admits fewer. On CUDA each "
    "buffer counts as the pinned allocator rounds it."
)
METHODS: Final = (
    *VERDICT_METHODS,
    Method(
        "analytic sessions",
        "analytic",
        "(device - weights - runtime - reserve - fixed KV) // KV device bytes per session",
        f"An upper bound: see the assumptions of the analytic card. {_HOST_LEDGER}",
        where="both",
    ),
    Method(
        "sessions by peak",
        f"{RUN}, extrapolated",
        "(device - start - runtime - reserve) // ceil((max(prefill peak, decode peak) - start) / batch_size)",
        f"{SESSIONS_BY_PEAK_ASSUMPTION} start: baseline_bytes, live before any session (weights, library "
        "workspaces), or the weights where it was not counted; weights that the budget states take its place there. "
        "Of the host ledger host_bytes // ceil(kv_cache_host_bytes / batch_size), and no more than by arithmetic.",
    ),
    Method(
        "sessions by trace",
        "traced, extrapolated",
        "(device - weights - runtime - reserve) // ceil((max(prefill, decode peak_device_bytes) - weights) / "
        "batch_size)",
        "As the sessions by peak, from the trace: no rounding of an allocator, no workspaces. Of the host ledger the "
        "cache's highest bytes there.",
        of_trace=True,
    ),
    Method(
        "prefill peak, decode peak",
        RUN,
        "max over trials of peak_allocated_bytes",
        "Highest live device bytes of the phase, weights included; prefill ends when the first token is on the host.",
    ),
    Method(
        "KV device, KV host",
        RUN,
        "kv_cache_device_bytes, kv_cache_host_bytes",
        "Payload of the cache's tensors for the whole batch when generation ends, scales and zero points included.",
    ),
    Method(
        "weights + KV, step",
        "analytic",
        "weights_bytes + batch_size * KV device bytes per session + fixed KV",
        "The KV cache at rest when the prefill, or the row's step, ends; nothing else is counted. The step is that of "
        "the highest traced peak, else the last.",
    ),
    Method(
        "+ weights, + KV",
        "traced",
        "contributors of the traced peak - the analytic weights, the analytic KV",
        "KV is what the cache holds at the peak, no more than its payload when the phase ends: at a peak in an early "
        "layer the later ones have none yet.",
        of_trace=True,
    ),
    Method(
        "+ cache transients",
        "traced",
        "bytes that the cache allocated - KV",
        "A quantizer's work, copies in a concatenation, layers in flight, storage behind a window's view.",
        of_trace=True,
    ),
    Method(
        "+ logits",
        "traced",
        "bytes of the output head, of the model after it and of generate()",
        "At the instant of the peak: an earlier or later peak of the logits alone is not in it.",
        of_trace=True,
    ),
    Method(
        "+ activations",
        "traced",
        "all other contributors of the traced peak",
        "The prompt's tokens and masks are among them.",
        of_trace=True,
    ),
    Method(
        "= peak",
        "traced",
        "peak_device_bytes",
        "Of decode the highest of all traced steps.",
        of_trace=True,
    ),
    Method("= peak", RUN, "max over trials of peak_allocated_bytes", "The prefill peak or decode peak again."),
    Method(
        "+ workspaces",
        RUN,
        "baseline_bytes - traced weights_bytes",
        "Live before the cell beyond the weights, such as a library's workspace.",
        of_trace=True,
    ),
    Method(
        "+ forced tokens",
        RUN,
        "batch_size * output_tokens * 8",
        "The baseline's tokens, which a run is given and a trace is not.",
        of_trace=True,
    ),
    Method(
        "+ unexplained",
        RUN,
        "peak of the run - traced peak - workspaces - forced tokens",
        "What no part accounts for. On CUDA every block is rounded up, which is in it; emulated it must be 0.",
        of_trace=True,
    ),
    Method(
        "+ allocator, + context",
        RUN,
        "peak_reserved_bytes - peak_allocated_bytes, peak_device_used_bytes - peak_reserved_bytes",
        "Cached and rounded-up blocks; context, libraries and other processes. Peaks need not be of one instant.",
    ),
    Method("TTFT", RUN, "median(ttft_s)", "From the call of generate() to the first token on the host.", where="both"),
    Method(
        "TPOT",
        RUN,
        "median((e2e_latency_s - ttft_s) / (output_tokens - 1))",
        "The first token is not in it; one step serves the whole batch.",
        where="both",
    ),
    Method("tokens/s", RUN, "median(batch_size * output_tokens / e2e_latency_s)", "Prefill is in it.", where="both"),
    Method(
        "moved/token",
        RUN,
        "(decode h2d_bytes + decode d2h_bytes) / ((output_tokens - 1) * batch_size)",
        "Both directions, for each token of each session; of strategies that use the link.",
    ),
    Method(
        "exposed/token",
        RUN,
        "decode exposed_transfer_s / (output_tokens - 1)",
        "Time of a step in which computation waited for copies; comparable with TPOT.",
    ),
    Method(
        "mean KL, max KL",
        RUN,
        "mean, max(KL(baseline || strategy))",
        "On the same tokens: the mean over output positions, the highest over positions and sessions.",
        of_fidelity=True,
    ),
    Method(
        "noise floor",
        RUN,
        "mean(KL(baseline || baseline prefilled in chunks))",
        "Of the workload; no error of the baseline, which has no KL of its own.",
        of_fidelity=True,
    ),
    Method(
        "top-1",
        RUN,
        "top1_agreement_ratio",
        "Share of positions with the same most likely token; 1.0 is all.",
        of_fidelity=True,
    ),
    Method(
        "NLL change",
        RUN,
        "nll_change_nats",
        "Mean negative log likelihood of the forced tokens, strategy minus baseline.",
        of_fidelity=True,
    ),
    Method(
        "first divergence",
        RUN,
        "min(first_divergence_tokens)",
        "The output position, counted from 0, where free-running greedy output would first differ, over all sessions.",
        of_fidelity=True,
    ),
    Method(
        "top-1 margin",
        RUN,
        "baseline_top1_margin_nats",
        "The baseline's smallest lead of its chosen token over the runner-up: how fragile top-1 is.",
        of_fidelity=True,
    ),
    Method("bit-equal", RUN, "bit_equal", "Whether every logit is identical.", of_fidelity=True),
    Method(
        "host RSS peak, pinned asked, pinned allocated",
        RUN,
        "peak_host_rss_bytes, pinned_requested_bytes, pinned_allocated_bytes",
        "Of the worker, model included; the pinned allocator rounds up what it is asked for.",
    ),
    Method(
        "cgroup peak, cgroup limit, cgroup swap",
        RUN,
        "peak_cgroup_bytes, cgroup_limit_bytes, max over trials of cgroup_swap_bytes",
        "Of the control group with the tightest memory limit over the worker, else of its own: all its processes, "
        "page cache included, seen at token boundaries of the memory pass and, where it tells of the pass, by the "
        "kernel's high-water mark. Swap is what lies there, whenever it went.",
    ),
    Method(
        "swapped in, swapped out",
        RUN,
        "sum over trials of swap_in_bytes, swap_out_bytes",
        "By all processes of the machine during the timing passes. Where there was any, or any cgroup swap, the "
        "cell's times are marked (swapped).",
    ),
    Method(
        "major faults, minor faults",
        RUN,
        "sum over trials of num_major_faults, num_minor_faults",
        "Pages that the worker touched in the timing passes and that had to be read from a disk, or only mapped.",
    ),
    Method(
        "H2D busy/step, D2H busy/step",
        RUN,
        "decode h2d_busy_s, decode d2h_busy_s / (output_tokens - 1)",
        "Time the link copied for one step of the whole batch, hidden behind computation or not.",
    ),
    Method(
        "H2D, D2H, H2D copies, D2H copies",
        RUN,
        "h2d_bytes, d2h_bytes, num_h2d_copies, num_d2h_copies / steps",
        "Of the whole batch, counted at the copies; steps: output_tokens - 1 in decode, 1 in prefill. A strategy that "
        "fetches ahead submits the first fetches for decode in prefill.",
    ),
    Method(
        "pageable, whole phase",
        RUN,
        "num_pageable_copies",
        "Of the whole phase: copies whose host side is not pinned; emulated: was not made by the link.",
    ),
    Method(
        "H2D busy, D2H busy",
        RUN,
        "h2d_busy_s, d2h_busy_s / steps",
        "Time the link copied, hidden behind computation or not.",
    ),
    Method(
        "H2D speed, D2H speed",
        RUN,
        "h2d_bytes / h2d_busy_s, d2h_bytes / d2h_busy_s",
        "In decimal GB/s. Busy runs from the moment a copy may start to its end.",
    ),
    Method(
        "H2D of the link, D2H of the link",
        f"{RUN} over calibrated",
        "(copies * latency + bytes / bandwidth) / busy",
        "100 % is the calibrated link at copies of these sizes: its bandwidth alone, or with the other direction as "
        "busy as it was.",
    ),
    Method(
        "exposed by waits",
        RUN,
        "exposed_transfer_s / steps",
        "Time a step in which computation stood still for copies, between events around each wait.",
    ),
    Method(
        "exposed by difference",
        RUN,
        "mean over steps of (latency of the step - the reference's at the same length)",
        "In prefill the difference of the TTFTs. The reference is named in the table: of streamed a cell with every "
        "layer resident where there is one, else the baseline. It has the strategy's own computing in it, as "
        "dequantizing is, and may be negative.",
    ),
    Method(
        "hidden",
        RUN,
        "1 - exposed_transfer_s / (h2d_busy_s + d2h_busy_s)",
        "At least 0. Both directions busy at once count twice in the denominator.",
    ),
    Method(
        "end latency",
        RUN,
        "median of the last tenth of inter_token_latencies_s, over all trials",
        "In prefill TTFT. In decode it stands beside bounds of the last steps, when the cache is largest.",
    ),
    Method(
        "ideal, scheduled, serial",
        "traced, on the hardware profile",
        "max of compute, memory and link; what the strategy's streams overlap; their sum",
        "Of the prefill and of the last decode steps: lower bounds, not predictions. Only with a hardware profile of "
        "the run's rung. ideal and scheduled of a prefill leave out copies that its first token need not wait for.",
        of_trace=True,
    ),
    Method(
        "reserved, device used",
        RUN,
        "max over trials of peak_reserved_bytes, peak_device_used_bytes",
        "What the allocator held from the device; what the whole device had in use, other processes included.",
    ),
    Method(
        "alloc retries",
        RUN,
        "sum over trials of num_alloc_retries",
        "Times the allocator freed its cached blocks to serve a request.",
    ),
)
