"""What the scheduler makes of an answer on who holds a prefix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvd.vllm.prefixes.seeker import FoundPrefix, PrefixSeeker
from kvd.wire.prefix import FindPrefix, PrefixFound
from kvd.worker.settings import ConnectorSettings
from tests.support.rigs.bench import Script
from tests.support.rigs.half import Request


@dataclass
class Hashed(Request):
    """With the hashes of its two full blocks of 4 tokens."""

    block_hashes: list[bytes] = field(default_factory=lambda: [bytes([n]) * 32 for n in (1, 2)])


@pytest.mark.parametrize(
    ("tokens", "taken"), [(2, False), (4, True), (8, True), (9, False), (10, False), (99, False)]
)
def test_a_prefix_is_longer_than_what_is_here_and_shorter_than_the_prompt(tokens: int, taken: bool) -> None:
    """vLLM asserts that at least a token of each prompt is left to be computed, and ends its engine where it is not."""
    script = Script()
    seeker = PrefixSeeker(ConnectorSettings(prefix_least=1), "d", script, "sha256", 4, 1)
    request: Any = Hashed("r")
    assert seeker.look(request, 2) == "asking"
    (asked,) = script.asked(FindPrefix)
    asked.answer(
        PrefixFound(tokens=tokens, engine_id="p", generation="g", blocks=((1, 2, 3),), first_blocks=(0,))
    )
    assert isinstance(seeker.look(request, 2), FoundPrefix) is taken
