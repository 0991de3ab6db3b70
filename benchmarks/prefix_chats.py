"""Chats of many turns over four engines, each turn on an engine of chance: what sharing prefixes saves.

    python -m benchmarks.prefix_chats [--chats 6] [--turns 5] [--rounds 3] [--model llama-wide]

Real vLLM engines on CPUs, two on each of two hosts, and one client. All chats begin with the same instructions; each
turn brings all that was said before and a new question. The same chats are held in three ways, in turns:

random          each turn on an engine of chance, nobody reads another engine's cache: what a plain router does
random, shared  the same engines of chance, with `"prefixes": "on"`
sticky          each chat stays on its engine, nobody reads another engine's cache: what a router that knows chats does

Tokens computed are those of all prompts that no cache had. The least anybody could compute is what nobody holds.
Answers of the three ways must be the same.
"""

# ruff: noqa: INP001, T201 - a script in a folder of scripts

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvctl.demo.engine import EngineAnswer
from tests.support.deployments import prompt_of
from tests.support.engine_calls import reset_prefix_cache
from tests.support.sharing import Sharing, sharing
from tests.support.tiny_models import MODELS

WIDE = dataclasses.replace(
    MODELS["llama"],
    name="llama-wide",
    config={
        "num_hidden_layers": 4,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 48,
    },
)
"""A token of it costs 20 times as much as one of the tests' own model, of which a load saves hardly anything."""

BLOCK, INSTRUCTIONS, QUESTION, ANSWER = 128, 3 * 128, 300, 32
NAMES = ("a", "b", "c", "d")


@dataclass(frozen=True)
class Way:
    """How chats are held."""

    name: str
    shared: bool = False
    sticky: bool = False


WAYS = (Way("random"), Way("random, shared", shared=True), Way("sticky", sticky=True))


@dataclass
class Held:
    """What came of the chats that were held in one way."""

    prompts: int = 0
    computed: int = 0
    first_tokens: list[float] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)

    def note(self, prompt: Sequence[int], answer: EngineAnswer) -> None:
        """Add an answer; an error ends the run."""
        if answer.error or answer.num_cached_tokens is None or answer.first_token_seconds is None:
            sys.exit(f"an engine did not answer: {answer.error or 'no tokens'}")
        self.prompts += len(prompt)
        self.computed += len(prompt) - answer.num_cached_tokens
        self.first_tokens.append(answer.first_token_seconds * 1e3)
        self.answers.append(answer.token_ids)


def hold(running: Sharing, way: Way, chats: int, turns: int, seed: int) -> Held:
    """Hold all chats, a turn of each after the other, one request at a time."""
    dice, held = random.Random(seed), Held()  # noqa: S311 - chance that comes again
    if not all(reset_prefix_cache(engine) for engine in running.engines.values()):
        sys.exit("an engine would not forget its cache")
    said = [prompt_of(INSTRUCTIONS, seed=0) for _ in range(chats)]
    for turn in range(turns):
        for chat in range(chats):
            said[chat] += prompt_of(QUESTION, seed=1 + (seed * turns + turn) * chats + chat)
            by_chance = dice.choice(NAMES)
            name = NAMES[chat % len(NAMES)] if way.sticky else by_chance
            answer = running.engines[name].submit(said[chat], ANSWER).result(300)
            held.note(said[chat], answer)
            said[chat] += answer.token_ids
    return held


def least(chats: int, turns: int) -> int:
    """Tokens that somebody has to compute: those of which no engine holds the whole block."""
    computed, common = 0, INSTRUCTIONS // BLOCK * BLOCK
    for chat in range(chats):
        complete = common if chat else 0
        for turn in range(turns):
            prompt = INSTRUCTIONS + (turn + 1) * QUESTION + turn * ANSWER
            computed += prompt - complete
            # The last token that was generated is in no cache.
            complete = (prompt + ANSWER - 1) // BLOCK * BLOCK
    return computed


def main() -> None:
    """Hold the chats in all ways, and print a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--chats", type=int, default=6)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--model", default="llama-wide")
    chosen = options.parse_args()
    MODELS.setdefault(WIDE.name, WIDE)
    longest = INSTRUCTIONS + chosen.turns * (QUESTION + ANSWER)
    rounds: dict[str, list[Held]] = {way.name: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for shared in (False, True):
            place = Path(folder, str(shared))
            settings = {"prefixes": "on" if shared else "off", "prefix_least": BLOCK}
            with sharing(chosen.model, place, extra=settings, max_model_len=longest) as running:
                for seed in range(-1, chosen.rounds):  # the first warms up
                    for way in WAYS:
                        if way.shared == shared:
                            held = hold(running, way, chosen.chats, chosen.turns, seed + 1)
                            rounds[way.name] += [held] if seed >= 0 else []
    table(rounds, least(chosen.chats, chosen.turns))


def table(rounds: dict[str, list[Held]], lower: int) -> None:
    """Print what came of it."""
    plain = rounds[WAYS[0].name]
    print("| way | tokens asked | computed | of the least | first token, median ms | p90 | of random's |")
    print("|---|---|---|---|---|---|---|")
    for name, several in rounds.items():
        if any(one.answers != other.answers for one, other in zip(several, plain, strict=True)):
            sys.exit(f"{name}: other answers than {WAYS[0].name}")
        asked = statistics.mean(one.prompts for one in several)
        computed = statistics.mean(one.computed for one in several)
        firsts = sorted(ms for one in several for ms in one.first_tokens)
        ratio = statistics.median(firsts) / statistics.median(ms for one in plain for ms in one.first_tokens)
        print(
            f"| {name} | {asked:,.0f} | {computed:,.0f} | {computed / lower:.2f} "
            f"| {statistics.median(firsts):.1f} | {firsts[int(len(firsts) * 0.9)]:.1f} | {ratio:.2f} |"
        )
    print(f"\nThe least: {lower:,} tokens, if what one engine holds were held by all.")


if __name__ == "__main__":
    main()
