"""Everything that reads what others wrote: any bytes give a value or the error that says so, in no time to speak of.

python tests/fuzz/test_decoders.py       # writes tests/fuzz/corpus/*.txt anew, from real messages and files
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec import inspect

from kvd.geometry.codec import decode_worker, encode_worker, shape_of
from kvd.geometry.errors import GeometryError
from kvd.keys import KeyFileError, read_pair, read_trusted, write_pair
from kvd.service.config import load
from kvd.service.errors import ConfigError
from kvd.trace.errors import TraceError
from kvd.trace.read import read_trace
from kvd.vllm.errors import BadParams
from kvd.vllm.params import (
    finished_prefill,
    read_remote_prefill,
    read_remote_push,
    wants_prefill_here,
    wants_push,
)
from kvd.wire.errors import WireError
from kvd.wire.frame import MESSAGES, WIRE_VERSION, decode, encode
from tests.support import fuzzing, traces
from tests.support.daemons import ROOT, geometry
from tests.support.rigs.bench import prefill

SECONDS = 0.5
"""Of the processor's time, for one input. They take microseconds; a file takes some milliseconds."""
LONGEST = 6000
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, math.nan, math.inf, -math.inf, 1e308, 0.5, "", "x" * 600,
    "\x1b[2J\n", "\u202e", "a", b"", b"\xff" * 40, [], [[]] * 300, {}, {"type": "ok"}, {str(n): n for n in range(70)},
)  # fmt: skip


WIDE_KEY = b"G#=8Gn*x!A%*kJjr9#@T?I6x8bp0xlEuPV<ci3>0"
"""Five of its characters stand for more than 32 bits, which raised what nobody expected."""


class Decoder(NamedTuple):
    """``take`` raises only what must not be; ``pack`` and ``unpack`` are for inputs that have a structure."""

    take: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    pack: Callable[[Any], bytes] | None = None
    unpack: Callable[[bytes], Any] | None = None
    slow: int = 1
    """Fewer inputs are tried by this factor."""


# --- what is taken ---


def take_frame(data: bytes) -> None:
    try:
        message, correlation = decode(data)
    except WireError as error:
        refused = error
    else:
        assert decode(encode(message, correlation)) == (message, correlation)
        return
    assert len(refused.message) < 2000
    assert 0 <= refused.correlation < 1 << 63


def take_geometry(data: bytes) -> None:
    try:
        worker = decode_worker(data)
    except GeometryError:
        return
    again = encode_worker(worker)
    assert decode_worker(again) == worker
    assert shape_of(again)


def take_params(data: bytes) -> None:
    try:
        params = json.loads(data)
    except (ValueError, RecursionError):
        return
    wants_prefill_here(params)
    wants_push(params)
    if not isinstance(params, dict):
        return
    for read in (read_remote_prefill, read_remote_push):
        with contextlib.suppress(BadParams):
            read(params, own_engine_id="me")


@cache
def _file() -> Path:
    return Path(tempfile.mkdtemp(prefix="kvd-fuzz-")) / "file"


def _in_a_file(data: bytes) -> Path:
    path = _file()
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def take_trace(data: bytes) -> None:
    try:
        read_trace(_in_a_file(data))
    except TraceError:
        return


def take_keys(data: bytes) -> None:
    path = _in_a_file(data)
    for read in (read_pair, read_trusted):
        try:
            read(path)
        except KeyFileError:
            continue


def take_config(data: bytes) -> None:
    try:
        load(_in_a_file(data), {})
    except ConfigError:
        return


# --- what it resembles ---


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def example(kind: inspect.Type, depth: int = 0) -> Any:  # noqa: C901, PLR0911 (one for each kind of type)
    """A value of a type, as plain values."""
    match kind:
        case inspect.StrType():
            return "e1"
        case inspect.BytesType():
            return b"b"
        case inspect.IntType():
            return 3
        case inspect.FloatType():
            return 1.5
        case inspect.BoolType():
            return True
        case inspect.LiteralType():
            return kind.values[-1]
        case inspect.VarTupleType():
            return [example(kind.item_type, depth + 1)] * 2
        case inspect.TupleType():
            return [example(part, depth + 1) for part in kind.item_types]
        case inspect.DictType():
            return {"k": example(kind.value_type, depth + 1)}
        case inspect.UnionType():
            return example(kind.types[0], depth + 1)
        case inspect.StructType():
            fields = [(field.encode_name, example(field.type, depth + 1)) for field in kind.fields]
            if kind.array_like:
                return [value for _, value in fields]
            tag = {kind.tag_field: kind.tag} if kind.tag_field else {}
            return {**tag, **dict(fields)}
    return None


