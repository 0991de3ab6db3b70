"""Z85 is libzmq's."""

from __future__ import annotations

import pytest
import zmq.utils.z85
from hypothesis import given
from hypothesis import strategies as st

from kvd.zmtp import z85


@given(st.binary(max_size=40).map(lambda data: data[: len(data) // 4 * 4]))
def test_it_is_what_pyzmq_writes_and_reads(data: bytes) -> None:
    text = z85.encode(data)
    assert text == zmq.utils.z85.encode(data)
    assert z85.decode(text) == data


@given(st.binary(max_size=40) | st.text(z85.ALPHABET.decode(), max_size=40).map(str.encode))
def test_what_is_no_z85_is_a_value_error(text: bytes) -> None:
    try:
        data = z85.decode(text)
    except ValueError:
        return
    assert z85.encode(data) == text


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="3 bytes are no multiple of 4"):
        z85.encode(b"abc")
    with pytest.raises(ValueError, match="4 characters are no multiple of 5"):
        z85.decode(b"abcd")
    with pytest.raises(ValueError, match="' ' is no character of Z85"):
        z85.decode(b"ab de")
    with pytest.raises(ValueError, match="'#####' stands for more than 4 bytes"):
        z85.decode(b"#####")
