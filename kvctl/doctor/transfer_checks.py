"""The transfers of late: misses and what they name, what takes long, and pairs of engines that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvctl import daemon
from kvctl.cli.settings import Settings
from kvctl.doctor.checks import checked
from kvctl.engines.cards import engine_geometry
from kvctl.engines.pairs import suggested
from kvctl.errors import KvctlError
from kvctl.views.doctor import Check, CheckState
from kvctl.views.slow import slow_document
from kvd.topology.compat import compare
from kvd.wire.transfer import ListTransfers, TransferList, TransferRecord

LOOKED_AT = 1000
"""Transfers that are asked for, the newest ones."""

_transfers = partial(checked, "transfers")


def transfer_checks(settings: Settings) -> Iterator[Check]:
    """The checks; asks kvd."""
    yield from _fits(settings)
    yield from checks_of(daemon.ask(settings, ListTransfers(limit=LOOKED_AT), TransferList))


def checks_of(answer: TransferList) -> Iterator[Check]:
    """The checks of the newest rows of a ledger."""
    if answer.hidden:
        unseen = "transfers of other users' engines are not looked at"
        yield _transfers(
            "skipped",
            "NOT_SHOWN",
            daemon.hidden(answer.hidden, unseen),
            "type it as root, or as the user of kvd",
        )
    if not answer.rows:
        state: CheckState = "skipped" if answer.hidden else "ok"
        yield _transfers(
            state, "TRANSFERS", f"none{' of your engines' if answer.hidden else ''} recorded yet"
        )
        return
    yield from _other_prompts(answer)
    findings = [finding for finding in slow_document(answer).findings if finding.severity == "warning"]
    for finding in findings:
        yield _transfers("warning", finding.code, f"{finding.pair}: {finding.message}", finding.hint)
    if not findings:
        missed = sum(row.record.state == "miss" for row in answer.rows)
        found = f"{missed} of the last {len(answer.rows)} missed, nothing that kvctl slow would warn of"
        yield _transfers("ok", "LATELY", found)


def _other_prompts(answer: TransferList) -> Iterator[Check]:
    """Requests that brought the params of another prompt: each was computed where it came, and is right."""
    found: dict[tuple[str, str], list[TransferRecord]] = {}
    for row in answer.rows:
        if row.record.code == "PROMPT_MISMATCH":
            found.setdefault((row.record.local_engine, row.record.remote_engine), []).append(row.record)
    for (here, there), records in found.items():
        requests = len({record.request_id for record in records})
        yield _transfers(
            "warning", "PROMPT_MISMATCH",
            f"{requests} of the last requests to {here} brought params of another prompt that {there} had"
            f" prefilled, {records[0].request_id} among them; each was computed at {here}",
            "one answer's params serve one prompt: does the router hand one set on to a list of prompts, or a"
            " client's own? Else tokenizer, chat template, adapters or cache_salt differ between the two engines;"
            f" kvctl transfers --engine {here} --code PROMPT_MISMATCH shows each",
        )  # fmt: skip


def _fits(settings: Settings) -> Iterator[Check]:
    rows = daemon.engines(settings, cards=True)
    fitting = 0
    for reader, source in suggested(rows):
        ends = f"{reader.engine.engine_id} from {source.engine.engine_id}"
        try:
            bad = [f for f in compare(engine_geometry(reader), engine_geometry(source)) if not f.ok]
        except KvctlError as error:
            yield _transfers("failed", "PAIR", f"{ends}: {error.message}", error.hint)
            continue
        fitting += not bad
        for factor in bad:
            differs = f"{factor.name} is {factor.local} here and {factor.remote} there"
            yield _transfers(
                "failed", "COMPAT_MISMATCH", f"{ends} cannot be read: {differs}; {factor.note}",
                f"kvctl diff {reader.engine.engine_id} {source.engine.engine_id}",
            )  # fmt: skip
    if fitting:
        yield _transfers("ok", "PAIRS", f"pairs that fit: {fitting}")
