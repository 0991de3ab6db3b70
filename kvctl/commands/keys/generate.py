"""`kvctl keys generate`."""

from __future__ import annotations

import sys
from pathlib import Path

from kvctl.cli.settings import Settings
from kvctl.errors import RefusedError, UsageError
from kvctl.keys.places import ListFile, PairFile, key_files
from kvctl.keys.trusting import listed
from kvctl.views.keys import HostKeys, trusted_hosts
from kvctl.views.output import show
from kvd.keys import KeyFileError, write_pair

SECTION = "Commands"


def generate(settings: Settings, *, key_file: PairFile = None, list_file: ListFile = None) -> None:
    """Make the pair of keys of this host.

    The file is for its owner alone (mode 0600), and one that exists is never written over.
    """
    files = key_files(settings, key_file, list_file)
    try:
        public = write_pair(files.pair).decode()
    except KeyFileError as error:
        kind = RefusedError if files.pair.exists() else UsageError
        raise kind(error.message, error.hint) from None
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
    sys.stderr.write(
        f"kvctl: set peer.curve.key_file to {files.pair} and peer.curve.authorized_keys to {files.trusted} in kvd.yaml,"
        " and let kvd's user own the first\n"
    )


def _begin(path: Path) -> None:
    """An empty list, so that kvd can follow it: without one all hosts would have to share the pair."""
    try:
        path.write_text("# Keys that this kvd trusts: KEY host:port. See kvctl keys trust.\n")
    except OSError as error:
        sys.stderr.write(f"kvctl: {path} was not begun: {error.strerror}\n")
