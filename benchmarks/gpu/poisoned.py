"""Loads into poisoned memory, between engines of unequal sizes and block sizes, in both directions.

Before each load the whole KV memory of the decoder is filled with what is not a number. Then every byte of the tokens
must be the prefiller's, nothing of the pattern may be left where a kernel may read, and no logit may be "not a number".
Answers are held against what each of the two engines says alone, computed in the same pieces: engines of different
sizes need not agree, and how clear the choice was where they part says whether rounding can be the cause.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.asking import ANSWER_SECONDS, Asked, Mode, ask, records
from benchmarks.gpu.correctness import about, compare, first_difference, record_fields, watch
from benchmarks.gpu.fleet import FIRST_RUNNER, Fleet, Pair, PairSpec, Way
from benchmarks.gpu.losing import tried
from kvctl.demo.engine import EngineProcess
from kvctl.demo.models import prompt
from tests.support.engine_calls import ask_workers

LENGTHS = {"cuda": (20, 150, 500, 1000, 4097), "cpu": (20, 150, 333)}
"""Tokens of the prompts: none ends on the edge of a block."""
UNZEROED = 2
"""How many of the shortest are also loaded by a connector that zeroes nothing, where that can be asked for."""
SEED = 9000
"""Of the prompts: every engine is asked the same, so that their answers can be compared."""

BLOCKS: Mapping[str, Mapping[str, tuple[tuple[int | None, int | None], ...]]] = {
    # vLLM chooses the block of hybrids so that a page holds a state: 144 and 272 tokens here. A larger one stays.
    "cuda": {
        "gdn": ((None, 288), (192, None)),
        "mamba2": ((None, 544), (320, None)),
        "dense": ((16, 64), (64, 16)),
        "mla": ((16, 64), (64, 16)),
        "dense-triton": ((16, 64),),
        "mla-flashmla": ((64, 128),),
    },
    "cpu": {
        "gdn": ((None, 1024),),
        "mamba2": ((None, 1024),),
        "dense": ((32, 128), (128, 32)),
    },
}
"""Block sizes of the engine with one worker and of that with two, None for vLLM's own choice."""


@dataclass(frozen=True, slots=True)
class Said:
    """What an engine alone answers, computed in the pieces of a hand-over.

    ``choices`` of each step: the best token, how far the second best stood below, whether anything was not a number.
    """

    tokens: tuple[int, ...]
    choices: tuple[tuple[int, float, bool], ...]
    error: str = ""

    @property
    def nan(self) -> bool:
        """Whether any logit was not a number."""
        return any(bad for _, _, bad in self.choices)


def pairs(fleet: Fleet, kind: str, ways: Sequence[Way] = ("direct", "nixl")) -> list[PairSpec]:
    """An engine with one worker and one with two, for each choice of block sizes and each backend."""
    spec = functools.partial(
        PairSpec,
        kind=kind,
        tp=(1, 2),
        gpus=("0", "0,1"),
        longest=fleet.sizes.middle,
        turns=True,
        forced=True,
        env=FIRST_RUNNER,
    )
    made = []
    for number, blocks in enumerate(BLOCKS[fleet.device].get(kind, ())):
        # Engines for pushes have a memory for each layer; those of one group that only pull join their layers.
        joined = number and not fleet.kinds[kind].several_groups
        mode: Mode = "pull" if joined else "push"
        made += [spec(way=way, blocks=blocks, mode=mode) for way in ways]
    return made


def every_direction(fleet: Fleet, pair: Pair) -> list[str]:
    """All loads of a pair; which of them were wrong."""
    lengths = LENGTHS[fleet.device]
    wrong = []
    known: dict[int, dict[str, Said]] = {}

    def prepare() -> None:
        watch(pair)
        for engine in pair.engines:
            ask_workers(engine, "kvb_watch_choices")
        for tokens in lengths:
            known[tokens] = {pair.ids[0]: _alone(fleet, pair.prefill, tokens)}
            known[tokens][pair.ids[1]] = _alone(fleet, pair.decode, tokens)
            for side, said in enumerate(known[tokens].values()):
                _note_alone(fleet, pair, side, tokens, said)

    if not tried(fleet, pair, "prepare", prepare):
        return ["prepare"]
    modes: Sequence[Mode] = ("pull", "push") if pair.spec.mode == "push" else ("pull",)
    for one in (pair, pair.turned()):
        direction = "{} to {}".format(*one.spec.tp)
        # What this engine was poisoned with as a decoder must not be prefilled into and handed over.
        tried(fleet, pair, "clean", functools.partial(ask_workers, one.prefill, "kvb_fill", False))
        works: list[tuple[Mode, int, bool]] = [(mode, tokens, True) for tokens in lengths for mode in modes]
        works += [(mode, tokens, False) for tokens in lengths[:UNZEROED] for mode in modes]
        for mode, tokens, zeroing in works:
            name = f"{direction} {mode} {tokens}{'' if zeroing else ' unzeroed'}"
            work = functools.partial(_one, fleet, one, mode, tokens, known[tokens], zeroing=zeroing)
            if not tried(fleet, pair, name, work):
                wrong.append(name)
    return wrong


