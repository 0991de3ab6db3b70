"""`kvctl keys show`."""

from __future__ import annotations

from kvctl.cli.settings import Settings
from kvctl.errors import KvctlError
from kvctl.keys.places import ListFile, PairFile, key_files
from kvctl.keys.trusting import listed
from kvctl.views.keys import HostKeys, trusted_hosts
from kvctl.views.output import show as print_document
from kvd.wire.keys import KeyFileError, read_pair

SECTION = "Commands"


def show(settings: Settings, *, key_file: PairFile = None, list_file: ListFile = None) -> None:
    """The public key of this host, what others are to trust, and whom it trusts."""
    files = key_files(settings, key_file, list_file)
    try:
        public = read_pair(files.pair).public.decode()
    except KeyFileError as error:
        raise KvctlError(
            error.message, error.hint or "kvctl keys generate makes a pair; --key-file names another file"
        ) from None
    body = HostKeys(
        public=public,
        file=str(files.pair),
        line=f"{public} {files.place}",
        list_file=str(files.trusted),
        trusted=trusted_hosts(listed(files.trusted)),
    )
    print_document(body, settings)
