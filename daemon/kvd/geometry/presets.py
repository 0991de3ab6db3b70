"""Presets of ``configs/models``: the documents, once parsed, checked and turned into a model's shape.

A preset holds ``name``, ``source`` (the published file that it describes), ``read`` (the public page that its figures
were compared with) and ``config``: those keys of the model's ``config.json`` that decide its cache. Reading files and
YAML is the command line's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvd.geometry.errors import BadGeometry
from kvd.geometry.families import ModelShape, model_shape

KEYS = frozenset({"name", "source", "read", "config"})


@dataclass(frozen=True, slots=True)
class Preset:
    """A named model, where its figures come from and were compared with, and its shape."""

    name: str
    source: str
    read: str
    shape: ModelShape


def preset(document: object) -> Preset:
    """The preset in a parsed document.

    Raises `BadGeometry` where keys are missing or unknown, `UnknownShape` where the figures make no model.
    """
    if not isinstance(document, Mapping) or set(document) != KEYS:
        found = ", ".join(map(str, document)) if isinstance(document, Mapping) else type(document).__name__
        raise BadGeometry(f"a preset has the keys {', '.join(sorted(KEYS))}; this one has {found}")
    name, source, read, config = (document[key] for key in ("name", "source", "read", "config"))
    texts = all(isinstance(text, str) for text in (name, source, read))
    if not texts or not isinstance(config, Mapping):
        raise BadGeometry(f"preset {name!r}: name, source and read must be text and config a mapping")
    return Preset(name, source, read, model_shape(config, name))
