"""Kvds of other hosts that are hostile or broken: each costs its own answer, within bounds, and one line says why."""

from __future__ import annotations

import itertools
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvd.wire.frame import Message, encode
from kvd.wire.handshake import Pong
from kvd.wire.outcomes import Outcomes
from kvd.wire.query import EngineList, LeaseList, LeaseRow, ListEngines, WorkerList, WorkerRow
from kvd.wire.reply import Refused
from kvd.wire.transfer import LedgerRow, ListTransfers, TransferList, TransferRecord
from tests.kvctl.conftest import Run
from tests.support.hostile_kvd import answering, engine, plain, speaking

A_GIB = 1 << 30
ODD = "\x1b[31mred\nforged\x9b2J"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An operator without contexts."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "kvctl").mkdir()
    return tmp_path


@pytest.fixture
def context(home: Path) -> Callable[..., str]:
    """Makes the hosts that are named those of the context in use."""

    def use(*places: str) -> str:
        hosts = ", ".join(f"'{place}'" for place in places)
        (home / "kvctl" / "contexts.yaml").write_text(f"contexts: {{lab: {{hosts: [{hosts}]}}}}")
        (home / "kvctl" / "context").write_text("lab\n")
        return places[0]

    return use


def endless(asked: Message) -> Message:
    """A page with rows, after which there are always more."""
    number = next(_numbers)
    match type(asked).__name__:
        case "ListEngines":
            return EngineList(rows=tuple(engine(f"e{n}") for n in range(64)), more=str(number))
        case "ListWorkers":
            row = WorkerRow(
                kind="worker", engine_id="e", rank=None, pid=1, incarnation="i", state="alive", registered=0.0,
                heartbeat_age=0.0,
            )  # fmt: skip
            return WorkerList(rows=(row,) * 64, more=str(number))
        case "ListLeases":
            return LeaseList(rows=(LeaseRow(engine_id="e", request_id="r"),) * 64, more=str(number))
    return Pong(kvd_id="h", kvd_generation="h")


_numbers = itertools.count()


@pytest.mark.parametrize("command", ["engines", "workers", "leases"])
def test_ever_further_pages_end_at_a_limit(run: Run, context: Callable[..., str], command: str) -> None:
    with answering(plain(endless)) as place:
        context(place)
        ended = run("--host", place, command, "--timeout", "60")
        assert ended.code == 4
        assert f"the kvd at {place} listed 131,1" in ended.err
        assert "rows, and would go on; at most 131,072 are taken" in ended.err
        assert "[KVD-ANSWER-LIMIT]" in ended.err
        assert ended.err.count("\n") == 1


def test_pages_without_rows_end_by_the_deadline_of_the_whole_answer(
    run: Run, context: Callable[..., str]
) -> None:
    asked = []

    def empty(message: Message) -> Message:
        asked.append(message)
        threading.Event().wait(0.001)  # else 4,097 pages may come within the deadline
        return EngineList(rows=(), more=str(len(asked)))

    with answering(plain(empty)) as place:
        context(place)
        ended = run("--host", place, "engines", "--timeout", "0.3")
        assert ended.code == 4
        assert f"the kvd at {place} did not answer in time" in ended.err
        assert len(asked) > 1
        many = run("--host", place, "engines", "--timeout", "60")
        assert "listed 4,097 pages, and would go on; at most 4,096 are taken" in many.err


def test_a_page_that_leads_back_is_named(run: Run, context: Callable[..., str]) -> None:
    def circle(_: Message) -> Message:
        return EngineList(rows=(engine("e"),), more="e")

    with answering(plain(circle)) as place:
        context(place)
        ended = run("--host", place, "engines")
        assert ended.code == 4
        assert f"the kvd at {place} lists the same rows again: page 2 leads back" in ended.err
        assert "[KVD-PROTOCOL]" in ended.err


def test_a_ledger_that_begins_again_is_named(run: Run, context: Callable[..., str]) -> None:
    row = LedgerRow(7, _record(), 0.0)

    def again(asked: Message) -> Message:
        assert isinstance(asked, ListTransfers)
        return TransferList(rows=(row,) * 10, total=10**6, more=True)

    with answering(plain(again)) as place:
        context(place)
        ended = run("--host", place, "transfers", "--last", "5000")
        assert ended.code == 4
        assert f"the kvd at {place} answers for rows before 7 with row 7 again" in ended.err


def _record() -> TransferRecord:
    return TransferRecord(
        transfer_id="t", request_id="r", local_engine="d", local_rank="tp0", remote_engine="p", remote_generation="g",
        remote_request_id="r", backend="direct", mode="pull", state="done",
    )  # fmt: skip


