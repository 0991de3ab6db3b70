"""`kvctl bundle`."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import stat
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvctl import daemon
from kvctl.cli.option_kinds import number
from kvctl.cli.settings import Settings
from kvctl.errors import KvctlError, RefusedError
from kvctl.views.first_aid.bundle import Bundle, Bundled
from kvctl.views.output import show
from kvctl.views.registry import wrapped
from kvd.installed import own_version

if TYPE_CHECKING:
    from kvctl.doctor.evidence import Evidence

SECTION = "Look"
EXAMPLES = (
    "kvctl bundle",
    "kvctl bundle /tmp/host7.tar.gz -n 100  # with the newest 100 transfers",
)
LAST = 1000
CONFIG = Path("/etc/kvd/kvd.yaml")
HAS = "names of hosts, users' ids, engines and models, and ids of requests"
HAS_NOT = "prompts, tokens, KV, secret halves of keys, or values that are called as secrets are"


def bundle(
    settings: Settings,
    *,
    file: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="A .tar.gz; none: kvctl-bundle-HOST-TIME.tar.gz here."),
    ] = None,
    last: Annotated[
        int | None, number("--last", "--limit", "-n", help=f"So many transfers. [{LAST}]")
    ] = None,
    kvd_config: Annotated[
        str | None, typer.Option("--kvd-config", metavar="FILE", help=f"kvd's configuration. [{CONFIG}]")
    ] = None,
) -> None:
    """What somebody needs who is to find out what is wrong here, in one file.

    Versions, status, engines, workers, recent transfers, doctor's checks, kvd's configuration and the end of its log,
    with a manifest. Look at it before you give it away: it names hosts, engines and requests. The file is for its owner
    alone (mode 0600); one of that name is replaced, and what is no regular file is refused with exit code 5. What
    cannot be had, as where kvd does not run, is left out, which the manifest says.
    """
    from kvctl.doctor.evidence import gathered

    made, host = datetime.now(UTC), socket.gethostname()
    daemon.refuse_afar(settings)
    path = Path(file or f"kvctl-bundle-{host}-{made:%Y%m%dT%H%M%SZ}.tar.gz").expanduser()
    _refuse_special(path)
    found = list(gathered(settings, last or LAST, Path(kvd_config or CONFIG).expanduser()))
    body = Bundle(
        file=str(path),
        made=made.replace(microsecond=0),
        host=host,
        kvctl=own_version(),
        has=HAS,
        has_not=HAS_NOT,
        members=tuple(map(_bundled, found)),
    )
    _write(path, body, found)
    show(body, settings)


def _bundled(one: Evidence) -> Bundled:
    data = one.text.encode()
    digest = hashlib.sha256(data).hexdigest() if data else ""
    return Bundled(name=one.name, what=one.what, bytes=len(data), sha256=digest, left_out=one.why)


def _refuse_special(path: Path) -> None:
    """Raise `RefusedError` where the path is there and no regular file: a link may lead anywhere."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        raise RefusedError(f"{path} is no regular file, and is not replaced", "name another FILE")


def _write(path: Path, body: Bundle, found: list[Evidence]) -> None:
    """The archive takes its name when it is whole. Raises `KvctlError` where it cannot be written."""
    manifest = msgspec.json.format(msgspec.json.encode(wrapped(body)), indent=2)
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with (
                os.fdopen(descriptor, "wb") as raw,
                tarfile.open(fileobj=raw, mode="w:gz", format=tarfile.PAX_FORMAT) as archive,
            ):
                _add(archive, "manifest.json", manifest, body.made)
                for one in found:
                    if one.text:
                        _add(archive, one.name, one.text.encode(), body.made)
            _refuse_special(path)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise KvctlError(
            f"{path} cannot be written: {error.strerror or error}", "name another FILE, or make room"
        ) from None


def _add(archive: tarfile.TarFile, name: str, data: bytes, made: datetime) -> None:
    member = tarfile.TarInfo(f"kvctl-bundle/{name}")
    member.size, member.mode, member.mtime = len(data), 0o600, int(made.timestamp())
    archive.addfile(member, io.BytesIO(data))