def _one(
    fleet: Fleet, pair: Pair, mode: Mode, tokens: int, known: Mapping[str, Said], *, zeroing: bool
) -> bool:
    """One load into poisoned memory; whether it was as it must be. Without zeroing nothing must be."""
    switched = all(ask_workers(pair.decode, "kvb_zeroing", zeroing))
    ask_workers(pair.decode, "kvb_fill", True)
    control = None
    if zeroing and mode == "pull":
        control = _alone(fleet, pair.decode, tokens)
        ask_workers(pair.decode, "kvb_fill", True)
    ask_workers(pair.decode, "kvb_loads")
    ask_workers(pair.decode, "kvb_choices")
    asked = ask(pair, mode, text(tokens), fleet.sizes.answer)
    loads = [one for worker in ask_workers(pair.decode, "kvb_loads") for one in worker]
    got = Said(asked.decoded.token_ids, _choices(pair.decode, fleet.sizes.answer), asked.error)
    compared = compare(pair, mode, asked, loads) if loads else {"equal": False, "why": "nothing was loaded"}
    left = [load["leftover"] for load in loads]
    within, beyond = (sum(one[name] for one in left) for name in ("within", "beyond"))
    fleet.report.note(
        "poisoned",
        **about(pair, mode, tokens),
        **compared,
        **record_fields(records(pair, asked.handed_over, pair.spec.tp[1]) if asked.handed_over else []),
        blocks=[_block(pair.prefill), _block(pair.decode)],
        zeroing=zeroing,
        switched=switched,
        error=asked.error,
        within=within,
        beyond=beyond,
        elements=sum(one["elements"] for one in left),
        left=sorted({name for one in left for name in one["layers"]})[:8],
        nan=got.nan,
        control=None if control is None else _against(control, known[pair.ids[1]]) | {"nan": control.nan},
        answers=_answers(got, asked, known, pair),
    )
    good = bool(compared["equal"] and not within and not beyond and not got.nan and not asked.error)
    fleet.report.say(
        f"{pair.spec.name} {mode} {tokens}{'' if zeroing else ' unzeroed'}: "
        f"{compared.get('sums', 0)} sums {'equal' if compared['equal'] else 'DIFFERENT'}"
        f" {compared.get('why') or compared.get('different') or ''}; left {within}+{beyond}; nan {got.nan}"
        f" (alone {control.nan if control else '-'}) {asked.error}"
    )
    return good or not zeroing


def text(tokens: int) -> list[int]:
    """The prompt of this length, the same in every run."""
    return prompt(SEED + tokens, tokens)


def _alone(fleet: Fleet, engine: EngineProcess, tokens: int) -> Said:
    """What an engine answers to that prompt, nothing loaded, the last token computed as a step of its own."""
    ask_workers(engine, "kvb_choices")
    answer = engine.submit_alone(text(tokens), fleet.sizes.answer).result(ANSWER_SECONDS)
    if not answer.error and answer.token_ids[:1] != tuple(text(tokens)[-1:]):
        raise RuntimeError(f"the engine said {answer.token_ids[:1]} first, not the prompt's last token")
    return Said(answer.token_ids[1:], _choices(engine, fleet.sizes.answer), answer.error)


def _choices(engine: EngineProcess, answer: int) -> tuple[tuple[int, float, bool], ...]:
    """Of the last ``answer`` steps, by whichever worker sees logits."""
    found: Sequence[Any] = next((worker for worker in ask_workers(engine, "kvb_choices") if worker), [])
    return tuple((token, gap, bad) for token, gap, bad in found[-answer:])


def _note_alone(fleet: Fleet, pair: Pair, side: int, tokens: int, said: Said) -> None:
    spec = pair.spec
    fleet.report.note(
        "alone",
        kind=spec.kind,
        way=spec.way,
        tp=spec.tp[side],
        block=_block(pair.engines[side]),
        tokens=tokens,
        answer=said.tokens,
        choices=said.choices,
        nan=said.nan,
        error=said.error,
    )


def _answers(got: Said, asked: Asked, known: Mapping[str, Said], pair: Pair) -> dict[str, Any]:
    """The loaded answer against both engines' own."""
    there, here = known[pair.ids[0]], known[pair.ids[1]]
    return {
        "decoder": _against(got, here),
        "prefiller": _against(got, there),
        "alone": _against(there, here),
        "tokens": len(got.tokens),
        "distinct": len(set(got.tokens)),
        "cached_tokens": asked.decoded.num_cached_tokens,
    }


def _against(some: Said, other: Said) -> dict[str, Any]:
    """Where two answers part, how clear the choice was there in both, and how much clarity differs before."""
    parts = first_difference(some.tokens, other.tokens)
    return {"parts": parts} | clarity(some.choices, other.choices, parts)


def clarity(
    some: Sequence[Sequence[Any]], others: Sequence[Sequence[Any]], parts: int | None
) -> dict[str, Any]:
    """``gaps`` are both engines' distances between best and second best where they part.

    ``noise`` is by how much the distances differed at most in the steps before: computed from the same tokens.
    """
    same = [abs(a[1] - b[1]) for a, b in zip(some[:parts], others[:parts], strict=False)]
    found: dict[str, Any] = {"noise": max(same, default=0.0)}
    if parts is not None and parts < min(len(some), len(others)):
        found["gaps"] = [some[parts][1], others[parts][1]]
    return found


def _block(engine: EngineProcess) -> int:
    """Tokens in a block of the engine's attention."""
    groups = ask_workers(engine, "kvb_geometry")[0]
    return next((int(g["block_size"]) for g in groups if g["kind"] != "mamba"), 0)
