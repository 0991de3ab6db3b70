"""`kvctl keys generate`."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.errors import NotPermitted, RefusedError, UsageError
from kvctl.keys.places import UNKNOWN, KeyFiles, ListFile, PairFile, key_files
from kvctl.keys.trusting import AS_OWNER, listed
from kvctl.views.output import show
from kvctl.views.setting_up.keys import HostKeys, trusted_hosts
from kvd.keys import KeyFileError, write_pair

SECTION = "Commands"
EXAMPLES = (
    "kvctl keys generate",
    "kvctl keys generate --key-file ./host.keys --list ./trusted.keys",
)


def generate(settings: Settings, *, key_file: PairFile = None, list_file: ListFile = None) -> None:
    """Make the pair of keys of this host.

    The file is for its owner alone (mode 0600), and one that exists is never written over.
    """
    files = key_files(settings, key_file, list_file)
    try:
        public = write_pair(files.pair).decode()
    except KeyFileError as error:
        if isinstance(error.__context__, PermissionError):
            raise NotPermitted(error.message, AS_OWNER) from None
        kind = RefusedError if files.pair.exists() else UsageError
        raise kind(error.message, error.hint) from None
    owned = _give_to_kvd(files)
    if not files.trusted.exists() and files.trusted.parent.is_dir():
        _begin(files.trusted)
    body = HostKeys(
        public=public,
        file=str(files.pair),
        line=f"{public} {files.place}",
        list_file=str(files.trusted),
        trusted=trusted_hosts(listed(files.trusted)),
    )
    show(body, settings)
    if files.place == UNKNOWN:
        say(f"{UNKNOWN} is to be what peer.advertise says in kvd.yaml: this host, as the others reach it")
    if files.public:
        say(
            f"kvd runs with the pair {files.public} until it is started again ({files.restart}); then the others"
            " type the line above, with --replace"
        )
        return
    say(
        f"set peer.curve.key_file to {files.pair.absolute()} and peer.curve.authorized_keys to"
        f" {files.trusted.absolute()} in kvd.yaml"
        + ("" if owned else f", and let kvd's user own the first: chown kvd: {files.pair}{_missing_user()}")
    )


def _missing_user() -> str:
    """A word on the user of systemd's unit, where this host has none."""
    try:
        pwd.getpwnam("kvd")
    except KeyError:
        return " (no user kvd yet: useradd --system --user-group kvd, or name whoever kvd runs as)"
    return ""


def _give_to_kvd(files: KeyFiles) -> bool:
    """Give the pair to the user that kvd runs as: it is for its owner alone. Whether it is his."""
    if files.uid is None:
        return False
    if files.uid != os.geteuid():
        try:
            os.chown(files.pair, files.uid, -1)
        except OSError as error:
            say(f"kvd runs as uid {files.uid}, and cannot read {files.pair}: {error.strerror}")
            return False
    return True


def _begin(path: Path) -> None:
    """An empty list, so that kvd can follow it: without one all hosts would have to share the pair."""
    try:
        path.write_text("# Keys that this kvd trusts: KEY host:port. See kvctl keys trust.\n")
        path.chmod(0o644)  # public keys, which kvd's user must be able to read whatever the umask here
    except OSError as error:
        say(f"{path} was not begun: {error.strerror}")
