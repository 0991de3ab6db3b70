"""The log never stops the daemon: where it cannot be written, lines wait, then are dropped and counted."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from kvd.service.log import MOST_CALLS, OneLine, Writer
from tests.support.daemons import daemons, facts, session, wait_for, worker

SECONDS = 20


@contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """A pipe that holds no byte more, its reading end first. Writing to it blocks."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while os.write(writer, b"." * 65536):
            pass
    with suppress(BlockingIOError):
        while os.write(writer, b"."):
            pass
    os.set_blocking(writer, True)
    try:
        yield reader, writer
    finally:
        for descriptor in (reader, writer):
            with suppress(OSError):
                os.close(descriptor)


def emptied(reader: int) -> str:
    """All that is in the pipe now."""
    os.set_blocking(reader, False)
    found = b""
    with suppress(BlockingIOError):
        while part := os.read(reader, 1 << 20):
            found += part
    return found.decode().lstrip(".")


@contextmanager
def log_of(writer: Writer) -> Iterator[logging.Logger]:
    log = logging.getLogger("test of the log")
    log.propagate = False
    log.addHandler(writer)
    yield log
    log.removeHandler(writer)
    writer.close()


def test_a_kvd_whose_log_nobody_reads_serves_and_ends() -> None:
    with full_pipe() as (_, writer), daemons(1, "--log-level", "debug") as (kvd,):
        assert kvd.stop() == 0
        kvd.stderr = writer
        kvd.start()
        with session(kvd, worker(facts("e"))):
            assert kvd.engines()["e"].state == "ready"
        assert kvd.status().counters["log.lines_dropped"] == 0
        assert kvd.stop(SECONDS) == 0


