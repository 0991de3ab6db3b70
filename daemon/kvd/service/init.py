"""`kvd init`: what a host, or one of its users, needs before the first kvd.

All steps are found out before any is taken, so `--dry-run` tells of the same ones. What is there already is left alone.
"""

from __future__ import annotations

import argparse
import grp
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd.keys import KeyFileError, write_pair
from kvd.service.config import endpoint
from kvd.service.errors import StartError
from kvd.service.flags import FlagParser
from kvd.shipped import shipped
from kvd.wire.names import RUNTIME_DIR_VARIABLE, runtime_dir

HIDDEN = ("/home", "/root", "/run/user")
"""What the host's unit hides from kvd (ProtectHome), its Python included."""
NO_KEYS_YET = "# Keys that this kvd trusts: KEY host:port. See kvctl keys trust.\n"
_SETTING = re.compile(r"^( *)([a-z_]+):")


@dataclass(frozen=True, slots=True)
class HostStep:
    """One thing to make. ``left`` says why it is left alone, and is empty where ``take`` is to be called."""

    what: str
    left: str
    take: Callable[[], None]


@dataclass(frozen=True, slots=True)
class HostPlaces:
    """Where things go, and whose they are. ``owner`` None: whoever makes them, on a host of several users."""

    settings: Path
    unit: Path
    unit_text: str
    owner: str | None = None
    group: str = ""
    packaged: tuple[Path, ...] = ()
    root: Path = Path("/")
    runtime: str = ""
    state: str = ""

    @property
    def keys(self) -> Path:
        """This host's pair."""
        return self.settings.with_name("host.keys")

    @property
    def trusted(self) -> Path:
        """The keys of other hosts."""
        return self.settings.with_name("trusted.keys")


