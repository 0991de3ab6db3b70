"""What one engine alone answers, computed in the same pieces as a hand-over computes it.

After a hand-over the prefiller has computed all of the prompt but (for models with a recurrent state) its
last token, and the decoder computes that token as a step of its own. In bfloat16 another split gives slightly
other numbers, which is no fault of a transfer. So the reference engine gets the prompt without its last token
and is made to say that token first: from there on it computes just what the two engines computed together.

Imported by vLLM, inside the engine's processes (`EngineSpec.forced_first_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

PARAMETER = "first_token"
"""Name of the sampling parameter (in ``extra_args``) that holds the token to be said first."""


class ForcedFirstToken(AdapterLogitsProcessor):
    """Makes requests that ask for it begin their output with a given token."""

    def is_argmax_invariant(self) -> bool:
        """It changes which token is the likeliest, so it has to run for greedy requests."""
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], Any], Any] | None:
        """The processor of one request, None for one that asks for nothing."""
        token = (params.extra_args or {}).get(PARAMETER)
        if token is None:
            return None

        def force(output_ids: list[int], logits: Any) -> Any:
            if not output_ids:
                logits.fill_(float("-inf"))
                logits[token] = 0.0
            return logits

        return force
