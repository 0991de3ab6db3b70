"""`kvctl keys show`."""

from __future__ import annotations

from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.errors import KvctlError, NotPermitted
from kvctl.keys.places import UNKNOWN, ListFile, PairFile, key_files
from kvctl.keys.trusting import AS_OWNER, listed
from kvctl.views.output import show as print_document
from kvctl.views.setting_up.keys import HostKeys, trusted_hosts
from kvd.keys import KeyFileError, read_pair

SECTION = "Commands"
EXAMPLES = (
    "kvctl keys show",
    "kvctl keys show -o json | jq -r .public",
)
NO_PAIR = "kvctl keys generate makes a pair; --key-file names another file"


def show(settings: Settings, *, key_file: PairFile = None, list_file: ListFile = None) -> None:
    """The public key of this host, what others are to trust, and whom it trusts."""
    files = key_files(settings, key_file, list_file)
    try:
        public = read_pair(files.pair).public.decode()
    except KeyFileError as error:
        if not files.public:
            denied = isinstance(error.__context__, PermissionError)
            kind, hint = (NotPermitted, AS_OWNER) if denied else (KvctlError, error.hint or NO_PAIR)
            raise kind(error.message, hint) from None
        say(f"{error.message}; shown is the key that kvd runs with")
        public = files.public
    if files.public not in ("", public):
        say(f"kvd runs with another pair, {files.public}, until it is started again: {files.restart}")
    if files.error:
        say(f"kvd lets in the {files.in_force} keys that it read last: {files.error}")
    if files.twice:
        say(f"{files.twice}: both are let in, and the last one counts")
    if files.place == UNKNOWN:
        say(f"{UNKNOWN} is to be what peer.advertise says in kvd.yaml: this host, as the others reach it")
    gone = "" if files.trusted.exists() else f"there is no file {files.trusted}"
    body = HostKeys(
        public=public,
        file=str(files.pair),
        line=f"{public} {files.place}",
        list_file=str(files.trusted),
        trusted=trusted_hosts(listed(files.trusted)),
        error=files.error or gone,
        in_force=files.in_force if files.error else None,
    )
    print_document(body, settings)
