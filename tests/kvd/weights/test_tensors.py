"""A checkpoint's tensors: what changes their digest, what does not, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.weights import safetensors
from kvd.weights.errors import WeightsUnreadable
from kvd.weights.safetensors import digest_tensors
from kvd.weights.sampling import MOST, SAMPLE, WHOLE, places, samples_each
from tests.support.checkpoints import Tensor, tensor, write_safetensors

SMALL = {f"layers.{n}.norm": tensor(n, 64 + n) for n in range(7)} | {"embed": tensor(99, 50, 8, dtype="F32")}
LARGE = {f"layers.{n}.weight": tensor(n, 256, 1024) for n in range(8)}
"""Each of 512 KiB, of which 32 samples are taken."""


def digest(folder: Path, tensors: dict[str, Tensor], shards: int = 1, seed: int = 0) -> bytes:
    """The digest of ``tensors``, dealt out to ``shards`` files in an order that ``seed`` decides."""
    names = list(tensors)
    random.Random(seed).shuffle(names)
    files = [folder / f"{seed}-{shard}-of-{shards}.safetensors" for shard in range(shards)]
    for shard, file in enumerate(files):
        write_safetensors(file, {name: tensors[name] for name in names[shard::shards]})
    return digest_tensors(files)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(shards=st.integers(1, 8), seed=st.integers(0, 1000))
def test_how_tensors_are_spread_over_files_does_not_matter(tmp_path: Path, shards: int, seed: int) -> None:
    assert digest(tmp_path, SMALL, shards, seed) == digest(tmp_path, SMALL)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_byte_of_a_small_tensor_is_seen(tmp_path: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SMALL)))
    bytes_ = bytearray(SMALL[name].data)
    bytes_[data.draw(st.integers(0, len(bytes_) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    changed = SMALL | {name: replace(SMALL[name], data=bytes(bytes_))}
    assert digest(tmp_path, changed) != digest(tmp_path, SMALL)


@pytest.mark.parametrize("share", [1.0, 0.1, 0.01])
def test_weights_that_move_a_little_everywhere_are_seen(tmp_path: Path, share: float) -> None:
    """Such as a fine-tune whose steps round away in most of the 16-bit numbers: of one tensor only, and of all."""
    source = random.Random(7)
    before = digest(tmp_path, LARGE)
    for name in sorted(LARGE):
        data = bytearray(LARGE[name].data)
        for number in range(0, len(data), 2):
            if source.random() < share:
                data[number] ^= 1
        assert digest(tmp_path, LARGE | {name: replace(LARGE[name], data=bytes(data))}) != before


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(begin=st.integers(0, (1 << 19) - (1 << 15)))
def test_a_changed_stretch_of_two_parts_is_seen_wherever_it_is(tmp_path: Path, begin: int) -> None:
    name = "layers.3.weight"
    data = bytearray(LARGE[name].data)
    stretch = 2 * len(data) // MOST + SAMPLE
    end = min(len(data), begin + stretch)
    data[begin:end] = bytes(byte ^ 255 for byte in data[begin:end])
    changed = LARGE | {name: replace(LARGE[name], data=bytes(data))}
    assert digest(tmp_path, changed) != digest(tmp_path, LARGE)


def test_names_types_and_shapes_count(tmp_path: Path) -> None:
    one = SMALL["embed"]
    others = [
        {**SMALL, "embed.weight": one} | {"embed": tensor(5, 1)},
        {name: value for name, value in SMALL.items() if name != "embed"},
        {(f"{name}_" if name == "embed" else name): value for name, value in SMALL.items()},
        SMALL | {"embed": replace(one, dtype="I32")},
        SMALL | {"embed": replace(one, shape=(8, 50))},
        SMALL | {"layers.0.norm": SMALL["layers.1.norm"], "layers.1.norm": SMALL["layers.0.norm"]},
    ]
    assert len({digest(tmp_path, tensors) for tensors in [SMALL, *others]}) == len(others) + 1


def test_what_a_file_says_of_itself_does_not_count(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a", SMALL, {"format": "pt", "shape": "x", "dtype": "y"})
    assert digest_tensors([tmp_path / "a"]) == digest(tmp_path, SMALL)


def test_files_may_be_links_as_in_a_hub_cache(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "blobs/0", SMALL)
    (tmp_path / "model.safetensors").symlink_to("blobs/0")
    assert digest_tensors([tmp_path / "model.safetensors"]) == digest(tmp_path, SMALL)


def told(header: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def entry(**changes: object) -> bytes:
    return json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}}).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "0 bytes are no safetensors file"),
        (b"1234567", "7 bytes are no safetensors file"),
        (told(b"{}", 1 << 63), "its header is to have 9223372036854775808 bytes, the file has 10"),
        (told(b"{}", 3), "its header is to have 3 bytes, the file has 10"),
        (told(b"{"), "its header is not one"),
        (told(b"\xff\xfe"), "its header is not one"),
        (told(b"[" * 50_000), "its header is not one"),
        (told(b"[1]"), "its header is not one"),
        (told(b'{"w": 1}'), "its header is not one"),
        (told(entry(shape="x")), "its header is not one"),
        (told(entry(data_offsets=[0, 8]), data=b"1234"), "'w' is at bytes 0 to 8 of 4"),
        (told(entry(data_offsets=[4, 0]), data=b"1234"), "'w' is at bytes 4 to 0 of 4"),
        (told(entry(data_offsets=[-4, 0]), data=b"1234"), "'w' is at bytes -4 to 0 of 4"),
        (told(entry(), data=b"123"), "'w' is at bytes 0 to 4 of 3"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_named_with_what_is_wrong(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(WeightsUnreadable) as raised:
        digest_tensors([path])
    assert str(raised.value).startswith(f"model.safetensors: {said}")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_damaged_file_has_a_digest_or_a_reason(tmp_path: Path, data: st.DataObject) -> None:
    write_safetensors(tmp_path / "a", SMALL)
    whole = bytearray((tmp_path / "a").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, 700))] = data.draw(st.integers(0, 255))
    (tmp_path / "a").write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with contextlib.suppress(WeightsUnreadable):
        assert len(digest_tensors([tmp_path / "a"])) == 32


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_safetensors(tmp_path / "a", LARGE)

    def shrink(parts: int, budget: int) -> int:
        os.truncate(tmp_path / "a", 4096)
        return samples_each(parts, budget)

    monkeypatch.setattr(safetensors, "samples_each", shrink)
    with pytest.raises(WeightsUnreadable, match=r"^a: it ends before byte \d+, which was there"):
        digest_tensors([tmp_path / "a"])


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name, said in (
        ("folder", "it is no regular file"),
        ("pipe", "it is no regular file"),
        ("dangling", "No such file"),
    ):
        with pytest.raises(WeightsUnreadable, match=f"^{name}: {said}"):
            digest_tensors([tmp_path / name])


def test_headers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        write_safetensors(tmp_path / str(number), SMALL)
    files = sorted(tmp_path.iterdir())
    monkeypatch.setattr(safetensors, "LONGEST_HEADERS", 1500)
    with pytest.raises(WeightsUnreadable, match="its header is to have"):
        digest_tensors(files)
    monkeypatch.setattr(safetensors, "MOST_FILES", 2)
    with pytest.raises(WeightsUnreadable, match="3 files, at most 2 are read"):
        digest_tensors(files)


@given(size=st.integers(0, 1 << 40), count=st.integers(1, 4096), name=st.binary(max_size=20))
def test_samples_lie_within_and_in_order(size: int, count: int, name: bytes) -> None:
    found = places(name, size, count)
    if size <= max(WHOLE, count * SAMPLE):
        assert found == [(0, size)]
        return
    assert len(found) == count
    span = size - SAMPLE
    for part, (offset, length) in enumerate(found):
        assert part * span // count <= offset <= (part + 1) * span // count
        assert offset + length <= size


def test_a_checkpoint_of_many_tensors_takes_few_samples_of_each() -> None:
    assert [samples_each(parts) for parts in (0, 1, 300, 1200, 90_000)] == [32, 32, 32, 27, 1]
