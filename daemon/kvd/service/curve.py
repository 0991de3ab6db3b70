"""CURVE keys of the peer socket: who we are, and which other kvds may talk to us."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.utils.z85

from kvd.service.config import CurveSettings
from kvd.service.errors import ConfigError

KEY_BYTES = 40
"""Length of a key in Z85, the text form of CURVE keys."""


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
    path = Path(settings.key_file)
    words = dict(line.split(None, 1) for line in _lines(path) if " " in line)
    pair = [_key(words.get(name, ""), path, name) for name in ("public", "secret")]
    if zmq.curve_public(pair[1]) != pair[0]:
        raise ConfigError(
            f"{path}: the public key {pair[0].decode()} does not belong to the secret one in that file"
        )
    if path.stat().st_mode & 0o077:
        raise ConfigError(
            f"{path} holds a secret key and has mode {path.stat().st_mode & 0o777:04o}, wanted is 0600",
            hint=f"chmod 0600 {path}",
        )
    if not settings.authorized_keys:
        return Keys(pair[0], pair[1], frozenset({pair[0]}))
    authorized, servers = set(), {}
    for number, line in enumerate(_lines(Path(settings.authorized_keys)), 1):
        if not line or line.startswith("#"):
            continue
        key, *endpoint = line.split()
        authorized.add(_key(key, Path(settings.authorized_keys), f"line {number}"))
        if endpoint:
            servers[endpoint[0]] = key.encode()
    return Keys(pair[0], pair[1], frozenset(authorized), servers)


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
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", hint="keys are never written over"
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


def is_loopback(host: str) -> bool:
    """Whether an address is one that only this host reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not plain text"
        raise ConfigError(f"cannot read the keys in {path}: {why}") from None


def _key(text: str, path: Path, what: str) -> bytes:
    key = text.strip().encode()
    try:
        if len(key) == KEY_BYTES and len(zmq.utils.z85.decode(key)) == 32:
            return key
    except (KeyError, ValueError):
        pass
    raise ConfigError(f"{path}: {what}: found {len(key)} characters, a CURVE key has {KEY_BYTES} of Z85")
