"""The kinds of events are those that kvd publishes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import kvd.service
from kvd.wire.event import KINDS
from kvd.wire.lease import LeaseEnd
from kvd.wire.order import MissState

EMITTED = re.compile(r"""\.emit\(\s*(f?)"([^"]+)\"""")
FAMILIES = {"client": ("worker", "scheduler")}
OWN = {
    "lease": {"opened", "extended", "owner_gone", *get_args(LeaseEnd)},
    "push": {"announced", "withdrawn", "failed"},
    "miss": set(get_args(MissState)),
    "peer": {"up", "down", "impostor"},
}
"""What families are followed by where the source has a variable there."""


def test_every_event_of_the_daemon_is_listed_and_no_other() -> None:
    sources = [path.read_text() for path in Path(kvd.service.__file__).parent.rglob("*.py")]
    emitted = {(bool(f), kind) for text in sources for f, kind in EMITTED.findall(text)}
    assert len(emitted) > 20
    found = set()
    for made, kind in emitted:
        family, _, name = kind.replace("{client.kind}", "client").partition(".")
        for one in FAMILIES.get(family, (family,)):
            found |= {f"{one}.{end}" for end in (OWN[one] if made and name.startswith("{") else {name})}
    assert found == set(KINDS)
