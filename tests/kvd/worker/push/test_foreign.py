"""What other hosts say of a transfer: kvd finds out which host speaks, the worker whether the transfer is its."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from kvd.backends.memory import open_backend
from kvd.geometry.rank import Rank
from kvd.wire.identity import Endpoint
from kvd.wire.push import PushAnnounce, PushDone, PushProgress, PushWithdraw
from kvd.wire.reply import Ok
from tests.support import oracle
from tests.support.rigs.bench import eventually
from tests.support.rigs.dense import REQUEST, announce, dense
from tests.support.rigs.push import PushRig, pushed
from tests.support.rigs.send import SendRig, sending, step

LIAR = Endpoint("liar", 1)


@pytest.fixture
def sender() -> Iterator[SendRig]:
    with sending(dense("p"), dense("d")) as made:
        made.fill(REQUEST.remote)
        yield made


def test_nothing_is_written_where_it_is_not_the_decoders_memory(sender: SendRig) -> None:
    liar = open_backend("liar", options={})
    liar.register(sender.d.workers[0].regions)
    sender.announce(REQUEST.local, REQUEST.tokens, window=liar.window("p").metadata())
    sender.run(step(REQUEST.remote, 40, 40))
    (progress,) = eventually(lambda: [p for p in sender.progress() if p.failed])
    assert "liar" in progress.failed
    assert progress.quiesced
    assert sender.there() == set()
    assert (sender.targets[0].regions[0] == oracle.UNTOUCHED).all()
    liar.close()


def test_another_host_neither_announces_nor_ends_what_the_decoder_announced(sender: SendRig) -> None:
    announce(sender)
    key = msgspec.structs.replace(sender.key(attempt=9), decoder_endpoint=LIAR)
    first = sender.key()
    for message in (
        PushWithdraw(key=msgspec.structs.replace(first, decoder_endpoint=LIAR)),
        PushDone(key=msgspec.structs.replace(first, decoder_endpoint=LIAR)),
        PushWithdraw(key=key),
        PushAnnounce(
            key=key, generations=("", ""), tokens=40, computed=0, blocks=(), window=b"", seconds=9.0
        ),
    ):
        sender.send(message)
    sender.run(step(REQUEST.remote, 40, 40))
    sender.end()
    eventually(lambda: sender.all_sent("r"))
    assert sender.as_pulled(REQUEST)
    assert not sender.failures()


def test_progress_counts_only_from_where_it_was_announced_to() -> None:
    rig = PushRig()
    try:
        rig.start(pushed((2, 9)))
        (announced,) = rig.announced()
        forged = PushProgress(
            key=msgspec.structs.replace(announced.key, prefiller_endpoint=LIAR),
            source=Rank(), failed="forged", quiesced=True,
        )  # fmt: skip
        assert isinstance(rig.script.push(forged), Ok)
        for layer in ("l0", "l1"):
            rig.write(layer, announced, (5, 6))
        assert rig.results().failed == set()
        assert rig.same((2, 9), (5, 6))
    finally:
        rig.close()