def test_large_answers_are_refused_before_they_are_built(run: Run, context: Callable[..., str]) -> None:
    def large(_: Message) -> Message:
        return EngineList(rows=tuple(engine(f"{n}", 65_536) for n in range(200)))

    with answering(plain(large)) as place:
        context(place)
        ended = run("--host", place, "engines", "--timeout", "60")
        assert ended.code == 4
        assert "bytes for an answer; at most 8,388,608 are taken" in ended.err
        assert "[KVD-ANSWER-LIMIT]" in ended.err


def test_many_ranks_in_small_pages_end_at_a_limit_and_take_little_memory(
    context: Callable[..., str],
) -> None:
    page = tuple(engine(f"{n}", 65_536) for n in range(100))

    def ranks(_: Message) -> Message:
        return EngineList(rows=page, more=str(next(_numbers)))

    with answering(plain(ranks)) as place:
        context(place)
        ended = subprocess.run(
            [sys.executable, "-m", "kvctl", "--host", place, "engines", "--timeout", "60"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (A_GIB, A_GIB)),
        )  # fmt: skip
        assert ended.returncode == 4, ended.stderr
        assert "ranks, and would go on; at most 1,048,576 are taken" in ended.stderr


def test_the_rest_of_a_fleet_is_shown_beside_one_that_does_not_end(
    run: Run, context: Callable[..., str]
) -> None:
    def honest(asked: Message) -> Message:
        return EngineList(rows=(engine("good"),)) if isinstance(asked, ListEngines) else Outcomes(rows=())

    with answering(plain(endless)) as bad, answering(plain(honest)) as good:
        context(bad, good)
        answer = run("engines", "--fleet", "-o", "json", "--timeout", "60")
        assert answer.code == 4
        body = json.loads(answer.out)
        assert [row["engine_id"] for row in body["engines"]] == ["good"]
        (missing,) = body["unanswered"]
        assert (missing["host"], missing["code"]) == (bad, "KVD-ANSWER-LIMIT")


# --- answers that are none ---


def _spoilt(**fields: object) -> bytes:
    row = msgspec.to_builtins(engine("e")) | fields
    return msgspec.msgpack.encode({"type": "engines", "rows": [row]})


UNTRUE = {
    "another kind": encode(Pong(kvd_id="h", kvd_generation="h"), 1),
    "NaN": encode(msgspec.Raw(_spoilt(since=float("nan"))), 1),
    "a huge number": encode(msgspec.Raw(_spoilt(since=1e300)), 1),
    "a wrong type": encode(msgspec.Raw(_spoilt(ranks="many")), 1),
    "an id of 1 MiB": encode(msgspec.Raw(_spoilt(generation="x" * (1 << 20))), 1),
    "another correlation": encode(EngineList(rows=()), 77),
    "a kind that nobody knows": encode(msgspec.Raw(b"\x81\xa4type\xa5\x1b[2J!"), 1),
    "noise": bytes(range(256)),
    "nothing": b"",
}


@pytest.mark.parametrize("what", UNTRUE)
def test_an_answer_that_is_none_is_one_line_that_names_the_host(
    run: Run, context: Callable[..., str], what: str
) -> None:
    with answering(lambda _, __: UNTRUE[what]) as place:
        context(place)
        ended = run("--host", place, "engines", "--timeout", "0.5")
        assert ended.code == 4
        assert place in ended.err
        assert ended.err.count("\n") == 1
        assert len(ended.err) < 2000
        assert ended.err[:-1].isprintable()


def test_states_that_nobody_knows_and_times_beyond_calendars_are_shown(
    run: Run, context: Callable[..., str]
) -> None:
    def odd(asked: Message) -> Message:
        if not isinstance(asked, ListEngines):
            return Outcomes(rows=())
        rows = [engine(f"{n}") for n in range(2)]
        changed = [
            msgspec.structs.replace(row, state=f"sleepy{ODD}", since=since)
            for row, since in zip(rows, (1e12, -1e12), strict=True)
        ]
        return EngineList(rows=tuple(changed))

    with answering(plain(odd)) as place:
        context(place)
        for words in (("--host", place), ("--fleet",)):
            for form in ("table", "wide", "json", "yaml"):
                shown = run("engines", *words, "-o", form)
                assert shown.code == 0, shown.err
                assert "\x1b" not in shown.out
                assert "\x9b" not in shown.out


@pytest.mark.parametrize("seconds", [1e12, -1e12])
def test_leases_that_end_beyond_calendars_are_shown(
    run: Run, context: Callable[..., str], seconds: float
) -> None:
    """One host with such a lease left the operator without an answer of the whole fleet."""
    row = LeaseRow(engine_id="e", request_id="r", age=seconds, left=seconds)
    with answering(plain(lambda _: LeaseList(rows=(row,)))) as place:
        context(place)
        for words in (("--host", place), ("--fleet",)):
            for form in ("table", "wide", "json"):
                shown = run("leases", *words, "-o", form)
                assert shown.code == 0, shown.err


