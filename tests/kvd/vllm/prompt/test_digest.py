"""The digest of a prompt: what it depends on, what it does not, and that it says nothing without its key."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from kvd.vllm.prompt.digest import (
    DIGEST_BITS,
    Embeds,
    Feature,
    PromptParts,
    new_key,
    prompt_digest,
)
from kvd.wire.identity import DIGEST_KEY_BYTES

KEY = bytes(range(DIGEST_KEY_BYTES))
IMAGE = Feature("image", "a1b2", 4, 3)
PROMPT = PromptParts(list(range(100, 120)), "a1-adapter", (IMAGE,), "salt")


def digest(parts: PromptParts, tokens: int = 20, key: bytes = KEY) -> str:
    return prompt_digest(key, parts, tokens)


def test_the_same_prompt_has_the_same_digest_in_another_process_too() -> None:
    made = (
        "from kvd.vllm.prompt.digest import *\n"
        "parts = PromptParts(list(range(100, 120)), 'a1-adapter', (Feature('image', 'a1b2', 4, 3),), 'salt')\n"
        f"print(prompt_digest(bytes(range({DIGEST_KEY_BYTES})), parts, 20))"
    )
    there = subprocess.run([sys.executable, "-c", made], check=True, capture_output=True, text=True)
    assert there.stdout.strip() == digest(PROMPT)
    assert len(digest(PROMPT)) == DIGEST_BITS // 4


OTHERS = {
    "another token": replace(PROMPT, token_ids=[*range(100, 119), 7]),
    "two tokens in another order": replace(PROMPT, token_ids=[101, 100, *range(102, 120)]),
    "no adapter": replace(PROMPT, adapter=""),
    "another adapter": replace(PROMPT, adapter="a1-other"),
    "no image": replace(PROMPT, features=()),
    "another image": replace(PROMPT, features=(replace(IMAGE, identifier="a1b3"),)),
    "the image elsewhere": replace(PROMPT, features=(replace(IMAGE, offset=5),)),
    "a longer image": replace(PROMPT, features=(replace(IMAGE, length=4),)),
    "a sound of that hash": replace(PROMPT, features=(replace(IMAGE, modality="audio"),)),
    "the image twice": replace(PROMPT, features=(IMAGE, IMAGE)),
    "another salt": replace(PROMPT, cache_salt="salz"),
    "no salt": replace(PROMPT, cache_salt=""),
    "embeddings": replace(PROMPT, embeds=Embeds(b"\0\0", "torch.bfloat16 (1,)")),
    "other embeddings": replace(PROMPT, embeds=Embeds(b"\0\1", "torch.bfloat16 (1,)")),
    "embeddings of another type": replace(PROMPT, embeds=Embeds(b"\0\0", "torch.float16 (1,)")),
    "embeddings at some positions": replace(
        PROMPT, embeds=Embeds(b"\0\0", "torch.bfloat16 (1,)", [True] * 20)
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_whatever_decides_the_kv_decides_the_digest(what: str) -> None:
    rest = [digest(other) for name, other in OTHERS.items() if name != what]
    assert digest(OTHERS[what]) not in {digest(PROMPT), *rest}


def test_another_length_is_another_digest() -> None:
    assert digest(PROMPT, 19) != digest(PROMPT, 20)
    assert digest(PROMPT, 20) != digest(PROMPT, 21)


def test_what_comes_after_those_tokens_does_not_count() -> None:
    longer = replace(
        PROMPT, token_ids=[*PROMPT.token_ids, 1, 2, 3], features=(IMAGE, replace(IMAGE, offset=20))
    )
    assert digest(longer) == digest(PROMPT)


def test_an_image_that_begins_before_the_end_counts_whole() -> None:
    """What a model makes of it may depend on all of it."""
    over = replace(PROMPT, features=(replace(IMAGE, offset=19, length=30),))
    other = replace(PROMPT, features=(replace(IMAGE, offset=19, length=30, identifier="other"),))
    assert digest(over) != digest(other)


def test_one_text_cannot_pass_for_two() -> None:
    assert digest(replace(PROMPT, adapter="ab", cache_salt="c")) != digest(
        replace(PROMPT, adapter="a", cache_salt="bc")
    )


def test_text_that_is_no_unicode_has_a_digest_too() -> None:
    assert digest(replace(PROMPT, cache_salt="\ud800")) != digest(replace(PROMPT, cache_salt="\ud801"))


def test_another_key_is_another_digest() -> None:
    assert digest(PROMPT, key=new_key()) != digest(PROMPT)


@pytest.mark.parametrize("key", [b"", b"short", bytes(DIGEST_KEY_BYTES + 1)])
def test_without_a_key_there_is_none(key: bytes) -> None:
    with pytest.raises(ValueError, match=f"a key of {len(key)} bytes, wanted are {DIGEST_KEY_BYTES}"):
        digest(PROMPT, key=key)


def test_each_engine_has_a_key_of_its_own() -> None:
    assert new_key() != new_key()
    assert len(new_key()) == DIGEST_KEY_BYTES


def test_numbers_of_numpy_are_numbers() -> None:
    """Some builds and processors of multimodal content give them."""
    features = (Feature("image", "i", np.int64(2), np.int32(3)),)  # type: ignore[arg-type]
    plain = PromptParts([1, 2, 3, 4], features=(Feature("image", "i", 2, 3),))
    for ids in ([np.int64(x) for x in range(1, 5)], np.arange(1, 5)):
        parts = PromptParts(ids, features=features)  # type: ignore[arg-type]
        assert prompt_digest(KEY, parts, np.int64(4)) == prompt_digest(KEY, plain, 4)  # type: ignore[arg-type]
