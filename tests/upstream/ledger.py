"""What two kvds know after vLLM's tests: leases that were claimed, loads that came, misses that a test brings about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from kvctl.processes.daemons import Kvd
from kvd.wire.transfer import ListTransfers, TransferList, TransferRecord
from tests.support.deployments import counter

PAGE = 500


def records(hosts: Iterable[Kvd]) -> list[TransferRecord]:
    """All that these kvds have written down."""
    found: list[TransferRecord] = []
    for host in hosts:
        before, more = 0, True
        while more:
            answer = cast("TransferList", host.ask(ListTransfers(limit=PAGE, before=before)))
            found += [row.record for row in answer.rows]
            before, more = min((row.seq for row in answer.rows), default=0), answer.more
    return found


def unexplained(found: Sequence[TransferRecord], misses: Mapping[str, str]) -> list[str]:
    """A line for each record that neither is a load of which something came, nor a miss with one of these codes."""
    return [
        f"{one.state} {one.code or '-'} {one.mode} {one.request_id} from {one.remote_engine}: "
        + (one.cause or f"{one.bytes} bytes, checksum {one.checksum.state or 'not asked for'}")
        for one in found
        if not (_came(one) or (one.state == "miss" and one.code in misses))
    ]


def unused(found: Sequence[TransferRecord], misses: Mapping[str, str]) -> list[str]:
    """Codes of misses that no record has: the list says what is so."""
    return sorted(misses.keys() - {one.code for one in found})


def unmoved(found: Sequence[TransferRecord], tokens: int) -> list[str]:
    """A line where vLLM counts more ``tokens`` as loaded than these records have.

    vLLM counts a prompt's last token too, which is computed again in any case. What the decoder's own cache has of a
    prompt it does not count, and a record does.
    """
    loads = [one for one in found if one.state == "done"]
    moved = sum(one.tokens for one in loads)
    return (
        []
        if tokens <= moved + len(loads)
        else [f"{len(loads)} loads brought {moved} tokens, vLLM counts {tokens}"]
    )


def unclaimed(prefills: Kvd, loads: int) -> list[str]:
    """A line where a prefiller's kvd let in other than the readers of so many ``loads``."""
    claims = counter(prefills, "leases.claims")
    return [] if claims == loads else [f"{claims} leases are claimed for {loads} loads"]


def _came(one: TransferRecord) -> bool:
    return one.state == "done" and not one.cause and one.bytes > 0 and one.checksum.state != "differs"