def test_the_journal_is_told_how_severe_each_line_is(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, descriptor = os.pipe()
    stream = os.fstat(descriptor)
    monkeypatch.setenv("JOURNAL_STREAM", f"{stream.st_dev}:{stream.st_ino}")
    try:
        with log_of(Writer(descriptor, "%(message)s")) as log:
            log.setLevel(logging.DEBUG)
            log.error("two\nlines in one")
            log.warning("of them")
            log.info("told")
            log.debug("more")
            try:
                int("found\n<2>\x1bforged", base=99)
            except ValueError as error:
                error.args = ("found\n<2>\x1bforged",)
                log.exception("failed")
        *lines, failed = emptied(reader).splitlines()
        assert lines == [r"<3>two\nlines in one [KVD-INTERNAL]", "<4>of them", "<6>told", "<7>more"]
        assert failed.startswith(r"<3>failed [KVD-INTERNAL]; Traceback: ValueError: found\n<2>\x1bforged (")
        monkeypatch.setenv("JOURNAL_STREAM", f"{stream.st_dev}:{stream.st_ino + 1}")
        with log_of(Writer(descriptor, "%(message)s")) as log:
            log.error("to somebody else")
        assert emptied(reader) == "to somebody else [KVD-INTERNAL]\n"
    finally:
        os.close(reader)
        os.close(descriptor)


def inner(depth: int) -> None:
    if depth:
        inner(depth - 1)
    raise KeyError("a\nforged line")


def test_an_error_that_nobody_thought_of_is_one_line_with_its_calls_and_what_caused_it() -> None:
    with full_pipe() as (reader, descriptor):
        emptied(reader)
        with log_of(Writer(descriptor, "%(levelname)s %(message)s")) as log:
            try:
                try:
                    inner(40)
                except KeyError as error:
                    raise ValueError("x" * 100_000) from error
            except ValueError:
                log.exception("what\nfailed")
            try:
                inner(1)
            except KeyError:
                log.warning("less", exc_info=True)
            log.warning("where", stack_info=True)
        text = emptied(reader)
    long, short, where, rest = text.split("\n")
    assert rest == ""
    assert long.startswith(r"ERROR what\nfailed [KVD-INTERNAL]; Traceback: ValueError: xxx")
    assert len(long) < 4200
    assert "(100,012 characters) (" in long, "its calls stand behind it whatever it says"
    assert ", caused by KeyError: " in long
    call = r"kvd/service/test_log\.py:\d+ "
    calls = rf"\({call}inner < {call}inner < {call}test_\w+\)"
    assert re.fullmatch(rf"WARNING less; Traceback: KeyError: 'a\\nforged line' {calls}", short), short
    assert where.startswith(r"WARNING where; Stack (most recent call last):\n")


def test_of_many_calls_the_innermost_are_told_and_the_causes_behind_them() -> None:
    try:
        try:
            inner(40)
        except KeyError as error:
            raise ValueError("outer") from error
    except ValueError:
        told = OneLine().formatException(sys.exc_info())
    outer, cause = told.split(", caused by ")
    assert outer.startswith("Traceback: ValueError: outer (")
    assert cause.count(" < ") == MOST_CALLS
    assert cause.endswith(f" < {42 - MOST_CALLS} more)")


def test_lines_that_waited_are_written_once_somebody_reads() -> None:
    with full_pipe() as (reader, descriptor):
        writer = Writer(descriptor, "%(levelname)s %(message)s")
        with log_of(writer) as log:
            for number in range(3):
                log.warning("line %d", number)
            text = ""

            def all_there() -> bool:
                nonlocal text
                text += emptied(reader)
                return text.count("\n") == 3

            wait_for(all_there, SECONDS)
    assert text == "WARNING line 0\nWARNING line 1\nWARNING line 2\n"
    assert writer.dropped == 0


def test_what_the_queue_does_not_hold_is_counted_and_told() -> None:
    with full_pipe() as (reader, descriptor):
        writer = Writer(descriptor, "%(message)s", most=2)
        with log_of(writer) as log:
            for number in range(10):
                log.warning("line %d", number)
            # One line may be with the thread, two wait.
            lost = writer.dropped
            assert lost in (7, 8)
            text = ""

            def told() -> bool:
                nonlocal text
                text += emptied(reader)
                return "lost" in text

            wait_for(told, SECONDS)
    assert f"kvd: {lost} lines of this log were lost\n" in text


def test_a_pipe_that_never_blocks_is_waited_for() -> None:
    with full_pipe() as (reader, descriptor):
        os.set_blocking(descriptor, False)
        with log_of(Writer(descriptor, "%(message)s")) as log:
            log.warning("a line")
            assert wait_for(lambda: emptied(reader), SECONDS) == "a line\n"


def test_a_log_whose_reader_is_gone_is_no_error() -> None:
    with full_pipe() as (reader, descriptor):
        os.close(reader)
        with log_of(Writer(descriptor, "%(message)s")) as log:
            log.warning("a line")


def test_ids_of_a_megabyte_do_not_fill_the_log() -> None:
    with full_pipe() as (reader, descriptor):
        writer = Writer(descriptor, "%(message)s", most_bytes=20_000)
        with log_of(writer) as log:
            for _ in range(10):
                log.warning("request %s", "x" * 1_000_000)
            # A line may be with the thread; those of 4 KB that wait have 20 KB at most.
            assert writer.dropped in (5, 6)
            text = ""

            def written() -> bool:
                nonlocal text
                text += emptied(reader)
                return text.count("request x") >= 4 and "were lost" in text

            wait_for(written, SECONDS)
    lines = text.splitlines()
    assert all(len(line) < 4200 for line in lines)
    assert lines[0].endswith("x... (1,000,008 characters)")


def test_a_time_has_its_offset_so_that_logs_of_hosts_in_other_zones_can_be_laid_beside_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = logging.LogRecord("kvd", logging.INFO, __file__, 1, "here", None, None)
    record.created = 1_795_000_000.25
    line = OneLine("%(asctime)s %(message)s")
    for zone, told in (
        ("UTC", "2026-11-18T11:06:40.250+00:00 here"),
        ("Asia/Kolkata", "2026-11-18T16:36:40.250+05:30 here"),
    ):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert line.format(record) == told
    monkeypatch.delenv("TZ")
    time.tzset()


def test_every_error_shows_its_code_and_other_lines_where_they_have_one() -> None:
    def line(level: int, **extra: object) -> str:
        record = logging.LogRecord("kvd", level, __file__, 1, "it is so", (), None)
        record.__dict__.update(extra)
        return OneLine("%(message)s").format(record)

    assert line(logging.ERROR, code="KVD-LEDGER") == "it is so [KVD-LEDGER]"
    assert line(logging.ERROR) == line(logging.CRITICAL) == "it is so [KVD-INTERNAL]"
    assert line(logging.WARNING, code="KVD-COMPARE-LIMIT") == "it is so [KVD-COMPARE-LIMIT]"
    assert line(logging.WARNING) == "it is so"
