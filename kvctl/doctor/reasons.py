"""The likeliest reason why an engine's requests are quietly not handed over: a table, and what it finds. Pure.

200 OK with every prompt prefilled twice is what a router looks like that drops the params. What each engine counted
(`kvd.wire.outcomes`) is compared here with what the other engines of its model counted at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvctl.doctor.checks import checked
from kvctl.doctor.losses import LossScene, Lost, ServedEngine, decoding, prefilling
from kvctl.views.doctor import Check, CheckState
from kvd.wire.miss import MissCode
from kvd.wire.outcomes import ASKED_TO_PREFILL, OTHER_PARAMS, NotOffered, Outcome, OutcomeRow

LEAST_REQUESTS = 5
"""Fewer requests that were not handed over are no finding."""
WARNS_FROM = 0.1
"""Share of the prompt tokens from which on it is one: short prompts that are computed in place do no harm."""
FAILS_FROM = 0.5
"""Share from which on prefilling and decoding are not separate."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One row of the table: it is the likeliest where ``fits``; ``says`` what is seen, ``hint`` what to do.

    One that stands for a single code has that code as its ``name``.
    """

    name: str
    kind: tuple[Lost, ...]
    fits: Callable[[LossScene], object]
    says: Callable[[LossScene], str]
    hint: str


ROUTERS = "docs/routers.md says what a router sends"


def _unclaimed(engine: ServedEngine) -> int:
    return engine.row.unclaimed


def _plain(engine: ServedEngine) -> int:
    return engine.requests("plain")


def _code(*codes: MissCode | NotOffered) -> Callable[[LossScene], bool]:
    return lambda scene: scene.me.code(_outcome(scene)) in codes


def _outcome(scene: LossScene) -> Outcome:
    main = scene.loss.main
    return "offered" if main == "unclaimed" else main


def _anyway(_scene: LossScene) -> bool:
    return True


def _prefilling_plain(scene: LossScene) -> list[ServedEngine]:
    return [engine for engine in scene.prefillers if engine.row.role == "prefill" and _plain(engine)]


REASONS: tuple[Reason, ...] = (
    # A decoder's requests bring no params, or a prefiller's ask for no hand-over.
    Reason(
        OTHER_PARAMS, ("plain",), lambda s: s.me.code("plain") == OTHER_PARAMS,
        lambda _: "their kv_transfer_params ask for nothing here: they are a client's own, or another connector's",
        f"the router is to replace a client's kv_transfer_params by the prefiller's; {ROUTERS}",
    ),
    Reason(
        "ROLES", ("plain",), lambda s: s.me.code("plain") == ASKED_TO_PREFILL,
        lambda _: "they say do_remote_decode, and a kv_consumer prefills for nobody",
        "is this one the prefiller? Start it with kv_role kv_producer; else the router sends its decoder what it sends"
        f" a prefiller, as some do where that gave no params; {ROUTERS}",
    ),
    Reason(
        "ROLES", ("plain",),
        lambda s: s.me.row.role == "prefill" and not s.decoders and any(map(_unclaimed, s.prefillers)),
        lambda s: f"it is a kv_producer as is {s.some(s.prefillers, _unclaimed)}, whose prefills nobody claims, and"
        " no decoder is known",
        "is this one the decoder? Start it with kv_role kv_consumer, or both engines with kv_both",
    ),
    Reason(
        "ROUTER_ASKS_FOR_NO_HANDOVER", ("plain",), lambda s: s.me.row.role == "prefill",
        lambda _: "they do not say do_remote_decode: the router takes this prefiller for a server like any other",
        "the router must send the prefiller do_remote_decode in kv_transfer_params, and clients must not reach it past"
        f" the router; {ROUTERS}",
    ),
    Reason(
        "ROUTER_DROPS_PARAMS", ("plain",), lambda s: any(map(_unclaimed, s.prefillers)),
        lambda s: "they come without kv_transfer_params, and nobody claims what is kept by"
        f" {s.some(s.prefillers, _unclaimed)}",
        f"the router must hand on the kv_transfer_params of the prefiller's answer, unchanged; {ROUTERS}",
    ),
    Reason(
        "ROUTER_ASKS_FOR_NO_HANDOVER", ("plain",), _prefilling_plain,
        lambda s: "they come without kv_transfer_params, and requests to"
        f" {s.some(_prefilling_plain(s), _plain)} do not say do_remote_decode",
        f"the router must send the prefiller do_remote_decode in kv_transfer_params; {ROUTERS}",
    ),
    Reason(
        "PREFILLER_KEEPS_NOTHING", ("plain",), lambda s: any(e.requests("not_offered") for e in s.prefillers),
        lambda s: "they come without kv_transfer_params, and nothing could be kept by"
        f" {s.some(s.prefillers, lambda e: e.requests('not_offered'))}",
        "see what kvctl doctor says on the prefiller's host, and the prefiller's log: it names each such request",
    ),
    Reason(
        "ROUTER_ASKS_NO_PREFILLER", ("plain",), lambda s: s.prefillers and all(e.idle for e in s.prefillers),
        lambda s: "they come without kv_transfer_params, and nobody asks"
        f" {', '.join(e.row.engine_id for e in s.prefillers)}",
        "is the router one for separate prefill, does it know its prefillers, and do they answer it? See its log",
    ),
    Reason(
        "ROUTER_PASSES_BY", ("plain",), lambda s: s.prefillers or s.me.requests("loaded", "cached"),
        lambda _: "they come without kv_transfer_params, while other requests are handed over",
        "who sends them: clients past the router, or the router itself, for prompts that it cannot hand over (lists, n)"
        " or when a prefiller fails? See its log",
    ),
    Reason(
        "NO_PARAMS", ("plain",), lambda s: not s.me.in_the_dark,
        lambda _: "they come without kv_transfer_params, and no prefiller of this model is known here",
        "does the router ask a prefiller at all, and does it hand on what that answers? kvctl doctor on the prefiller's"
        f" host tells which; {ROUTERS}",
    ),
    Reason(
        "NOBODY_ASKS", ("plain",), _anyway,
        lambda _: "none of them has kv_transfer_params, neither to be handed over nor to be loaded",
        f"is there a router for separate prefill in front of it, and do clients ask that one? {ROUTERS}",
    ),
    # What came with params is not used.
    Reason(
        "PROMPT_MISMATCH", ("refused", "missed"), _code("PROMPT_MISMATCH"),
        lambda _: "they bring another prompt's prefill",
        "a list of prompts gets one prompt's params; else tokenizer, chat template, adapters or cache_salt differ"
        " between prefiller and decoder; kvctl transfers shows them",
    ),
    Reason(
        "PROMPT_UNCHECKED", ("refused", "missed"), _code("PROMPT_UNCHECKED"),
        lambda _: "their prompt cannot be compared with the prefiller's",
        "the decoder's log says why for each; kvctl transfers shows them",
    ),
    Reason(
        "BAD_PARAMS", ("refused", "missed"), _code("BAD_PARAMS"),
        lambda _: "their kv_transfer_params cannot be used",
        "the decoder's log names the entry; the router must hand on what the prefiller returned, unchanged, and both"
        " engines must run one version of KvdConnector",
    ),
    Reason(
        "DOES_NOT_FIT", ("refused", "missed"), _code("PEER_REFUSED", "DOES_NOT_FIT"),
        lambda _: "their prefiller does not fit this engine, or is not known any more",
        "the decoder's log names the factor and both values; kvctl diff shows all of them, kvctl engines who is known",
    ),
    Reason(
        "PEER_AWAY", ("refused", "missed"), _code("PEER_AWAY"),
        lambda _: "a kvd or their prefiller does not answer in time",
        "do both hosts' kvds run and reach each other? See kvctl status, and remote_host and remote_port in the params",
    ),
    Reason(
        "PREFILLER_ENDED", ("refused", "missed"), _code("PEER_GONE", "PREFILL_ENDED"),
        lambda _: "their prefiller ended, restarted, or aborted them",
        "see the prefiller's log, and kvctl workers on its host",
    ),
    Reason(
        "LEASE_ENDED", ("refused", "missed"), _code("LEASE_ENDED"),
        lambda _: "the prefiller keeps their blocks no longer when they are wanted",
        "requests wait longer than lease_seconds between the two engines: take load off the decoder, raise it, or one"
        " answer's params are used several times (n, retries)",
    ),
    Reason(
        "LOADS_MISS", ("missed",), _anyway,
        lambda s: f"their loads miss{_of(s.me.code('missed'))}",
        "kvctl transfers --state miss shows each with its cause, kvctl slow what they have in common",
    ),
    Reason(
        "REFUSED", ("refused",), _anyway,
        lambda s: f"what they bring is not used{_of(s.me.code('refused'))}",
        "the decoder's log has the cause of each: computed here",
    ),
    Reason(
        "UNUSED", ("unused",), _anyway,
        lambda _: "vLLM asks for no load",
        "requests for prompt_logprobs or echo are always computed; with MultiConnector another one may come first",
    ),
    # A prefiller's prefills are not used.
    Reason(
        "DECODER_REFUSES", ("unclaimed",),
        lambda s: any(e.requests("refused", "missed") > e.requests("plain") for e in s.decoders),
        lambda s: "nobody claims them, and params are refused by"
        f" {s.some(s.decoders, lambda e: e.requests('refused', 'missed'))}",
        "see what kvctl doctor says on the decoder's host, and the decoder's log",
    ),
    Reason(
        "ROUTER_DROPS_PARAMS", ("unclaimed",), lambda s: any(map(_plain, s.decoders)),
        lambda s: "nobody claims them, and requests without kv_transfer_params come to"
        f" {s.some(s.decoders, _plain)}",
        f"the router must hand on the kv_transfer_params of the prefiller's answer, unchanged; {ROUTERS}",
    ),
    Reason(
        "UNCLAIMED", ("unclaimed",), _anyway,
        lambda _: "nobody claims them",
        "the router drops the params, the decoder refuses them or does not reach this kvd, or clients go away before it"
        f" is asked: kvctl doctor on the decoder's host tells which; {ROUTERS}",
    ),
    Reason(
        "NO_KVD", ("not_offered",), _code("NO_KVD", "WORKERS_MISSING"),
        lambda s: f"nothing is kept of them{_of(s.me.code('not_offered'))}",
        "its kvd did not answer, or knows not all of its workers: see kvctl workers and the prefiller's log",
    ),
    Reason(
        "DRAINING", ("not_offered", "refused", "missed"), _code("DRAINING"),
        lambda _: "they come to an engine that is draining",
        "have the router leave it out, or take it back: kvctl drain ENGINE --undo",
    ),
    Reason(
        "NOT_PUSHED", ("not_offered",), _code("NOT_PUSHED"),
        lambda _: "they ask for a push that is not done",
        'the engines need "mode": "push", the router a transfer id of its own for each request; the log names each',
    ),
    Reason(
        "NOT_KEPT", ("not_offered",), _anyway,
        lambda s: f"nothing is kept of them{_of(s.me.code('not_offered'))}",
        "the prefiller's log says why for each: not offered to a decoder",
    ),
)  # fmt: skip
"""In order: the first whose ``kind`` is the one that lost most tokens and that ``fits``."""


def not_handed_over(rows: Sequence[OutcomeRow], weights: Mapping[str, object] | None = None) -> list[Check]:
    """Checks that are not well, for the engines of the asked kvd; rows of other kvds tell more of the reasons.

    ``weights`` are the fingerprints of engines that are known, by id: whether two engines run one model is decided by
    these, and by the model's name where one of them is not known.
    """
    engines = [ServedEngine(row) for row in rows]
    losses = [
        loss
        for engine in engines
        if not engine.row.endpoint.host
        for loss in (decoding(engine), prefilling(engine))
        if loss.lost[0] >= LEAST_REQUESTS and loss.share >= WARNS_FROM
    ]
    return [_finding(LossScene(loss, _others(loss.engine, engines, weights or {}))) for loss in losses]


def _others(
    me: ServedEngine, engines: Sequence[ServedEngine], weights: Mapping[str, object]
) -> list[ServedEngine]:
    mine = weights.get(me.row.engine_id)

    def alike(other: ServedEngine) -> bool:
        theirs = weights.get(other.row.engine_id)
        return mine == theirs if mine and theirs else me.row.model == other.row.model

    return [engine for engine in engines if engine is not me and alike(engine)]


def _finding(scene: LossScene) -> Check:
    loss = scene.loss
    reason = next(r for r in REASONS if loss.main in r.kind and r.fits(scene))
    here = loss.main in ("unclaimed", "not_offered") or scene.me.row.role == "prefill"
    prompts, gone = (
        ("prefills", "went to no decoder") if here else ("prompts", "were computed here, not loaded")
    )
    seen = f"{loss.lost[0]} of {loss.requests} {prompts} of the last {scene.me.row.seconds:g} s"
    found = (
        f"{scene.me.row.engine_id}: {seen} ({loss.share:.0%} of their tokens) {gone}: {reason.says(scene)}"
    )
    failed = loss.share >= FAILS_FROM and not scene.me.in_the_dark  # it may be meant to serve alone
    state: CheckState = "failed" if failed else "warning"
    return checked("transfers", state, "NOT_DISAGGREGATED", found, reason.hint, reason.name)


def _of(code: str) -> str:
    return f", most of them with {code}" if code else ""
