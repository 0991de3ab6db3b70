"""CURVE keys of the peer socket: who we are, and which other kvds may talk to us."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from kvd.addresses import is_loopback
from kvd.service.config import CurveSettings
from kvd.service.errors import ConfigError
from kvd.wire.keys import KeyFileError, checked_key, read_lines, read_pair


@dataclass(frozen=True, slots=True)
class Keys:
    """Our key pair, the public keys that are let in, and those expected at an endpoint (``host:port``, ``host``)."""

    public: bytes
    secret: bytes = field(repr=False)
    authorized: frozenset[bytes] = frozenset()
    servers: dict[str, bytes] = field(default_factory=dict)

    def of(self, host: str, port: int) -> bytes:
        """The public key expected at an endpoint: the one listed for it, else ours (a fleet may share a pair)."""
        return self.servers.get(f"{host}:{port}") or self.servers.get(host) or self.public


def load(settings: CurveSettings) -> Keys | None:
    """The keys that the settings name, None where they name none. Raises `ConfigError` naming the file and line."""
    if not settings.key_file:
        if settings.authorized_keys:
            raise ConfigError(
                f"peer.curve.authorized_keys is {settings.authorized_keys!r} but peer.curve.key_file is not set",
                hint="make a pair with `kvd --new-keys FILE` and name the file",
            )
        return None
    try:
        return _load(Path(settings.key_file), settings.authorized_keys)
    except KeyFileError as error:
        raise ConfigError(error.message, hint=error.hint) from None


def create(path: Path) -> str:
    """Write a new pair to ``path``, readable by its owner only; returns the public key. Raises `ConfigError`."""
    public, secret = zmq.curve_keypair()
    text = (
        "# CURVE keys of a kvd; the secret one must not leave the fleet\n"
        f"public {public.decode()}\nsecret {secret.decode()}\n"
    )
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    except FileNotFoundError:
        raise ConfigError(
            f"cannot write {path}: there is no directory {path.parent}",
            hint=f"type `mkdir -p {path.parent}` first",
        ) from None
    except FileExistsError:
        raise ConfigError(f"cannot write {path}: it exists", hint="keys are never written over") from None
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", hint="name a file that this user may write"
        ) from None
    return public.decode()


def refuse_open_bind(host: str, keys: Keys | None) -> None:
    """Raise `ConfigError` for a peer socket that the network can reach and anybody may use."""
    if keys is None and not is_loopback(host):
        raise ConfigError(
            f"peer.listen is on {host!r}, which is not loopback, and peer.curve.key_file is not set: whoever"
            " reaches that port could read the addresses of KV memory and end leases",
            hint="`kvd --new-keys /etc/kvd/peer.key` makes keys: put the file on all hosts and set peer.curve.key_file",
        )


def _load(path: Path, authorized_keys: str) -> Keys:
    pair = read_pair(path)
    if not authorized_keys:
        return Keys(pair.public, pair.secret, frozenset({pair.public}))
    authorized, servers, listed = set(), {}, Path(authorized_keys)
    for number, line in enumerate(read_lines(listed), 1):
        if not line or line.startswith("#"):
            continue
        key, *endpoint = line.split()
        authorized.add(checked_key(key, listed, f"line {number}"))
        if endpoint:
            servers[endpoint[0]] = key.encode()
    return Keys(pair.public, pair.secret, frozenset(authorized), servers)
