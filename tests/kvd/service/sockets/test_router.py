"""Which messages kvd takes as requests."""

from __future__ import annotations

from typing import Any, cast

from kvd.service.daemon import Daemon
from kvd.service.handlers.dispatch import local_handlers, peer_handlers
from kvd.wire.agent import DropPeer, GetHeld
from kvd.wire.drain import SetDraining
from kvd.wire.frame import MESSAGES
from kvd.wire.lease import LeaseExtend
from kvd.wire.prefixes.cache import GetCache, LookUpTokens
from kvd.wire.reply import Reply


def test_each_message_is_a_request_or_an_answer() -> None:
    """Else an answer that comes too late would be refused, and the refusal perhaps refused in turn."""
    no_daemon = cast("Daemon", object())
    requests: set[Any] = {*local_handlers(no_daemon), *peer_handlers(no_daemon)}
    kvds_own = {DropPeer, GetCache, GetHeld, LeaseExtend, LookUpTokens, SetDraining}
    answers = {kind for kind in MESSAGES.values() if issubclass(kind, Reply)}
    assert requests.isdisjoint(answers)
    assert requests | answers | kvds_own == set(MESSAGES.values())