def frames() -> list[bytes]:
    """A message of each kind, with all its fields."""
    made = [
        msgspec.msgpack.encode((WIRE_VERSION, 7, example(inspect.type_info(struct))))
        for _, struct in sorted(MESSAGES.items())
    ]
    for frame in made:
        decode(frame)
    return made


def params() -> list[bytes]:
    pulled = finished_prefill(prefill(((5, 6), (1,))), tp=2, pp=1, dcp=1)
    pushed = {
        "do_remote_prefill": True, "kvd_contract": 2, "kvd_transfer_id": "t", "transfer_mode": "push",
        "remote_engine_id": "p", "kvd_host": "h", "kvd_port": 1,
    }  # fmt: skip
    assert read_remote_push(pushed).transfer_id == "t"
    return [json.dumps(one).encode() for one in (pulled, pushed, {"do_remote_decode": True})]


def traced() -> list[bytes]:
    with tempfile.TemporaryDirectory() as directory:
        return [traces.write(Path(directory) / "t.jsonl").read_bytes()]


def key_files() -> list[bytes]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "keys"
        public = write_pair(path)
        return [
            path.read_bytes(),
            public,
            WIDE_KEY,
            b"# all\n" + public + b" host-a:7766\n" + public + b" ::1\n",
        ]


def configs() -> list[bytes]:
    text = (ROOT / "configs" / "kvd.yaml").read_text()
    bare = "\n".join(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    return [bare.encode(), b"peer: {listen: '127.0.0.1:0', curve: {key_file: /x}}\nlog_level: info\n"]


DECODERS = {
    "wire": Decoder(take_frame, frames, msgspec.msgpack.encode, msgspec.msgpack.decode),
    "geometry": Decoder(take_geometry, lambda: [geometry()], as_json, json.loads),
    "params": Decoder(take_params, params, as_json, json.loads),
    "trace": Decoder(take_trace, traced, slow=5),
    "keys": Decoder(take_keys, key_files, slow=5),
    "config": Decoder(take_config, configs, slow=10),
}


def bent(decoder: Decoder, inputs: list[bytes], count: int, seed: int) -> Iterator[bytes]:
    """Inputs in which a value somewhere is another one, of any kind."""
    if decoder.pack is None or decoder.unpack is None:
        return
    chance = random.Random(seed)
    for _ in range(count):
        top = [decoder.unpack(chance.choice(inputs))]
        place: Any = top
        at: Any = 0
        while isinstance(place[at], (list, dict)) and place[at] and chance.random() < 0.85:
            place = place[at]
            at = chance.choice(list(place)) if isinstance(place, dict) else chance.randrange(len(place))
        place[at] = chance.choice(HOSTILE)
        try:
            packed = decoder.pack(top[0])
        except TypeError:  # JSON has no bytes
            continue
        yield packed


def tried(decoder: Decoder, data: bytes) -> None:
    began = time.thread_time()
    try:
        decoder.take(data)
        assert time.thread_time() - began < SECONDS, "it took too long"
    except BaseException as error:
        error.add_note(f"the input was {data.hex()}")
        raise


@pytest.mark.parametrize("name", DECODERS)
def test_what_is_in_the_corpus_is_taken(name: str) -> None:
    for data in fuzzing.corpus(name):
        tried(DECODERS[name], data)


@pytest.mark.parametrize("seed", fuzzing.SEEDS)
@pytest.mark.parametrize("name", DECODERS)
def test_any_bytes_give_a_value_or_the_error_that_says_so(name: str, seed: int) -> None:
    decoder, inputs = DECODERS[name], fuzzing.corpus(name)
    count = fuzzing.A_SEED // decoder.slow // 2
    for data in fuzzing.mutated(inputs, count, seed, LONGEST):
        tried(decoder, data)
    for data in bent(decoder, inputs, count, seed):
        tried(decoder, data)


def write_corpus() -> None:
    """All files anew."""
    for name, decoder in DECODERS.items():
        lines = "".join(f"{data.hex()}\n" for data in decoder.seeds())
        (fuzzing.CORPUS / f"{name}.txt").write_text(lines)


if __name__ == "__main__":
    os.umask(0o022)
    write_corpus()
