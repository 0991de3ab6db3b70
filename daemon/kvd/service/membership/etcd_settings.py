"""The settings for etcd, checked before kvd starts: files are read once, and what is missing is named."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvd.service.config import EtcdSettings
from kvd.service.errors import ConfigError

if TYPE_CHECKING:
    import ssl

_WORD = re.compile(r"[A-Za-z0-9._-]{1,200}")
"""What a cluster and a host may be called in a key of etcd's."""
SECTION = "membership.etcd"
LONGEST_PASSWORD = 1024


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """Where etcd is and how kvd proves who it is. ``tls`` None: the system's certificates."""

    urls: tuple[str, ...]
    tls: ssl.SSLContext | None = None
    user: str = ""
    password: str = field(default="", repr=False)


def is_word(text: str) -> bool:
    """Whether a host may be called so in etcd."""
    return _WORD.fullmatch(text) is not None


def access_of(settings: EtcdSettings) -> EtcdAccess:
    """How etcd is reached. Raises `ConfigError` for settings that cannot be used."""
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError(
            "membership.source is etcd, which needs aiohttp, and that is not installed",
            hint="type `pip install kvctl[etcd]` in the environment that runs kvd",
        )
    if not settings.endpoints:
        raise ConfigError(
            f"membership.source is etcd but {SECTION}.endpoints is not set",
            hint="write for example [http://10.0.0.2:2379]",
        )
    for name, word in (("cluster", settings.cluster), ("host", settings.host or "any")):
        if not is_word(word):
            raise ConfigError(
                f"{SECTION}.{name}: {word!r} is no name",
                hint="take letters, digits, dots, hyphens and underscores",
            )
    for given, other in (("cert_file", "key_file"), ("key_file", "cert_file"), ("user", "password_file")):
        if getattr(settings, given) and not getattr(settings, other):
            raise ConfigError(
                f"{SECTION}.{given} is set but {SECTION}.{other} is not", hint="set both, or neither"
            )
    password = _password(settings.password_file) if settings.user else ""
    return EtcdAccess(tuple(map(_url, settings.endpoints)), _tls(settings), settings.user, password)


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError(
            f"{SECTION}.endpoints: {text!r} is no URL of a server",
            hint="write for example https://10.0.0.2:2379",
        )
    return text.rstrip("/")


def _tls(settings: EtcdSettings) -> ssl.SSLContext | None:
    if not (settings.ca_file or settings.cert_file):
        return None
    import ssl  # some Pythons have none, and only this needs it

    names = ", ".join(name for name in (settings.ca_file, settings.cert_file, settings.key_file) if name)
    try:
        context = ssl.create_default_context(cafile=settings.ca_file or None)
        if settings.cert_file:
            context.load_cert_chain(settings.cert_file, settings.key_file, password=_no_password)
    except (OSError, ValueError) as error:  # ssl's errors are of OSError
        why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"{SECTION}: the certificates cannot be used ({names}): {why}",
            hint="the files are PEM, and kvd's user must be able to read them",
        ) from None
    return context


def _no_password() -> str:
    """Else the terminal is asked for it."""
    raise ValueError("the key is encrypted, and kvd has no password for it")


def _password(name: str) -> str:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{SECTION}.password_file: cannot read {name}: {why}") from None
    password = text.rstrip("\r\n")
    if not password or len(password) > LONGEST_PASSWORD:
        raise ConfigError(
            f"{SECTION}.password_file: {name} has {len(password)} characters, wanted are 1 to {LONGEST_PASSWORD}"
        )
    return password
