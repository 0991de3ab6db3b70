"""Models by name and by file: presets lie beside the package when it is installed, in configs/ in a checkout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvctl.cli.parsing import meant
from kvctl.errors import CheckFailed, UsageError
from kvd.geometry.errors import GeometryError
from kvd.geometry.families import ModelShape, model_shape
from kvd.geometry.presets import preset

INSTALLED = Path(__file__).parents[1] / "presets"
CHECKOUT = Path(__file__).parents[2] / "configs" / "models"
SUFFIXES = (".json", ".yaml", ".yml")


def preset_names() -> tuple[str, ...]:
    """The names of all presets, in order."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def preset_named(name: str) -> str | None:
    """The preset that ``name`` means; a hub's name such as ``Qwen/Qwen3-32B`` means the preset of its last part."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower()
    return last if last in preset_names() else None


def preset_shape(name: str) -> ModelShape:
    """The shape of a preset. Raises `UsageError` with the near misses where there is none of that name."""
    found = preset_named(name)
    if found is None:
        near = meant(name, preset_names())
        raise UsageError(
            f"no model {name!r}" + (f"; {near}" if near else ""),
            f"presets are {', '.join(preset_names())}; or give the path of a config.json",
        )
    path = _folder() / f"{found}.yaml"
    try:
        return preset(read_document(path)).shape
    except GeometryError as error:
        raise CheckFailed(f"{path}: {error}", "install kvctl anew", error.code) from None


def config_shape(config: Mapping[str, Any], path: Path) -> ModelShape:
    """The shape of a model's configuration, named after itself, or a ``config.json`` after its folder.

    Raises `CheckFailed`.
    """
    folder = path.resolve().parent.name if path.name == "config.json" else path.stem
    try:
        return model_shape(config, str(config.get("_name_or_path") or folder))
    except GeometryError as error:
        raise CheckFailed(
            f"{path}: {error}", "describe a model that serves: kvctl export-geometry ENGINE", error.code
        ) from None


def read_document(path: Path) -> object:
    """What a JSON or YAML file holds. Raises `UsageError` where it cannot be read."""
    import msgspec

    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    try:
        return msgspec.json.decode(data) if path.suffix == ".json" else _yaml(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not {path.suffix[1:].upper()}: {' '.join(str(error).split())}") from None


def _yaml(data: bytes) -> object:
    import yaml

    # The loader in C reads an exported geometry ten times faster; not every build of PyYAML has it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(data, loader)  # noqa: S506  (both are safe loaders)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _folder() -> Path:
    return INSTALLED if INSTALLED.is_dir() else CHECKOUT
