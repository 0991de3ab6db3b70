"""Sets of tags: what Python's own sets say of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.service.prefixes.tags import changed, longest, packed, tags_of, unpacked
from kvd.wire.prefix import HASH_BYTES
from kvd.wire.prefixes.hints import TAG_BYTES

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SOME = st.lists(st.integers(0, (1 << 64) - 1) | st.integers(0, 8), max_size=40)


def blob(numbers: Sequence[int]) -> bytes:
    return b"".join(number.to_bytes(TAG_BYTES, "little") for number in numbers)


@PATIENT
@given(SOME)
def test_a_message_says_what_was_packed(numbers: list[int]) -> None:
    tags = unpacked(blob(numbers))
    assert tags.tolist() == sorted(set(numbers))
    assert packed(tags) == blob(sorted(set(numbers)))


@PATIENT
@given(SOME, SOME, SOME)
def test_a_change_adds_and_drops(before: list[int], added: list[int], dropped: list[int]) -> None:
    result = changed(*(unpacked(blob(one)) for one in (before, added, dropped)))
    assert result.tolist() == sorted((set(before) - set(dropped)) | set(added))


@PATIENT
@given(SOME, SOME)
def test_the_longest_prefix_ends_with_the_last_tag_that_is_held(prompt: list[int], held: list[int]) -> None:
    expected = max((at for at, tag in enumerate(prompt, 1) if tag in held), default=0)
    assert longest(np.array(prompt, np.uint64), unpacked(blob(held))) == expected


@PATIENT
@given(st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES), max_size=20), st.integers(1, 6))
def test_each_so_many_blocks_of_a_prompt_there_is_a_tag(hashes: list[bytes], every: int) -> None:
    tags = tags_of(b"".join(hashes), every)
    wanted = hashes[every - 1 :: every]
    assert tags.tolist() == [int.from_bytes(one[:TAG_BYTES], "little") for one in wanted]
