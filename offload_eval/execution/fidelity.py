"""Logits processors: the baseline's logits are recorded, its tokens forced, and a strategy's logits compared.

Shape suffixes: N output tokens, B batch, V vocabulary.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import LogitsProcessor

from offload_eval.core.records import FidelitySample


class ForcedTokens(LogitsProcessor):
    """Makes greedy decoding choose given tokens, so that every strategy does the same work.

    Args:
        tokens_BN: The tokens, on the logits' device.
    """

    def __init__(self, tokens_BN: torch.Tensor) -> None:
        self._tokens_BN = tokens_BN
        self._position = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Raises the forced token's score above all others, in place: generate() owns this copy of the logits."""
        forced_B1 = self._tokens_BN[:, self._position : self._position + 1]
        self._position += 1
        return scores.scatter_(1, forced_B1, float("inf"))


class LogitsRecorder(LogitsProcessor):
    """Copies every step's logits out as they come, so that the device holds one step of them.

    Args:
        logits_NBV: Where they go, `[output_tokens, batch, vocab]`.
    """

    def __init__(self, logits_NBV: npt.NDArray[np.float32]) -> None:
        self._logits_NBV = logits_NBV
        self._position = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Records `[batch, vocab]` and passes it on."""
        self._logits_NBV[self._position] = scores.cpu().numpy()
        self._position += 1
        return scores


class FidelityMeter(LogitsProcessor):
    """Sees the logits before they are forced; holds one step of the reference at a time.

    KL is KL(baseline || strategy) in nats, computed in float64.
    """

    def __init__(self, reference_NBV: npt.NDArray[np.float32], tokens_BN: torch.Tensor) -> None:
        self._reference_NBV = reference_NBV
        self._tokens_BN = tokens_BN
        self._kl_B: list[torch.Tensor] = []
        self._nll_change_B: list[torch.Tensor] = []
        self._agrees_B: list[torch.Tensor] = []
        self._is_forced_B: list[torch.Tensor] = []
        self._margins: list[float] = []
        self._bit_equal = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Compares `[batch, vocab]` with the reference at this position, and passes it on."""
        position = len(self._kl_B)
        reference_BV = torch.from_numpy(np.array(self._reference_NBV[position])).to(scores.device)
        self._bit_equal = self._bit_equal and torch.equal(reference_BV, scores)
        baseline_BV = torch.log_softmax(reference_BV.double(), dim=-1)
        strategy_BV = torch.log_softmax(scores.double(), dim=-1)
        probability_BV = baseline_BV.exp()
        # A token that the baseline rules out, at minus infinity, adds nothing: 0 * log 0 is 0 here.
        terms_BV = torch.where(probability_BV > 0, probability_BV * (baseline_BV - strategy_BV), 0.0)
        terms_BV = torch.where(probability_BV.isnan(), probability_BV, terms_BV)
        self._kl_B.append(terms_BV.sum(dim=-1).clamp_(min=0).cpu())
        forced_B1 = self._tokens_BN[:, position : position + 1]
        nll_change_B1 = baseline_BV.gather(1, forced_B1) - strategy_BV.gather(1, forced_B1)
        self._nll_change_B.append(nll_change_B1[:, 0].cpu())
        top1_B = scores.argmax(dim=-1)
        self._agrees_B.append((top1_B == reference_BV.argmax(dim=-1)).cpu())
        self._is_forced_B.append((top1_B == forced_B1[:, 0]).cpu())
        two_best_B2 = baseline_BV.topk(2, dim=-1).values
        self._margins.append(float((two_best_B2[:, 0] - two_best_B2[:, 1]).min()))
        return scores

    def sample(self, against: Literal["baseline", "chunked_prefill"]) -> FidelitySample:
        """The comparison over all positions seen.

        Raises:
            FloatingPointError: The logits of a step are not finite numbers.
        """
        kl_NB = torch.stack(self._kl_B)
        if not torch.isfinite(kl_NB).all():
            position = int((~torch.isfinite(kl_NB)).any(dim=1).nonzero()[0])
            raise FloatingPointError(f"logits at output position {position} are not finite numbers")
        return FidelitySample(
            against=against,
            kl_nats=tuple(kl_NB.mean(dim=1).tolist()),
            max_kl_nats=float(kl_NB.max()),
            top1_agreement_ratio=float(torch.stack(self._agrees_B).double().mean()),
            nll_change_nats=float(torch.stack(self._nll_change_B).mean()),
            first_divergence_tokens=_first_false(torch.stack(self._is_forced_B)),
            bit_equal=self._bit_equal,
            baseline_top1_margin_nats=min(self._margins),
        )


def _first_false(is_forced_NB: torch.Tensor) -> tuple[int | None, ...]:
    """Per session, the first position whose most likely token is not the forced one.

    Up to there a free-running greedy run sees the same tokens, so this is where it would first differ.
    """
    differs_BN = (~is_forced_NB).T
    return tuple(int(row.nonzero()[0]) if row.any() else None for row in differs_BN)
