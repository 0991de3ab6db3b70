"""`kvctl prefix`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from kvctl import daemon
from kvctl.cli.options import FleetOption, ListSettings
from kvctl.cli.settings import Settings
from kvctl.commands.prefixes.rows import seen
from kvctl.errors import UsageError
from kvctl.views.fleet.holders import FleetPrefixHolders, fleet_holder
from kvctl.views.fleet.unanswered import asked, show_fleet
from kvctl.views.output import show
from kvctl.views.prefixes.prefix import PrefixHolders, holder_document
from kvd.wire.prefix import HASH_BYTES
from kvd.wire.prefixes.cache import MOST_TOKENS, FindHolders, HolderList, HolderRow

if TYPE_CHECKING:
    from kvctl.fleet.asking import FleetAnswers

SECTION = "Look"
EXAMPLES = (
    "kvctl prefix --tokens 1,15043,3186,29991",
    "kvctl prefix --fleet --file ids.json",
    "kvctl prefix BLOCK_HASH",
)
MOST_BYTES = 4 << 20
"""Of a file of token ids."""


class _About(NamedTuple):
    """What is asked for, as documents have it."""

    asked: Literal["tokens", "block"]
    tokens: int | None


def prefix(
    settings: ListSettings,
    block: Annotated[
        str | None, typer.Argument(metavar="[BLOCK_HASH]", help="The hash of a block, 64 hex digits.")
    ] = None,
    *,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="ID,ID,...", help="The prompt, as token ids.")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", metavar="FILE", help="The same in a file, as JSON or text; -: stdin."),
    ] = None,
    fleet: FleetOption = False,
) -> None:
    """Which engines hold how much of a prompt in their prefix caches.

    A prompt is given as token ids: kvctl has no tokenizer; the engine's /tokenize gives them. The engines make the
    hashes. Engines hold whole blocks: of a prompt shorter than one they hold nothing. A prompt with a cache_salt, an
    adapter or pictures has other hashes, and is not found by its tokens. vLLM's KV events name hashes of blocks, with
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0. The engines of this host are asked, with --host those of that host, with
    --fleet those of all known hosts; exit code 4 where some hosts did not answer.
    """
    given = [one for one in (block, tokens, file) if one is not None]
    if len(given) != 1:
        found = (
            f"{len(given)} of BLOCK_HASH, --tokens and --file were given" if given else "no prompt was given"
        )
        raise UsageError(f"{found}; it takes one", "kvctl prefix --tokens 1,2,3")
    question = FindHolders(block_hash=_hash(block)) if block is not None else _prompt(tokens, file)
    about = _About("tokens" if block is None else "block", len(question.tokens) if block is None else None)

    def ask(of: Settings) -> tuple[HolderRow, ...]:
        return daemon.ask(of, question, HolderList).rows

    if fleet:
        show_fleet(lambda: _fleet(daemon.fleet(settings, ask), about), settings, None)
    else:
        rows = seen((("", row) for row in ask(settings)), "here")
        holders = tuple(holder_document(row, prompt=block is None) for _, row in rows)
        show(PrefixHolders(**about._asdict(), holders=holders), settings)


def _fleet(answers: FleetAnswers[tuple[HolderRow, ...]], about: _About) -> FleetPrefixHolders:
    every = ((host, row) for host, rows in answers.answers.items() for row in rows)
    holders = tuple(
        fleet_holder(host, holder_document(row, prompt=about.tokens is not None))
        for host, row in seen(every, "of these hosts")
    )
    return FleetPrefixHolders(**about._asdict(), holders=holders, **asked(answers))


def _hash(text: str) -> bytes:
    """The hash in hex. Raises `UsageError`."""
    try:
        made = bytes.fromhex(text.removeprefix("0x"))
    except ValueError:
        made = b""
    if len(made) != HASH_BYTES:
        raise UsageError(
            f"{text!r} is no hash of a block: it has to be {2 * HASH_BYTES} hex digits",
            "a prompt is asked for by its token ids: kvctl prefix --tokens 1,2,3",
        )
    return made


def _prompt(tokens: str | None, file: str | None) -> FindHolders:
    """The question for a prompt. Raises `UsageError`."""
    text = tokens if tokens is not None else _read(str(file))
    words = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip())
    if words == [""]:
        raise UsageError("the prompt has no tokens", "give it as token ids: kvctl prefix --tokens 1,2,3")
    wrong = next((word for word in words if not re.fullmatch("[0-9]{1,9}", word)), None)
    if wrong is not None:
        raise UsageError(
            f"{wrong[:40]!r} is no token id",
            "token ids are numbers with commas or blanks between them: 1,2,3",
        )
    if len(words) > MOST_TOKENS:
        raise UsageError(
            f"the prompt has {len(words):,} tokens; at most {MOST_TOKENS:,} are asked for",
            "give its first ones",
        )
    return FindHolders(tokens=tuple(map(int, words)))


def _read(file: str) -> str:
    try:
        with sys.stdin if file == "-" else Path(file).open(encoding="utf-8") as source:
            text = source.read(MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"cannot read {file}: {why}", "name a file of token ids, or - for stdin") from None
    if len(text) > MOST_BYTES:
        raise UsageError(f"{file} has over {MOST_BYTES >> 20} MiB", "give the prompt's first tokens")
    return text
