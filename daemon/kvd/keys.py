"""CURVE keys in files: a host's own pair, and the list of the keys that it trusts.

A pair is what `kvctl keys generate` or `kvd --new-keys FILE` writes. The list has a line for each other host: its
public key, and where that host's kvd listens, ``KEY host:port`` or ``KEY host``.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvd.addresses import join_address, split_address
from kvd.errors import KvdError
from kvd.zmtp import curve, z85

KEY_BYTES = 40
"""Length of a key in Z85, the text form of CURVE keys."""
MAX_LIST_BYTES = 4 << 20
"""Most bytes of a list of keys: some 50,000 hosts."""
ANY_PORT = 0
TICK_SECONDS = 0.02
"""Two of the coarsest ticks in which a kernel stamps files. A rename that is stamped later than what was written shows
kvd that the list is whole, so that it counts at once."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Both keys in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """One line of a list: a public key in Z85, and the host and port that it is of.

    ``port`` 0 is any of that host. ``host`` empty: the key is let in, and no link is made to where it may be.
    """

    key: bytes
    host: str = ""
    port: int = ANY_PORT

    @property
    def place(self) -> str:
        """The host, with its port where one is named."""
        return join_address(self.host, self.port) if self.port else self.host

    @property
    def line(self) -> str:
        """As it stands in the file."""
        return f"{self.key.decode()} {self.place}".rstrip()


class KeyFileError(KvdError):
    """A file of keys that cannot be used; ``message`` names it, ``hint`` says what to do."""

    code = "KVD-KEY-FILE"


# --- a host's own pair ---


def read_pair(path: Path) -> KeyPair:
    """The pair in a file. Raises `KeyFileError`: not readable, no such keys in it, or readable by others."""
    lines = read_lines(path, absent="`kvctl keys generate` makes a pair")
    words = dict(line.split(None, 1) for line in lines if " " in line and not line.startswith("#"))
    if missing := [name for name in ("public", "secret") if name not in words]:
        raise KeyFileError(
            f"{path}: no line begins with {' or '.join(missing)}",
            f"`rm {path}`, then `kvctl keys generate`"
            if not words
            else "`kvctl keys generate` writes a pair; the list of trusted keys is peer.curve.authorized_keys",
        )
    public, secret = (checked_key(words[name], path, name) for name in ("public", "secret"))
    if curve.public_of(secret) != public:
        raise KeyFileError(
            f"{path}: the public key {public.decode()} does not belong to the secret one in that file"
        )
    if path.stat().st_mode & 0o077:
        raise KeyFileError(
            f"{path} holds a secret key and has mode {path.stat().st_mode & 0o777:04o}, wanted is 0600",
            f"chmod 0600 {path}",
        )
    return KeyPair(public, secret)


def write_pair(path: Path) -> bytes:
    """Write a new pair, readable by its owner only; returns the public key.

    Raises `KeyFileError`, also where the file exists.
    """
    public, secret = curve.generate()
    while public.startswith(b"-"):  # what is to be typed must not look like an option
        public, secret = curve.generate()
    text = (
        "# CURVE keys of a kvd; the secret one must not leave its host, or its fleet where all hosts share it\n"
        f"public {public.decode()}\nsecret {secret.decode()}\n"
    )
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    except FileNotFoundError:
        raise KeyFileError(
            f"cannot write {path}: there is no directory {path.parent}",
            hint=f"type `mkdir -p {path.parent}` first",
        ) from None
    except FileExistsError:
        raise KeyFileError(f"cannot write {path}: it exists", hint="keys are never written over") from None
    except OSError as error:
        raise KeyFileError(
            f"cannot write {path}: {error.strerror}", hint="name a file that this user may write"
        ) from None
    return public


# --- the keys that are trusted ---


def read_trusted(path: Path) -> tuple[TrustedKey, ...]:
    """The lines of a list of keys. Raises `KeyFileError` naming file and line, also where every user may write it."""
    if (status := _stat(path)) and status.st_mode & 0o002:
        raise KeyFileError(
            f"{path} says who is trusted, and every user may write it (mode {status.st_mode & 0o777:04o})",
            f"look at what stands in it, then type `chmod o-w {path}`",
        )
    found: list[TrustedKey] = []
    for number, line in enumerate(read_lines(path), 1):
        if line and not line.startswith("#"):
            found.append(_trusted(line, path, f"line {number}"))
    return tuple(found)


def trusted_key(key: str, place: str, path: Path) -> TrustedKey:
    """A key and where it is, ``host``, ``host:port`` or empty, as a line for ``path``. Raises `KeyFileError`."""
    return _trusted(f"{key.strip()} {place.strip()}", path, "the new line")


def write_trusted(path: Path, keys: Iterable[TrustedKey], *, comments: Iterable[str] = ()) -> None:
    """Replace the list in one step: whoever reads it meanwhile sees the old one or the new one.

    Comments stay where their lines stay, and new ones come behind them. Raises `KeyFileError`.
    """
    path = path.resolve()  # what a link points to is replaced, and not the link
    wanted = dict.fromkeys(keys)
    kept: list[str] = []
    if path.exists():
        for number, line in enumerate(read_lines(path), 1):
            if not line or line.startswith("#"):
                kept.append(line)
            elif (one := _trusted(line, path, f"line {number}")) in wanted:
                kept.append(line)
                del wanted[one]
    kept += [f"# {comment}" for comment in comments]
    text = "\n".join([*kept, *(one.line for one in wanted)]) + "\n"
    try:
        mode, owner = (found.st_mode & 0o777, found) if (found := _stat(path)) else (0o644, None)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                os.fchmod(file.fileno(), mode)
                if owner is not None and os.geteuid() == 0:
                    os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            time.sleep(TICK_SECONDS)
            os.replace(name, path)  # noqa: PTH105 - of a name, not of a Path
        except BaseException:
            os.unlink(name)  # noqa: PTH108 - as above
            raise
    except OSError as error:
        raise KeyFileError(
            f"cannot write {path}: {error.strerror}", "name a file in a directory that this user may write"
        ) from None


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _trusted(line: str, path: Path, what: str) -> TrustedKey:
    text, *rest = line.split()
    key = checked_key(text, path, what)
    if not rest:
        return TrustedKey(key)
    if len(rest) > 1:
        raise KeyFileError(
            f"{path}: {what}: {len(rest) + 1} words",
            "write a key and one host or host:port, as in KEY host:port",
        )
    place = rest[0]
    if place.count(":") != 1 and not place.startswith("["):
        return TrustedKey(key, place)  # a name, or an IPv6 address alone
    if place.startswith("[") and place.endswith("]"):
        return TrustedKey(key, place[1:-1])
    try:
        host, port = split_address(place)
    except ValueError as error:
        raise KeyFileError(f"{path}: {what}: {error}", "write KEY host:port, or KEY host") from None
    return TrustedKey(key, host, port)


# --- both ---


def read_lines(path: Path, *, absent: str = "") -> list[str]:
    """The lines of a file of keys. Raises `KeyFileError`; ``absent`` is the next step where there is no such file."""
    try:
        # Whoever may name the file must not stop the thread that reads it, as a pipe in its place would.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise KeyFileError(f"cannot read the keys in {path}: it is no regular file")
            text = file.read(MAX_LIST_BYTES + 1)
        if len(text) > MAX_LIST_BYTES:
            raise KeyFileError(f"{path} has more than {MAX_LIST_BYTES} bytes: it is no list of keys")
        return [line.strip() for line in text.decode("ascii").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not plain text"
        hint = ""
        if isinstance(error, PermissionError):
            hint = f"give the file to the user of this process: chown {os.geteuid()} {path}"
        if isinstance(error, FileNotFoundError):
            hint = absent or f"`kvctl keys generate` begins a list; an empty one: touch {path}"
        raise KeyFileError(f"cannot read the keys in {path}: {why}", hint) from None


def checked_key(text: str, path: Path, what: str) -> bytes:
    """A key in Z85; ``what`` says where in the file it stands. Raises `KeyFileError`."""
    key = text.strip().encode()
    try:
        if len(key) == KEY_BYTES and len(z85.decode(key)) == curve.KEY:
            return key
    except ValueError:
        pass
    strange = next(
        (f"{one!r} is no character of Z85" for one in text.strip() if one not in z85.ALPHABET.decode()), ""
    )
    why = strange if len(key) == KEY_BYTES and strange else f"found {len(key)} characters"
    raise KeyFileError(f"{path}: {what}: {why}, a CURVE key has {KEY_BYTES} of Z85")
