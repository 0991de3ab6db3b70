"""What `kvctl bundle` gathers: what kvd and this host say of themselves, each bounded and without secrets."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kvctl import daemon
from kvctl.cli.settings import Settings
from kvctl.doctor.whole import whole_checks
from kvctl.errors import KvctlError
from kvctl.ledger.rows import rows
from kvctl.processes.supervisor import its_log
from kvctl.views.doctor import doctor_document
from kvctl.views.engines import Engines, engine_document
from kvctl.views.output import text_of
from kvctl.views.status import status_document
from kvctl.views.transfers.document import Transfers, transfer_document
from kvctl.views.workers import Workers, worker_document
from kvd.installed import own_version
from kvd.wire import query
from kvd.wire.frame import WIRE_VERSION
from kvd.wire.transfer import ListTransfers

MOST_BYTES = 8 << 20
"""Of one file in the bundle; a larger document is left out, and the manifest says so."""
LOG_BYTES = 1 << 20
"""Of kvd's log, the newest."""
LOG_SECONDS = 10.0
"""How long journalctl may take."""
PACKAGES = ("vllm", "torch", "nixl", "mooncake-transfer-engine", "pyzmq", "msgspec")
"""Whose versions are told, where they are installed beside kvctl."""
REDACTED = "(redacted)"
SECRET = re.compile(r"secret|password|passwd|token|credential|api_?key|private", re.IGNORECASE)
"""Names of entries whose values are left out of the configuration."""
_CALLED = r"(?:(?:api[_-]?key|secret|password|passwd|credential|private[_-]?key)[\w-]*|token(?!\w))"
_WORTH = r"""(?:(?<=")[^"\\]+|(?<=')[^'\\]+|[^\s"',;\\]+)"""
SECRETS_IN_TEXT = (
    (re.compile(r"(?<=://)[^\s\"'<>]+(?=@)"), REDACTED),
    (re.compile(r"(?i)\b(authorization:\s*)\S+(\s+\S+)?"), rf"\1{REDACTED}"),
    (re.compile(r"(?i)\bbearer\s+\S+"), f"Bearer {REDACTED}"),
    (re.compile(rf"(?i)({_CALLED}[\"'\\\\]*\s*[=:]\s*[\"'\\\\]*){_WORTH}"), rf"\1{REDACTED}"),
    (re.compile(rf"(?i)(--[\w-]*{_CALLED}\s+[\"']?){_WORTH}"), rf"\1{REDACTED}"),
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}"), REDACTED),
)  # fmt: skip
"""Users and passwords in addresses, headers, entries that say what they are, and tokens of model hubs."""


@dataclass(frozen=True)
class Evidence:
    """One file of the bundle. ``text`` is empty where it is left out, and ``why`` says why."""

    name: str
    what: str
    text: str = ""
    why: str = ""


def gathered(settings: Settings, last: int, config: Path) -> Iterator[Evidence]:
    """All of it. What cannot be had is left out with the reason: a bundle is made for when something is wrong."""
    status: list[query.KvdStatus] = []

    def of_status() -> str:
        status.append(daemon.ask(settings, query.GetStatus(), query.KvdStatus))
        return in_json(status_document(status[0]))

    def in_json(body: msgspec.Struct) -> str:
        return text_of(body, as_json)

    as_json = replace(settings, output="json")
    yield _had("versions.json", "kvctl, wire, Python, kernel and packages", _versions)
    yield _had("status.json", "kvctl status: kvd, peers, counters, gauges", of_status)
    yield _had(
        "engines.json", "kvctl engines: engines with open leases",
        lambda: in_json(Engines(engines=tuple(engine_document(row, ()) for row in daemon.engines(settings)))),
    )  # fmt: skip
    yield _had(
        "workers.json", "kvctl workers: workers and schedulers",
        lambda: in_json(Workers(workers=tuple(map(worker_document, daemon.workers(settings))))),
    )  # fmt: skip
    yield _had(
        "transfers.json", f"kvctl transfers: at most the newest {last}",
        lambda: in_json(_transfers(settings, last)),
    )  # fmt: skip
    yield _had(
        "doctor.json",
        "kvctl doctor --quick",
        lambda: in_json(doctor_document(whole_checks(settings, quick=True))),
    )
    yield _had("kvd.yaml", f"{config}, without values of secrets", lambda: configuration(config))
    yield _had(
        "log.txt", f"the newest {LOG_BYTES >> 20} MiB of kvd's log",
        lambda: log_of(its_log(status[0].pid) if status else its_log(0)),
    )  # fmt: skip


def redacted(text: str) -> str:
    """Text without what looks like a secret."""
    for pattern, instead in SECRETS_IN_TEXT:
        text = pattern.sub(instead, text)
    return text


def configuration(path: Path) -> str:
    """A YAML file without the values of entries that are called as secrets are. Raises `OSError` and `ValueError`."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError:
        raise ValueError(f"{path} is not YAML: it could not be redacted") from None
    return yaml.safe_dump(_without_secrets(document), sort_keys=False)


def log_of(place: str) -> str:
    """The end of kvd's log, which is at ``place`` as `its_log` says it. Raises `OSError` and `ValueError`."""
    unit = place.removeprefix("journalctl -u ")
    if unit != place:
        program = shutil.which("journalctl")
        if program is None:
            raise ValueError("there is no journalctl here")
        command = [program, "-u", unit, "-n", "5000", "--no-pager", "-o", "short-iso"]
        done = subprocess.run(command, capture_output=True, timeout=LOG_SECONDS, check=False)
        text = done.stdout
    else:
        path = Path(place)
        if not path.is_file():
            raise ValueError(f"kvd's log is {place}")
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES - 1))
            text = file.read(LOG_BYTES + 1)
    if len(text) > LOG_BYTES:  # a line without its beginning may have a secret without its name
        text = text[-LOG_BYTES - 1 :].partition(b"\n")[2]
    return text.decode(errors="replace")


def _had(name: str, what: str, make: Callable[[], str]) -> Evidence:
    try:
        text = redacted(make())
    except KvctlError as error:
        return Evidence(name, what, why=f"{error.message} [{error.code}]")
    except OSError as error:
        return Evidence(name, what, why=f"cannot read {error.filename}: {error.strerror}")
    except (ValueError, subprocess.TimeoutExpired) as error:
        return Evidence(name, what, why=str(error))
    if not text.strip():
        return Evidence(name, what, why="it is empty")
    if (size := len(text.encode())) > MOST_BYTES:
        return Evidence(
            name, what, why=f"it has {size} bytes, {MOST_BYTES} are the most; take fewer with --last"
        )
    return Evidence(name, what, text)


def _transfers(settings: Settings, last: int) -> Transfers:
    answer = rows(settings, ListTransfers(), last)
    return Transfers(total=answer.total, transfers=tuple(map(transfer_document, answer.rows)))


def _versions() -> str:
    versions = {"kvctl": own_version(), "wire": WIRE_VERSION, "python": platform.python_version()}
    versions |= {"kernel": platform.release(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return msgspec.json.format(msgspec.json.encode(versions), indent=2).decode() + "\n"


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: REDACTED if SECRET.search(str(key)) and one is not None else _without_secrets(one)
            for key, one in value.items()
        }
    return [_without_secrets(one) for one in value] if isinstance(value, list) else value