def test_of_more_transfers_than_were_asked_for_the_first_is_shown(
    run: Run, context: Callable[..., str]
) -> None:
    rows = (LedgerRow(7, _record(), 0.0), LedgerRow(6, _record(), 0.0))
    with answering(plain(lambda _: TransferList(rows=rows, total=2))) as place:
        context(place)
        assert run("--host", place, "transfer", "t").code == 0


def test_a_refusal_names_who_refused_and_is_short(run: Run, context: Callable[..., str]) -> None:
    said = [Refused(code="KVD-BUSY", message=ODD * 20, hint=ODD * 900), Refused(code=ODD, message="no")]
    with answering(plain(lambda _: said[0])) as place:
        context(place)
        busy = run("--host", place, "engines")
        assert busy.code == 5
        assert busy.err.startswith(f"kvctl: the kvd at {place}: ")
        fleet = run("engines", "--fleet", "-o", "wide")
        assert fleet.code == 4
        said.pop(0)
        nameless = run("--host", place, "engines")
        assert "which is no code" in nameless.err
        for ended in (busy, fleet, nameless):
            assert len(ended.err) < 4000
            assert ended.err.count("\n") == 1
            assert "\x1b" not in ended.out + ended.err
            assert "\x9b" not in ended.out + ended.err


# --- connections that do not go on ---


def _one_byte_a_second(made: socket.socket) -> None:
    made.settimeout(0.05)
    for byte in b"\x02" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20):
        made.sendall(bytes((byte,)))
        try:
            while made.recv(4096):
                pass
            return
        except TimeoutError:
            continue


def test_who_answers_byte_by_byte_is_left_at_the_deadline(run: Run, context: Callable[..., str]) -> None:
    with speaking(_one_byte_a_second) as place:
        context(place)
        ended = run("--host", place, "engines", "--timeout", "0.5")
        assert ended.code == 4
        assert f"the kvd at {place} did not answer in time" in ended.err


def test_a_connection_that_ends_in_an_answer_is_named(run: Run, context: Callable[..., str]) -> None:
    with speaking(lambda made: made.sendall(b"\x02" + (1 << 20).to_bytes(8, "big") + b"half")) as place:
        context(place)
        ended = run("--host", place, "engines")
        assert ended.code == 4
        assert f"the connection to the kvd at {place} was lost" in ended.err


def test_a_name_without_an_address_is_one_line(run: Run, context: Callable[..., str]) -> None:
    for name in ("nowhere.invalid", "x" * 70 + ".invalid", "a..b"):
        place = context(f"{name}:7766")
        ended = run("--host", place, "engines", "--timeout", "2")
        assert ended.code == 4
        assert f"no kvd at {place}: " in ended.err
        assert ended.err.count("\n") == 1


def test_a_resolver_that_does_not_answer_is_not_waited_for(
    run: Run, context: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from threading import Event

    over = Event()

    def silent(*_: object, **__: object) -> list[object]:
        over.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    try:
        ended = run("--host", context("slow.example:7766"), "engines", "--timeout", "0.2")
    finally:
        over.set()
    assert ended.code == 4
    assert "its name was not looked up in time" in ended.err


# --- files of contexts ---


@contextmanager
def _listening(path: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        yield


def test_a_file_of_contexts_that_is_none_is_named_at_once(run: Run, home: Path) -> None:
    for name in ("contexts.yaml", "context"):
        path = home / "kvctl" / name

        def refused(told: str) -> None:
            ended = run("context", "list")
            assert ended.code == 2, (name, told, ended)  # noqa: B023
            assert str(path) in ended.err  # noqa: B023
            assert told in ended.err
            assert ended.err.count("\n") == 1
            path.rmdir() if path.is_dir() else path.unlink()  # noqa: B023

        os.mkfifo(path)
        refused("no regular file")
        path.symlink_to("/dev/zero")
        refused("no regular file")
        path.mkdir()
        refused("no regular file")
        path.write_bytes(b"#" * ((1 << 20) + 1))
        refused("more than 1,048,576 bytes")
        path.write_bytes(b"\xff\xfe")
        refused("not UTF-8")


def test_contexts_that_cannot_be_are_named(run: Run, home: Path) -> None:
    path = home / "kvctl" / "contexts.yaml"
    for text in (
        "[" * 5_000,
        "contexts: {a: {keys: 2026-99-99}}",
        "contexts: {a: {keys: ~nobody.of.that.name/keys}}",
        'contexts: {a: {keys: "/x\\0y"}}',
        "contexts: {a: {hosts: ['h:99999']}}",
        'contexts: {a: {hosts: ["\\e[2J:1"], kyes: 1}}',
        "- 1",
    ):
        path.write_text(text)
        ended = run("context", "list")
        assert ended.code == 2, text[:80]
        assert str(path) in ended.err
        assert ended.err.count("\n") == 1
        assert "\x1b" not in ended.err
