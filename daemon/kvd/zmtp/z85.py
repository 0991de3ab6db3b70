"""Z85, the text form of CURVE keys: four bytes are five characters, digits of base 85 (ZeroMQ's RFC 32)."""

from __future__ import annotations

ALPHABET = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_DIGITS = {character: digit for digit, character in enumerate(ALPHABET)}


def encode(data: bytes) -> bytes:
    """The text of ``data``. Raises `ValueError` where its length is no multiple of 4."""
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes are no multiple of 4")
    text = bytearray()
    for at in range(0, len(data), 4):
        value = int.from_bytes(data[at : at + 4], "big")
        text += bytes(ALPHABET[value // 85**power % 85] for power in (4, 3, 2, 1, 0))
    return bytes(text)


def decode(text: bytes) -> bytes:
    """The bytes of ``text``. Raises `ValueError` where it is no Z85."""
    if len(text) % 5:
        raise ValueError(f"{len(text)} characters are no multiple of 5")
    data = bytearray()
    for at in range(0, len(text), 5):
        value = 0
        for character in text[at : at + 5]:
            if character not in _DIGITS:
                raise ValueError(f"{chr(character)!r} is no character of Z85")
            value = value * 85 + _DIGITS[character]
        if value >> 32:
            raise ValueError(f"{text[at : at + 5].decode()!r} stands for more than 4 bytes")
        data += value.to_bytes(4, "big")
    return bytes(data)
