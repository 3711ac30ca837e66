"""What each column of a verdict, of limits and of prices by bounds is: its rung, its formula and how to read it."""

from typing import Final

from offload_eval.reporting.method_type import RUN, Method

VERDICT_METHODS: Final = (
    Method(
        "sessions, over in-GPU",
        RUN,
        "largest batch of the search that ran to its end, else sessions by peak; over those of the in-GPU cache",
        "A searched limit passed every repeat. Where no search was made it is extrapolated from one batch.",
        where="both",
    ),
    Method(
        "traced sessions",
        "traced",
        "largest batch whose traced peaks fit both ledgers, else sessions by trace",
        "By search over traces where there was a search, else extrapolated from the cell's own trace.",
        where="both",
        of_trace=True,
    ),
    Method(
        "most tokens/s, TPOT there, sessions there",
        RUN,
        "max over timed batches within the stated limits of tokens/s; TPOT and sessions of that batch",
        "Of the search's timed batches where there was one, else of the experiment's cells.",
        where="both",
    ),
    Method(
        "analytic",
        "analytic",
        "(device - weights - runtime - reserve - fixed KV) // KV device bytes per session",
        "An upper bound; (host): the host ledger admits fewer.",
        where="limits",
    ),
    Method(
        "traced",
        "traced",
        "largest batch with max(prefill, decode peak_device_bytes) <= cap and kv_host_peak_bytes <= host_bytes",
        "The next batch was traced too, and does not fit.",
        where="limits",
    ),
    Method(
        "over in-GPU",
        "traced",
        "traced sessions / traced sessions of the in-GPU cache",
        "Nothing was run: both sides are traced.",
        where="both",
        when="not run",
        of_trace=True,
    ),
    Method(
        "what stops the next one, traces",
        "traced",
        "ledger and phase that the next batch passes, and the largest part of its peak that grows with the batch; "
        "run_id of the limit's trace and of the next batch's",
        "Parts: KV, cache transients, logits, activations.",
        where="limits",
        when="not run",
    ),
    Method(
        "TTFT, TPOT by bounds",
        "traced, on the hardware profile",
        "prefill bound; sum of the bounds of all decode steps / (output_tokens - 1)",
        "Lower bounds of what was not run, for the whole batch, under three assumptions about what overlaps: ideal, "
        "scheduled, serial. A step that was not traced counts as no more than its traced neighbours.",
        where="both",
        when="priced",
    ),
    Method(
        "tokens/s by bounds",
        "traced, on the hardware profile",
        "sessions * output_tokens / (TTFT + (output_tokens - 1) * TPOT)",
        "An upper bound, prefill included, of the same assumption's times. The ratio of two such bounds is no bound "
        "of the ratio of what would be measured.",
        where="both",
        when="priced",
    ),
    Method(
        "H2D a step, D2H a step, a step waits for",
        "traced, on the hardware profile",
        "h2d_bytes, d2h_bytes of the decode step that moves most; what its ideal bound is the time of",
        "Bytes are of the whole batch; computing, device memory, H2D or D2H.",
        where="both",
        when="priced",
    ),
    Method(
        RUN,
        RUN,
        "largest batch below every one that failed",
        "Of full-length runs under the cap; a range where the tries or the time did not suffice.",
        where="limits",
    ),
    Method(
        "passed, next, batches tried",
        RUN,
        "runs of the limit that ended well; the smallest batch that failed; batches that were run",
        "For the limit alone; timed batches and points of the calibration are not among them.",
        where="limits",
    ),
    Method(
        "what stops it",
        f"{RUN} and traced",
        "ledger and phase of the failed batch; largest part of its traced peak that grows with the batch",
        "Parts: KV, cache transients, logits, activations.",
        where="limits",
    ),
    Method(
        "at in-GPU limit, under SLO",
        RUN,
        "TTFT, TPOT and tokens/s of the batch that the in-GPU cache's limit is; of the largest within the SLO",
        "Medians over timed runs; all sessions start together.",
        where="limits",
    ),
)
