"""A trace's bytes: plain, gzip or zstd; told by the first bytes when read, by the name's ending when written."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from kvd.trace.errors import NotATrace, TraceCut, TraceError

GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
STDIN = "-"
_SPOILED = "copy it, or export it, anew"


@contextlib.contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a trace, unpacked as they are read; ``-`` is stdin. Raises `TraceError`, also in the block."""
    try:
        with contextlib.ExitStack() as stack:
            if str(path) == STDIN:
                raw = cast("io.BufferedReader", sys.stdin.buffer)
            else:
                raw = stack.enter_context(path.open("rb"))
            head = raw.peek(4)[:4]
            if head.startswith(GZIP):
                yield cast("BinaryIO", stack.enter_context(gzip.GzipFile(fileobj=raw)))
            elif head == ZSTD:
                yield stack.enter_context(_zstd_reader(raw, path))
            else:
                yield cast("BinaryIO", raw)
    except EOFError:
        raise TraceCut(f"{path} ends in the middle of its compressed data", _SPOILED) from None
    except (OSError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise NotATrace(f"{path} cannot be read: {why}", "") from None
    except Exception as error:
        if type(error).__name__ == "ZstdError":  # of whichever library unpacks here
            raise NotATrace(f"{path} cannot be unpacked: {error}", _SPOILED) from None
        raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A new file that packs what is written into it as its name says: ``.gz``, ``.zst``, else not at all.

    It takes its name when the block ends well: a file that was there before stays whole until then, and an interrupted
    export leaves none. A link stays one: the file that it leads to is replaced. What is no regular file, as a device or
    a pipe, is written into. Raises `TraceError`.
    """
    try:
        with contextlib.ExitStack() as stack:
            special = path.exists() and not path.is_file()
            place = path.resolve()
            part = path if special else place.with_name(f".{place.name}.part")
            raw = stack.enter_context(part.open("wb"))
            if not special:
                stack.callback(part.unlink, missing_ok=True)
            with contextlib.ExitStack() as packed:
                if path.suffix == ".gz":
                    out = packed.enter_context(gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0))
                    yield cast("BinaryIO", out)
                elif path.suffix == ".zst":
                    yield packed.enter_context(_zstd_writer(raw, path))
                else:
                    yield raw
            raw.flush()
            if not special:
                part.replace(place)
    except OSError as error:
        raise TraceError(
            f"{path} cannot be written: {error.strerror or error}", "give another place"
        ) from None


def _zstd_reader(raw: io.BufferedReader, path: Path) -> Any:
    name, library = _zstd(path)
    if name == "zstandard":
        return io.BufferedReader(library.ZstdDecompressor().stream_reader(raw, read_across_frames=True))
    return library.ZstdFile(raw, "rb")


def _zstd_writer(raw: BinaryIO, path: Path) -> Any:
    name, library = _zstd(path)
    if name == "zstandard":
        return library.ZstdCompressor().stream_writer(raw, closefd=False)
    return library.ZstdFile(raw, "wb")


def _zstd(path: Path) -> tuple[str, Any]:
    for name in ("compression.zstd", "zstandard"):
        with contextlib.suppress(ImportError):
            return name, importlib.import_module(name)
    raise TraceError(
        f"{path} is packed with zstd, which this Python cannot",
        "pip install zstandard, use Python 3.14, or name the file .jsonl.gz",
    )
