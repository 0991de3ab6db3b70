"""`kvctl top` at 80 columns and 24 lines, with keys alone: real kvds, and a lease, transfers and misses in them."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable

from kvctl.cli.settings import Settings
from kvctl.commands.transfer import whole
from kvctl.top.app import TopApp, Watched
from kvctl.top.looking import look
from kvd.client.session import KvdSession
from kvd.wire.identity import LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseClaimed
from kvd.wire.registration import OpenLease
from kvd.wire.reply import Ok
from kvd.wire.transfer import ReportTransfers, TransferRecord
from tests.support.daemons import Daemon, daemons, facts, scheduler, session, worker

LONG = "cmpl-8ed2bb737f480ee5a1b2c3d4e5f6-0-93b25bba"
RECORD = TransferRecord(
    transfer_id="t-1",
    request_id=LONG,
    local_engine="decode-0",
    local_rank="tp0",
    remote_engine="prefill-0",
    remote_generation="g",
    remote_request_id="r-1",
    backend="direct",
    mode="pull",
    state="done",
    bytes=64 << 20,
    stages={"queued": 0.001, "handshake": 0.0, "plan": 0.001, "post": 0.002, "wire": 0.008},
    moments={"queued": -0.001, "posted": 0.003, "last": 0.011},
)


class Reporter:
    """The only worker of an engine; its records are new at each call."""

    def __init__(self, made: KvdSession) -> None:
        self._session = made

    def report(self, *records: TransferRecord) -> None:
        answer = self._session.call(ReportTransfers(incarnation="i", records=records), 10.0).result(15)
        assert isinstance(answer, Ok)


@contextmanager
def working(daemon: Daemon) -> Iterator[Reporter]:
    """Two engines, of which one reads under a lease of the other, and three transfers, one of them a miss."""
    prefill, decode = facts("prefill-0", role="prefill"), facts("decode-0", role="decode")
    with (
        session(daemon, worker(prefill)),
        session(daemon, worker(decode, incarnation="i")) as reports,
        session(daemon, scheduler(prefill, (OpenLease("r-flying", 100.0, 7),))),
        session(daemon, scheduler(decode)) as reads,
    ):
        key = LeaseKey(engine_id="prefill-0", request_id="r-flying", endpoint=daemon.endpoint)
        claimed = reads.call(LeaseClaim(key=key, reader="one"), 5.0).result()
        assert isinstance(claimed, LeaseClaimed)
        assert claimed.seconds > 0, claimed.reason
        reporter = Reporter(reports)
        now = time.time()
        replace = msgspec.structs.replace
        reporter.report(
            replace(RECORD, started=now - 2),
            replace(RECORD, transfer_id="t-2", request_id="small", bytes=1024, started=now - 1),
            replace(
                RECORD, transfer_id="t-3", request_id="missed", state="miss", code="PEER_GONE", cause="it went away",
                bytes=0, stages={}, moments={}, started=now,
            ),
        )  # fmt: skip
        yield reporter


@pytest.fixture(scope="module")
def kvd() -> Iterator[Daemon]:
    with daemons() as [daemon], working(daemon):
        yield daemon


def app(daemon: Daemon, timeout: float = 20.0) -> TopApp:
    settings = Settings(runtime_dir=str(daemon.directory), timeout=timeout)
    watched = Watched(partial(look, settings), partial(whole, settings), str(daemon.directory))
    return TopApp(watched, 0.2)


Steps = Callable[[TopApp, Pilot[None]], Awaitable[None]]


def piloted(made: TopApp, steps: Steps, size: tuple[int, int] = (80, 24)) -> None:
    async def driven() -> None:
        async with made.run_test(size=size) as pilot:
            await steps(made, pilot)

    asyncio.run(driven())


def lines(made: TopApp) -> list[str]:
    """What stands on the screen."""
    width, height = made.size
    strips = made.screen._compositor.render_strips()
    assert len(strips) <= height
    texts = ["".join(segment.text for segment in strip) for strip in strips]
    assert max(map(len, texts)) <= width
    return [text.rstrip() for text in texts]


async def until(made: TopApp, pilot: Pilot[None], wanted: str) -> list[str]:
    """The screen as soon as it has that text."""
    async with asyncio.timeout(30):
        while True:
            shown = lines(made)
            if wanted in " ".join(" ".join(shown).split()):
                return shown
            await pilot.pause(0.02)


def test_engines_pairs_flights_transfers_and_misses_fit_80_columns(kvd: Daemon) -> None:
    async def steps(made: TopApp, pilot: Pilot[None]) -> None:
        engines = await until(made, pilot, "decode-0 decode ready 1/1 0 1.07 MiB/s 0 B/s 1 prefill-0")
        assert engines[1].split("  ")[-1].startswith("1 miss in 1m00s")
        assert "1 in flight  1 open lease" in engines[1]
        assert "1 Engines 2  2 Pairs 1  3 In flight 1" in engines[2]
        await pilot.press("2")
        pairs = await until(made, pilot, "prefill-0 decode-0 3 1")
        assert [line for line in pairs if line.split()[:4] == ["prefill-0", "decode-0", "3", "1"]]
        await pilot.press("3")
        flights = await until(made, pilot, "prefill-0 decode-0 r-flying")
        assert [line for line in flights if line.split()[-3:] == ["prefill-0", "decode-0", "r-flying"]]
        await pilot.press("4")
        transfers = await until(made, pilot, "decode-0/tp0")
        *others, cut = [line.split()[1] for line in transfers if "decode-0/tp0" in line][:3]
        assert others == ["missed", "small"]
        assert (cut[:5], cut[-5:], "~" in cut) == (LONG[:5], LONG[-5:], True), "its begin and its end"
        assert [line for line in transfers if line.endswith("TIME")], "all columns are in sight"
        await pilot.press("5")
        misses = await until(made, pilot, "PEER_GONE 1 1")
        assert [
            line for line in misses if line.split()[:3] == ["PEER_GONE", "1", "1"] and "it went away" in line
        ]

    piloted(app(kvd), steps)


def test_columns_are_as_wide_as_their_cells_before_anything_is_drawn(kvd: Daemon) -> None:
    async def steps(made: TopApp, pilot: Pilot[None]) -> None:
        await until(made, pilot, "prefill-0")
        made.action_table(1)
        table = made.query_one(DataTable)
        padding = 2 * table.cell_padding
        widths = {str(one.label): one.get_render_width(table) - padding for one in table.ordered_columns}
        assert (widths["FROM"], widths["TO"]) == (len("prefill-0"), len("decode-0"))

    piloted(app(kvd), steps)


def test_enter_shows_the_timeline_of_the_chosen_transfer_and_its_id_stands_whole_below_the_table(
    kvd: Daemon,
) -> None:
    async def steps(made: TopApp, pilot: Pilot[None]) -> None:
        await until(made, pilot, "1 Engines 2")
        await pilot.press("4", "down", "down")
        await until(made, pilot, LONG)
        await pilot.press("enter")
        timeline = await until(made, pilot, "wire")
        assert [line for line in timeline if LONG in line and line.startswith("request")]
        assert [line for line in timeline if "wire" in line and "####" in line]
        await pilot.press("escape")
        await until(made, pilot, "4 Transfers")

    piloted(app(kvd), steps)


def test_rows_are_filtered_and_sorted_by_keys_alone(kvd: Daemon) -> None:
    def requests(made: TopApp) -> list[str]:
        table = made.query_one(DataTable)
        return [str(table.get_row_at(row)[1]) for row in range(table.row_count)]

    async def steps(made: TopApp, pilot: Pilot[None]) -> None:
        await until(made, pilot, "1 Engines 2")
        await pilot.press("4")
        await pilot.press(*"ssssss")  # by the sixth column, bytes
        await until(made, pilot, "BYTES v")
        assert requests(made)[1:] == ["small", "missed"]
        await pilot.press("r")
        assert requests(made)[:2] == ["missed", "small"]
        await pilot.press("slash", *"SMALL", "enter")
        await until(made, pilot, "/SMALL")
        assert requests(made) == ["small"]
        await pilot.press("escape")
        assert len(requests(made)) == 3

    piloted(app(kvd), steps)


def test_enter_on_a_pair_shows_its_transfers(kvd: Daemon) -> None:
    async def steps(made: TopApp, pilot: Pilot[None]) -> None:
        await until(made, pilot, "1 Engines 2")
        await pilot.press("2", "enter")
        shown = await until(made, pilot, "STARTED")
        assert [line for line in shown if "/prefill-0" in line]
        assert made.query_one(DataTable).row_count == 3

    piloted(app(kvd), steps)


def test_while_kvd_is_away_the_screen_says_so_and_it_goes_on_when_it_is_back() -> None:
    async def steps(made: TopApp, pilot: Pilot[None]) -> None:
        await until(made, pilot, "1 Engines 1")
        daemon.kill()
        away = await until(made, pilot, "not answered since")
        assert [line for line in away if "decode-0" in line], "what was seen last still stands"
        await asyncio.to_thread(daemon.start)
        while [line for line in lines(made) if "not answered" in line]:
            await pilot.pause(0.02)

    with daemons() as [daemon], session(daemon, worker(facts("decode-0", role="decode"))):
        piloted(app(daemon, timeout=2.0), steps)  # a question may be under way when kvd ends


def test_a_kvd_that_is_held_up_is_named_and_q_ends_at_once(kvd: Daemon) -> None:
    async def steps(made: TopApp, pilot: Pilot[None]) -> None:
        await until(made, pilot, "1 Engines 2")
        kvd.signal(signal.SIGSTOP)
        try:
            await until(made, pilot, "did not answer within 0.5 s")
        finally:
            kvd.signal(signal.SIGCONT)
        await pilot.press("q")

    made = app(kvd, timeout=0.5)
    piloted(made, steps)
    assert made.return_code == 0


def test_it_begins_where_no_kvd_is_yet(tmp_path: Path) -> None:
    async def steps(made: TopApp, pilot: Pilot[None]) -> None:
        await until(made, pilot, "not answered since")

    settings = Settings(runtime_dir=str(tmp_path), timeout=0.5)
    piloted(TopApp(Watched(partial(look, settings), partial(whole, settings), str(tmp_path)), 0.05), steps)
