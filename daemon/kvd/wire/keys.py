"""A pair of CURVE keys in a file, as `kvd --new-keys FILE` writes it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.utils.z85

from kvd.errors import KvdError

KEY_BYTES = 40
"""Length of a key in Z85, the text form of CURVE keys."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Both keys in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


class KeyFileError(KvdError):
    """A file of keys that cannot be used; ``message`` names it, ``hint`` says what to do."""


def read_pair(path: Path) -> KeyPair:
    """The pair in a file. Raises `KeyFileError`: not readable, no such keys in it, or readable by others."""
    words = dict(line.split(None, 1) for line in read_lines(path) if " " in line)
    public, secret = (checked_key(words.get(name, ""), path, name) for name in ("public", "secret"))
    if zmq.curve_public(secret) != public:
        raise KeyFileError(
            f"{path}: the public key {public.decode()} does not belong to the secret one in that file"
        )
    if path.stat().st_mode & 0o077:
        raise KeyFileError(
            f"{path} holds a secret key and has mode {path.stat().st_mode & 0o777:04o}, wanted is 0600",
            f"chmod 0600 {path}",
        )
    return KeyPair(public, secret)


def read_lines(path: Path) -> list[str]:
    """The lines of a file of keys. Raises `KeyFileError`."""
    try:
        return [line.strip() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not plain text"
        hint = ""
        if isinstance(error, PermissionError):
            hint = f"give the file to the user of this process: chown {os.geteuid()} {path}"
        raise KeyFileError(f"cannot read the keys in {path}: {why}", hint) from None


def checked_key(text: str, path: Path, what: str) -> bytes:
    """A key in Z85; ``what`` says where in the file it stands. Raises `KeyFileError`."""
    key = text.strip().encode()
    try:
        if len(key) == KEY_BYTES and len(zmq.utils.z85.decode(key)) == 32:
            return key
    except (KeyError, ValueError):
        pass
    raise KeyFileError(f"{path}: {what}: found {len(key)} characters, a CURVE key has {KEY_BYTES} of Z85")
