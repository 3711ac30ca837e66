"""Requests over the cap or the model's context: refused, queued apart, or told what would fit. Never truncated."""

from dataclasses import dataclass
from typing import Final, Literal

from offload_eval.core.plan import LimitedBy, LongRequest, LongRequestSpec

_OUTCOMES: Final[dict[str, Literal["refused", "queued", "suggested"]]] = {
    "refuse": "refused",
    "queue": "queued",
    "suggest": "suggested",
}


@dataclass(frozen=True, kw_only=True)
class RequestLimit:
    """The most tokens, prompt and generated together, that a request may have."""

    tokens: int
    limited_by: LimitedBy


def request_limit(policy: LongRequestSpec, context_tokens: int | None) -> RequestLimit | None:
    """The smaller of the policy's cap and the model's context; None where neither is stated."""
    cap = policy.max_request_tokens
    if cap is not None and (context_tokens is None or cap <= context_tokens):
        return RequestLimit(tokens=cap, limited_by="max_request_tokens")
    return None if context_tokens is None else RequestLimit(tokens=context_tokens, limited_by="context")


def check_request(
    name: str, prompt_tokens: int, output_tokens: int, limit: RequestLimit | None, policy: LongRequestSpec
) -> LongRequest | None:
    """Judges one request; None where it is admitted."""
    request_tokens = prompt_tokens + output_tokens
    if limit is None or request_tokens <= limit.tokens:
        return None
    return LongRequest(
        name=name,
        request_tokens=request_tokens,
        limit_tokens=limit.tokens,
        limited_by=limit.limited_by,
        outcome=_OUTCOMES[policy.action],
    )
