"""Real kvds that stand for hosts, each with a key of its own, and whoever speaks with one of these keys."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from kvd.keys import KeyPair, TrustedKey, read_pair, write_pair, write_trusted
from kvd.wire.frame import Message, decode, encode
from kvd.wire.reply import Refused
from tests.support.daemons import Daemon, wait_for
from tests.support.ports import free_port

ANSWER_MS = 20_000


@dataclass
class Host:
    """One kvd with its pair and its list of trusted keys."""

    name: str
    folder: Path
    daemon: Daemon
    pair: KeyPair = field(init=False)

    def __post_init__(self) -> None:
        self.new_pair()
        self.daemon.environment = {
            "KVD_PEER_CURVE_KEY_FILE": str(self.folder / "host.keys"),
            "KVD_PEER_CURVE_AUTHORIZED_KEYS": str(self.trusted),
        }

    def new_pair(self) -> None:
        """Make a pair in the place of the one before; the kvd is to be started with it."""
        file = self.folder / "host.keys"
        file.unlink(missing_ok=True)
        write_pair(file)
        self.pair = read_pair(file)

    @property
    def trusted(self) -> Path:
        """Its list of the keys that it trusts."""
        return self.folder / "trusted.keys"

    @property
    def line(self) -> TrustedKey:
        """The line by which others trust it."""
        return TrustedKey(self.pair.public, "127.0.0.1", self.daemon.port)

    def trust(self, *others: Host) -> None:
        """From now on it trusts these hosts, and no others."""
        write_trusted(self.trusted, [other.line for other in others])

    def trust_and_wait(self, *others: Host) -> None:
        """As `trust`, until its kvd has taken note."""
        before = self.counter("keys.changes")
        self.trust(*others)
        wait_for(lambda: self.counter("keys.changes") > before)

    def counter(self, name: str) -> int:
        """What its kvd has counted."""
        return self.daemon.status().counters.get(name, 0)


@contextmanager
def hosts(*names: str, **settings: str) -> Iterator[dict[str, Host]]:
    """Running kvds by name, each with its own key and these variables; each trusts all others."""
    with tempfile.TemporaryDirectory(prefix="kvd-") as place:
        made: dict[str, Host] = {}
        for name in names:
            folder = Path(place) / name
            folder.mkdir()
            made[name] = Host(name, folder, Daemon(folder / "d", port=free_port()))
            made[name].daemon.environment |= settings
        try:
            for host in made.values():
                host.trust(*(other for other in made.values() if other is not host))
                host.daemon.start()
            yield made
        finally:
            for host in made.values():
                host.daemon.kill()


@contextmanager
def speaking(pair: KeyPair, to: Host) -> Iterator[Speaker]:
    """Somebody with a pair of keys at another kvd's peer socket."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, ANSWER_MS
        dealer.curve_publickey, dealer.curve_secretkey = pair.public, pair.secret
        dealer.curve_serverkey = to.pair.public
        dealer.connect(f"tcp://127.0.0.1:{to.daemon.port}")
        yield Speaker(dealer)


@dataclass
class Speaker:
    """A connection on which anything may be said."""

    dealer: zmq.Socket[bytes]
    last: int = 0

    def ask(self, message: Message) -> Message:
        """The answer to a message."""
        self.last += 1
        self.dealer.send(encode(message, self.last))
        while True:
            answer, of = decode(self.dealer.recv())
            if of == self.last:
                return answer

    def refused(self, message: Message) -> Refused:
        """The refusal of a message that must be refused."""
        answer = self.ask(message)
        assert isinstance(answer, Refused), answer
        return answer

    def answered(self, message: Message, seconds: float) -> bool:
        """Whether anything comes back within some seconds; not where there is no connection."""
        self.last += 1
        try:
            self.dealer.send(encode(message, self.last), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return bool(self.dealer.poll(int(seconds * 1000)))
