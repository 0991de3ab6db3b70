"""Ids and messages of others hold escape sequences and line breaks: no command lets a terminal obey them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import yaml

from kvd.shown import has_controls
from kvd.wire.reply import Refused
from tests.kvctl.order_answers import ORDER

if TYPE_CHECKING:
    from pathlib import Path

    from kvd.wire.frame import Message
    from tests.kvctl.conftest import FakeDaemon, Run

ODD = "\x1b[31m[red]\nforged\x9b2J"
SHOWN = r"\x1b[31m[red]\nforged\x9b2J"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
CHOSEN = frozenset(
    (
        "backend", "cause", "code", "engine_id", "gone", "hint", "host", "incarnation", "kind", "kvd_id", "layer",
        "local_engine", "message", "model", "name", "policy", "prefiller", "reason", "remote_engine", "remote_ranks",
        "remote_request_id", "request_id", "runtime_dir", "subject", "transfer_id", "version", "peers", "ledger_away",
    )
)  # fmt: skip
"""Fields of messages with what somebody chose freely; in the others kvctl looks for words that it knows."""
ENGINE, PEER, REQUEST = f"decode-0{ODD}", f"prefill-1{ODD}", f"cmpl-2{ODD}"
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("engines",),
    ("engines", "--local"),
    ("workers",),
    ("status",),
    ("transfers",),
    ("transfers", "--by", "pair"),
    ("transfers", "--by", "code"),
    ("transfers", "--request", f"nobody{ODD}"),
    ("transfer", REQUEST),
    ("transfer", f"nobody{ODD}"),
    ("slow",),
    ("events", "-n", "3"),
    ("force-miss", "--engine", ENGINE, f"cmpl-4{ODD}"),
    ("force-miss", "--engine", ENGINE, f"nobody{ODD}"),
    ("force-miss", "--engine", ENGINE, "--waiting"),
    ("force-miss", "--order", ORDER),
    ("force-miss", "--order", f"none{ODD}"),
    ("force-miss", "--clear", "--engine", ENGINE),
    ("describe-topology",),
    ("describe-topology", ENGINE, PEER),
    ("describe-topology", ENGINE, f"nobody{ODD}"),
    ("describe-topology", "-o", "dot"),
    ("describe-topology", "-o", "mermaid"),
    ("describe-topology", "-o", "svg"),
    ("diff", ENGINE, PEER),
    ("export-geometry", ENGINE),
)


def changed(value: Any, change: Callable[[str, str], str], name: str = "") -> Any:
    """A message with ``change(field, text)`` for each text in it."""
    match value:
        case str():
            return change(name, value)
        case tuple():
            return tuple(changed(one, change, name) for one in value)
        case dict():
            return {key: changed(one, change, "name") for key, one in value.items()}
        case msgspec.Struct():
            fields = {f: changed(getattr(value, f), change, f) for f in value.__struct_fields__}
            return msgspec.structs.replace(value, **fields)
    return value


def odd(name: str, text: str) -> str:
    return f"{text}{ODD}" if text and name in CHOSEN else text


def plain(_name: str, text: str) -> str:
    return text.replace(ODD, "")


@pytest.fixture
def strange(daemon: FakeDaemon) -> Path:
    """The directory of a kvd all of whose ids and messages are odd."""
    for kind, make in list(daemon.answers.items()):

        def answer(message: Message, make: Callable[[Message], Message | None] = make) -> Message | None:
            return changed(make(changed(message, plain)), odd)  # type: ignore[no-any-return]

        daemon.answers[kind] = answer
    daemon.events = changed(daemon.events, odd)
    return daemon.directory


def is_harmless(text: str) -> bool:
    lines = text.split("\n")
    return not any(has_controls(line) or line.startswith("forged") for line in lines)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_lets_a_terminal_obey_an_id(run: Run, strange: Path, command: tuple[str, ...]) -> None:
    shown = run(*command, "--socket", strange)
    assert is_harmless(shown.out), shown.out
    assert is_harmless(shown.err), shown.err
    wide = () if "-o" in command else ("-o", "wide")
    coloured = run(*command, *wide, "--color", "always", "--socket", strange)
    assert is_harmless(COLOURS.sub("", coloured.out)), coloured.out
    assert ODD not in coloured.out


@pytest.mark.parametrize("command", ["engines", "workers", "status", "transfers", "events -n 3"])
def test_what_was_chosen_is_shown_as_it_is_typed(run: Run, strange: Path, command: str) -> None:
    """``[red]`` is no style."""
    out = "".join(run(*command.split(), "-o", "wide", "--socket", strange).out.split())
    assert "".join(SHOWN.split()) in out


@pytest.mark.parametrize(
    "command", [("engines",), ("transfers",), ("transfer", REQUEST), ("events", "-n", "3")], ids=" ".join
)
@pytest.mark.parametrize("form", ["json", "yaml", "jsonl"])
def test_documents_hold_what_was_chosen_and_terminals_do_not_obey_it(
    run: Run, strange: Path, command: tuple[str, ...], form: str
) -> None:
    shown = run(*command, "-o", form, "--socket", strange)
    assert is_harmless(shown.out), shown.out
    assert is_harmless(shown.err), shown.err
    document = (
        json.loads(shown.out.split("\n")[0])
        if form == "jsonl"
        else list(yaml.safe_load_all(_read(shown.out)))
    )
    assert {ENGINE, REQUEST} & _texts(document)


def _read(text: str) -> str:
    """JSON documents that follow each other, as YAML has them."""
    return text.replace("\n{", "\n---\n{")


def _texts(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set().union(*map(_texts, value.values()))
    if isinstance(value, list):
        return set().union(*map(_texts, value))
    return {value} if isinstance(value, str) else set()


def test_a_refusal_is_one_harmless_line(run: Run, daemon: FakeDaemon) -> None:
    daemon.answers = dict.fromkeys(
        daemon.answers, lambda _: Refused(code=f"KVD-X{ODD}", message=f"no{ODD}", hint=f"ask{ODD}")
    )
    for command in COMMANDS:
        for form in () if "-o" in command else ((), ("-o", "json")):
            shown = run(*command, *form, "--socket", daemon.directory)
            assert is_harmless(shown.out), (command, shown.out)
            assert is_harmless(shown.err), (command, shown.err)
