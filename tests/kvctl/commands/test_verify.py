"""`kvctl verify`: the references, misses held against them, and what counts as wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvctl.verify import runs as verifying
from kvctl.views.verification import first_difference
from kvd.wire.frame import Message
from kvd.wire.order import (
    Asker,
    ClearForced,
    ForcedCleared,
    ForcedMisses,
    ForceMiss,
    ForcePlan,
    GetForced,
    Miss,
    OrderState,
)
from kvd.wire.reply import Refused
from kvd.wire.transfer import ListTransfers, TransferList
from tests.kvctl.conftest import ledger_row

if TYPE_CHECKING:
    from tests.kvctl.conftest import FakeDaemon, Run

    Verify = Callable[..., tuple[int, Any]]

REUSE, RECOMPUTE = [1, 2, 3, 4], [1, 2, 9, 4]
STEPS = {"forced": 0.5, "quiesced": 0.6, "reported": 0.7, "rescheduled": 0.8, "first_token": 0.9}


@dataclass
class World:
    """A prefiller, a decoder and a kvd that know of each other; what is wrong with them is set by the test."""

    url: str = ""
    alone: list[int] = field(default_factory=lambda: RECOMPUTE)
    loaded: list[int] = field(default_factory=lambda: REUSE)
    missed: list[int] = field(default_factory=lambda: RECOMPUTE)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    orders: list[ForceMiss] = field(default_factory=list)
    cleared: list[ClearForced] = field(default_factory=list)
    open: ForceMiss | None = None
    misses: list[Miss] = field(default_factory=list)
    state: str = "done"
    ends_as: str = "recovered"
    strangers: int = 0
    status: int = 200
    hands_on: bool = True
    writes_down: bool = True

    def complete(self, path: str, body: dict[str, Any], name: str) -> dict[str, Any]:
        self.bodies.append(body)
        params = body.get("kv_transfer_params")
        if path.startswith("/prefill"):
            given = {"do_remote_prefill": True, "remote_request_id": "p"} if self.hands_on else None
            return {"choices": [{"token_ids": [1], "text": "x"}], "kv_transfer_params": given}
        tokens = self.alone
        if params or path.startswith("/router"):
            tokens = self.missed if self.open else self.loaded
            self._load(name)
        return {"choices": [{"token_ids": tokens, "text": "x"}]}

    def _load(self, name: str) -> None:
        if self.open is None:
            if self.writes_down:
                self.names.append(f"cmpl-{name}-0-12345678")
            return
        taken = f"cmpl-{name}-0"
        if self.strangers:
            self.strangers -= 1
            taken = "cmpl-stranger"
        known = STEPS if self.ends_as == "recovered" else {"forced": 0.5}
        self.misses.append(
            Miss(request_id=taken, prefiller="p", state=self.ends_as, tokens=9, cause="forced", steps=known)  # type: ignore[arg-type]
        )

    # --- kvd ---

    def force(self, message: Message) -> Message:
        assert isinstance(message, ForceMiss)
        self.orders.append(message)
        self.open, self.misses = message, []
        return self.plan(message)

    def plan(self, message: ForceMiss) -> ForcePlan:
        return ForcePlan(
            order_id=f"o{len(self.orders)}", engine_id=message.engine_id, target=message.target, when=message.when,
            policy="recompute", mode="pull", groups=1, channel="blocks", carried_out=True,
        )  # fmt: skip

    def get(self, message: Message) -> Message:
        assert isinstance(message, GetForced)
        assert self.open is not None
        state = OrderState(
            asker=Asker(), engine_id="decode-0", incarnation="i", asked=0.0, open=False, looked=1, taken=1,
            plan=self.plan(self.open),
        )  # fmt: skip
        return ForcedMisses(order=state, misses=tuple(self.misses), revision=1)

    def clear(self, message: Message) -> Message:
        assert isinstance(message, ClearForced)
        self.cleared.append(message)
        self.open = None
        return ForcedCleared(())

    def transfers(self, message: Message) -> Message:
        assert isinstance(message, ListTransfers)
        rows = tuple(
            ledger_row(n, request_id=name, state=self.state, cause="too slow" if self.state == "miss" else "")
            for n, name in enumerate(self.names)
        )
        return TransferList(rows=rows, total=len(rows), more=False)


@pytest.fixture
def world(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    daemon.answers |= {
        ForceMiss: made.force,
        GetForced: made.get,
        ClearForced: made.clear,
        ListTransfers: made.transfers,
    }
    monkeypatch.setattr(verifying, "SEEN_SECONDS", 0.5)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(200, {"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._say(made.status, made.complete(self.path, body, self.headers["X-Request-Id"]))

        def _say(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def verify(run: Run, daemon: FakeDaemon, world: World) -> Verify:
    """The command as JSON: exit code, then its document or its error."""

    def command(*words: str, way: str = "prefill") -> tuple[int, Any]:
        outcome = run(
            "verify", "--endpoint", f"{world.url}/decode/v1", f"--{way}", f"{world.url}/{way}", *words, "-o", "json",
            "--socket", daemon.directory,
        )  # fmt: skip
        lines = [line for line in outcome.err.splitlines() if line.startswith("{")]
        return outcome.code, json.loads(outcome.out or lines[-1])

    return command


def test_without_yes_only_the_references_are_compared(verify: Verify, world: World) -> None:
    code, body = verify("--prompts", "2")
    assert (code, world.orders) == (0, [])
    assert [(r["run"], r["load"], r["equals"]) for r in body["runs"]] == [("reuse", "done", [])] * 2
    assert body["references_differ"] == 2
    assert [r["prompt_tokens"] for r in body["runs"]] == [256, 512]


def test_every_miss_is_forced_at_each_moment_and_must_equal_a_reference(verify: Verify, world: World) -> None:
    code, body = verify("--prompts", "1", "--yes")
    assert code == 0
    assert [r["run"] for r in body["runs"]] == ["reuse", "before", "flight", "layers"]
    assert [r["equals"] for r in body["runs"][1:]] == [["recompute"]] * 3
    assert [r["recovery"] for r in body["runs"][1:]] == [pytest.approx(0.4)] * 3
    assert [order.when for order in world.orders] == ["before", "flight", "layers"]
    assert len(world.cleared) == 3


def test_an_answer_that_equals_the_other_reference_is_right_too(verify: Verify, world: World) -> None:
    world.missed = REUSE
    code, body = verify("--prompts", "1", "--yes", "--when", "flight")
    assert (code, body["runs"][1]["equals"]) == (0, ["reuse"])


def test_an_answer_that_equals_none_is_shown_from_its_first_difference(verify: Verify, world: World) -> None:
    world.missed = [1, 2, 3, 7]
    code, body = verify("--prompts", "1", "--yes", "--when", "flight")
    wrong = body["runs"][1]
    assert (code, body["wrong"], wrong["equals"]) == (1, 1, [])
    assert (wrong["differs_at"], wrong["expected"], wrong["got"]) == (3, 4, 7)


def test_a_load_that_was_none_is_wrong_whatever_the_answer(verify: Verify, world: World) -> None:
    world.state = "miss"
    code, body = verify("--prompts", "1")
    assert (code, body["runs"][0]["load"], body["runs"][0]["cause"]) == (1, "missed", "too slow")
    world.loaded = RECOMPUTE
    world.names.clear()
    world.writes_down = False
    code, body = verify("--prompts", "1")
    assert (code, body["runs"][0]["load"]) == (1, "not seen")


def test_a_miss_that_did_not_recover_is_wrong(verify: Verify, world: World) -> None:
    world.ends_as = "over"
    code, body = verify("--prompts", "1", "--yes", "--when", "before")
    assert (code, body["runs"][1]["load"], body["runs"][1]["recovery"]) == (1, "missed", None)


def test_an_order_that_took_somebody_elses_load_is_given_again(verify: Verify, world: World) -> None:
    world.strangers = 2
    code, body = verify("--prompts", "1", "--yes", "--when", "before")
    assert (code, len(world.orders), body["runs"][1]["load"]) == (0, 3, "recovered")
    world.strangers = 3
    code, body = verify("--prompts", "1", "--yes", "--when", "before")
    assert (code, body["runs"][1]["load"]) == (1, "not seen")


def test_prompts_are_kept_apart_from_every_prefix_cache(verify: Verify, world: World) -> None:
    verify("--prompts", "1", "--yes", "--when", "before")
    salts = [body["cache_salt"] for body in world.bodies]
    assert len(set(salts)) == 3, "alone; handed over, on both sides; missed, on both sides"
    assert {tuple(body["prompt"]) for body in world.bodies} == {tuple(verifying.prompt_of(0, 512))}


def test_through_a_router_the_request_is_sent_once(verify: Verify, world: World) -> None:
    code, body = verify("--prompts", "1", way="router")
    assert (code, body["prefill"], body["router"]) == (0, "", f"{world.url}/router")
    assert len(world.bodies) == 2


def test_a_prefiller_that_hands_nothing_on_is_named(verify: Verify, world: World) -> None:
    world.hands_on = False
    code, body = verify("--prompts", "1")
    assert (code, body["kind"]) == (1, "Error")
    assert "handed nothing on" in body["message"]


def test_a_server_that_refuses_and_one_that_is_away(
    verify: Verify, world: World, run: Run, daemon: FakeDaemon
) -> None:
    world.status = 500
    code, body = verify("--prompts", "1")
    assert code == 1
    assert "answered 500" in body["message"]
    outcome = run(
        "verify",
        "--endpoint",
        "http://127.0.0.1:1",
        "--prefill",
        "http://127.0.0.1:1",
        "--socket",
        daemon.directory,
    )
    assert outcome.code == 4
    assert "is the server there" in outcome.err


def test_an_order_that_is_refused_ends_it_with_the_orders_own_code(
    verify: Verify, daemon: FakeDaemon
) -> None:
    refused = Refused(code="KVD-FORCE-POLICY", message="policy is fail", hint="set recompute")
    daemon.answers[ForceMiss] = lambda _: refused
    code, body = verify("--prompts", "1", "--yes")
    assert (code, body["code"]) == (5, "KVD-FORCE-POLICY")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--endpoint", "ftp://x", "--prefill", "http://x"), "ftp://x"),
        (("--endpoint", "http://x"), "neither --prefill nor --router is given"),
        (("--endpoint", "http://x", "--prefill", "http://y", "--router", "http://z"), "are both given"),
    ],
    ids=["scheme", "neither", "both"],
)
def test_what_is_not_asked_for_properly_is_a_usage_error(run: Run, words: tuple[str, ...], said: str) -> None:
    outcome = run("verify", *words)
    assert (outcome.code, said in outcome.err) == (2, True), outcome.err


def test_the_screen_says_what_is_right(run: Run, daemon: FakeDaemon, world: World) -> None:
    outcome = run(
        "verify", "--endpoint", world.url + "/decode", "--prefill", world.url + "/prefill", "--prompts", "1", "--yes",
        "--when", "flight", "--socket", daemon.directory,
    )  # fmt: skip
    assert outcome.code == 0
    assert "2 of 2 runs are as they should be" in outcome.out
    assert "recompute" in outcome.out


@pytest.mark.parametrize(
    ("tokens", "reference", "found"),
    [
        ([1, 2], [1, 2], None),
        ([1, 3], [1, 2], (1, 2, 3)),
        ([1], [1, 2], (1, 2, None)),
        ([1, 2], [1], (1, None, 2)),
    ],
)
def test_the_first_difference(tokens: list[int], reference: list[int], found: object) -> None:
    assert first_difference(tokens, reference) == found


def test_the_document_has_a_schema() -> None:
    from kvctl.views.registry import json_schema

    assert "runs" in json_schema("Verification")["properties"]
    assert msgspec.json.encode(json_schema("VerifiedRun"))