def init(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Take the steps and print each; the exit code. Raises `StartError` at the first that fails, `ConfigError`."""
    given = _parser().parse_args(arguments)
    host = os.geteuid() == 0 or given.root is not None
    places = _of_host(given) if host else _of_user(environment)
    for name in ("listen", "advertise"):
        if value := getattr(given, name):
            endpoint(value, f"--{name}")
    changes = {
        "peer.listen": given.listen,
        "peer.advertise": given.advertise,
        "runtime_dir": places.runtime,
        "state_dir": places.state,
        "peer.curve.key_file": f"/{places.keys.relative_to(places.root)}",
        "peer.curve.authorized_keys": f"/{places.trusted.relative_to(places.root)}",
    }
    text = with_settings(
        shipped("kvd.yaml").read_text(), {key: value for key, value in changes.items() if value}
    )
    sys.stdout.write(
        f"kvd init, for {'this host' if host else 'this user alone'}"
        f"{'; nothing is changed (--dry-run)' if given.dry_run else ''}:\n"
    )
    for step in _steps(places, text, given):
        done = "left alone" if step.left else "would make" if given.dry_run else "made"
        if not step.left and not given.dry_run:
            _take(step)
        sys.stdout.write(f"  {done:<10}  {step.what}{': ' * bool(step.left)}{step.left}\n")
    sys.stdout.write("next:\n" + "".join(f"  {line}\n" for line in _next(places, given)))
    return 0


def with_settings(text: str, changes: Mapping[str, str]) -> str:
    """The default configuration with other values, by dotted key; its comments stay.

    Raises `StartError` for a key that does not stand in it.
    """
    lines, missing = text.splitlines(), dict(changes)
    above: list[tuple[int, str]] = []
    for at, line in enumerate(lines):
        if not (found := _SETTING.match(line)):
            continue
        depth, name = len(found[1]), found[2]
        above = [*((d, n) for d, n in above if d < depth), (depth, name)]
        key = ".".join(n for _, n in above)
        if key in missing:
            lines[at] = f"{found[1]}{name}: {json.dumps(missing.pop(key))}"
    if missing:
        raise StartError(f"the default configuration has no {', '.join(missing)}", hint="install kvd anew")
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="kvd init",
        description="Makes what kvd needs: its user and group, the directory of its settings, keys, a configuration "
        "and a unit of systemd. As root for this host, as another user for that user's own engines. What exists is "
        "left alone, so it may be typed again. It starts nothing.",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be made, and make nothing")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", default="", help="serve the kvds of other hosts there"
    )
    parser.add_argument(
        "--advertise",
        metavar="HOST:PORT",
        default="",
        help="what other hosts reach it by, where that differs",
    )
    parser.add_argument("--user", default="kvd", help="who kvd runs as; for a host (default: kvd)")
    parser.add_argument(
        "--group", default="", help="whose members may use it; for a host (default: as the user)"
    )
    parser.add_argument(
        "--root",
        type=Path,
        metavar="DIR",
        help="a host's root directory elsewhere, as of an image that is being made",
    )
    return parser


def _of_host(given: argparse.Namespace) -> HostPlaces:
    root = (given.root or Path("/")).absolute()
    group = given.group or given.user
    text = shipped("systemd").joinpath("kvd.service").read_text()
    for old, new in (("ExecStart=/usr/bin/env kvd", f"ExecStart={_itself()}"), ("User=kvd", f"User={given.user}"),
                     ("Group=kvd", f"Group={group}")):  # fmt: skip
        text = text.replace(f"\n{old}\n", f"\n{new}\n")
    return HostPlaces(
        settings=root / "etc/kvd/kvd.yaml",
        unit=root / "etc/systemd/system/kvd.service",
        unit_text=text,
        owner=given.user,
        group=group,
        packaged=tuple(
            root / place / "systemd/system/kvd.service" for place in ("usr/lib", "lib", "usr/local/lib")
        ),
        root=root,
    )


def _of_user(environment: Mapping[str, str]) -> HostPlaces:
    home = Path(environment.get("HOME") or pwd.getpwuid(os.geteuid()).pw_dir)
    config = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    state = Path(environment.get("XDG_STATE_HOME") or home / ".local/state", "kvd")
    session = environment.get("XDG_RUNTIME_DIR")
    text = shipped("systemd").joinpath("kvd-user.service").read_text()
    return HostPlaces(
        settings=config / "kvd/kvd.yaml",
        unit=config / "systemd/user/kvd.service",
        unit_text=text.replace("ExecStart=/usr/bin/env kvd", f"ExecStart={_itself()}"),
        # Not what is looked for by default: that is the host's, where there is one.
        runtime=str(Path(session, "kvd") if session else state / "run"),
        state=str(state),
    )


def _itself() -> str:
    """The command that starts this very kvd, whatever the PATH of who starts it."""
    beside = Path(sys.executable).with_name("kvd")
    return str(beside) if beside.exists() else f"{sys.executable} -m kvd.service"


# --- the steps ---


def _steps(places: HostPlaces, text: str, given: argparse.Namespace) -> Iterator[HostStep]:
    if places.owner is not None:
        yield _account(places, places.owner)
    yield _directory(places.settings.parent, 0o755 if places.owner else 0o700)
    yield HostStep(
        f"{places.keys}, a pair of keys (mode 0600)",
        "it exists" * places.keys.exists(),
        lambda: _make_keys(places),
    )
    yield _file(places.trusted, NO_KEYS_YET, "the keys of other hosts, none yet", "it exists")
    unset = " and ".join(f"--{name}" for name in ("listen", "advertise") if getattr(given, name))
    kept = f"it exists; {unset} was not written into it" if unset else "it exists"
    yield _file(places.settings, text, "the settings", kept)
    packaged = next((str(path) for path in places.packaged if path.exists()), "")
    if packaged:
        yield HostStep(str(places.unit), f"{packaged} is there", lambda: None)
        return
    if places.unit.exists():
        same = places.unit.read_text() == places.unit_text
        kept = (
            "it exists"
            if same
            else "it exists, and is another than this kvd would make; move it away for that"
        )
        yield HostStep(str(places.unit), kept, lambda: None)
        return
    yield _file(places.unit, places.unit_text, "the unit", "")


def _account(places: HostPlaces, user: str) -> HostStep:
    what = f"user {user}, group {places.group}"
    group_exists = _number(places.root, "group", places.group) is not None
    if _number(places.root, "passwd", user) is not None:
        kept = f"user {user} exists" + f", and no group {places.group}" * (not group_exists)
        return HostStep(what, kept, lambda: None)
    own_group = ["--user-group"] if places.group == user and not group_exists else ["--gid", places.group]
    elsewhere = ["--prefix", str(places.root)] if places.root != Path("/") else []
    command = [
        "useradd", *elsewhere, "--system", *own_group, "--home-dir", "/var/lib/kvd", "--no-create-home",
        "--shell", "/usr/sbin/nologin", user,
    ]  # fmt: skip

    def add() -> None:
        program = shutil.which("useradd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if program is None:
            raise StartError(
                "there is no useradd here", hint=f"add a user {user} with a group {places.group}, then again"
            )
        done = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False)
        if done.returncode:
            raise StartError(f"useradd {user}: {done.stderr.strip()}", hint=f"type `{' '.join(command)}`")

    return HostStep(what, "", add)


def _number(root: Path, table: str, name: str) -> int | None:
    """The number of a user or group of a host; None where there is none.

    This host is asked by name: what comes from LDAP (sssd) or systemd stands in no file and is in no list of all.
    """
    if root == Path("/"):
        try:
            return pwd.getpwnam(name).pw_uid if table == "passwd" else grp.getgrnam(name).gr_gid
        except KeyError:
            return None
    try:
        rows = [line.split(":") for line in (root / "etc" / table).read_text().splitlines()]
    except FileNotFoundError:
        return None
    return next((int(row[2]) for row in rows if len(row) > 2 and row[0] == name), None)


def _directory(path: Path, mode: int) -> HostStep:
    def make() -> None:
        path.mkdir(parents=True)
        path.chmod(mode)  # whatever the umask here

    return HostStep(f"{path}, a directory (mode {mode:04o})", "it exists" * path.is_dir(), make)


def _make_keys(places: HostPlaces) -> None:
    write_pair(places.keys)
    if places.owner is not None:
        number = _number(places.root, "passwd", places.owner)
        if number is None:
            raise StartError(
                f"there is no user {places.owner} yet to give {places.keys} to",
                hint=f"chown {places.owner}: {places.keys} once there is",
            )
        os.chown(places.keys, number, -1)


def _file(path: Path, text: str, what: str, kept: str) -> HostStep:
    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:
            file.write(text)
        path.chmod(0o644)

    return HostStep(f"{path}, {what}", kept * path.exists(), write)


def _take(step: HostStep) -> None:
    try:
        step.take()
    except KeyFileError as error:
        raise StartError(f"cannot make {step.what}: {error.message}", hint=error.hint) from None
    except OSError as error:
        raise StartError(
            f"cannot make {step.what}: {error.strerror}",
            hint="as root it is for the host, as another user for that user; `kvd init --dry-run` says what is left",
        ) from None


# --- what is left to a person ---


def _next(places: HostPlaces, given: argparse.Namespace) -> Iterator[str]:
    itself = _itself()
    command = "kvd" if shutil.which("kvd") else itself
    if places.owner is None:
        yield _explained("systemctl --user enable --now kvd", "where systemd runs")
        yield _explained(f"{command} --config {places.settings}", "or in the foreground")
        if str(runtime_dir()) != places.runtime:
            yield _explained(
                f"export {RUNTIME_DIR_VARIABLE}={places.runtime}",
                f"for kvctl and engines, which would look in {runtime_dir()}",
            )
        return
    if itself.startswith(HIDDEN):
        yield _explained(
            "install kvd in /opt/kvd, then kvd init again", f"the unit hides {' and '.join(HIDDEN)} from kvd"
        )
    yield _explained(f"usermod --append --groups {places.group} USER", "whoever runs engines, but root")
    if given.root is not None or Path("/run/systemd/system").is_dir():
        yield "systemctl enable --now kvd"
    else:
        yield _explained(f"{command} --state-dir /var/lib/kvd", "in the foreground: no systemd runs here")
    if not given.listen:
        yield _explained("kvctl keys show", f"for several hosts, and peer.listen in {places.settings}")


def _explained(command: str, why: str) -> str:
    return f"{command:<44}  # {why}"
