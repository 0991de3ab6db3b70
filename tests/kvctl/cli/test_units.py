"""Documents that are filled from what has attributes of the same names."""

from __future__ import annotations

import pytest
from msgspec import Struct

from kvctl.cli.units import filled


class Shape(Struct, frozen=True):
    """A document with a default."""

    tp: int = 1
    pp: int = 1


class Sharded(Struct, frozen=True):
    """A source."""

    tp: int


def test_the_first_source_that_has_a_field_gives_it() -> None:
    assert filled(Shape, Sharded(4), Shape(2, 3)) == Shape(4, 3)
    assert filled(Shape, Sharded(4), pp=2) == Shape(4, 2)


def test_a_field_that_nothing_gives_does_not_become_its_default() -> None:
    with pytest.raises(TypeError, match="nothing gives pp of Shape"):
        filled(Shape, Sharded(4))
