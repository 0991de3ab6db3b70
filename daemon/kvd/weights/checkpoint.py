"""Which weights a folder holds, as vLLM would load it."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kvd.weights.blocks import digest_files
from kvd.weights.configuration import digest_configuration
from kvd.weights.errors import WeightsUnreadable
from kvd.weights.safetensors import digest_tensors
from kvd.weights.sampling import read_json

UNKNOWN = "unknown"
"""How the source of a fingerprint begins that could not be made; a colon and the reason follow, for people."""
WEIGHTS_VERSION = "w1-"
"""How fingerprints of weights begin. Those of two versions cannot be compared; each way to make them has its own."""
OF_FILE, AS_READ = "c1-", "v1-"
"""The same of configurations: of the checkpoint's own file, and as vLLM read it where there is none."""
DIGITS = 16
_INDEX, _CONSOLIDATED = "model.safetensors.index.json", "consolidated*.safetensors"
_TENSORS = ("*.safetensors",)
_ALL = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_PATTERNS: dict[str, tuple[str, ...]] = {
    "auto": (_CONSOLIDATED, *_ALL),
    "hf": _ALL,
    "bitsandbytes": _ALL,
    "safetensors": _TENSORS,
    "fastsafetensors": _TENSORS,
    "instanttensor": _TENSORS,
    "runai_streamer": _TENSORS,
    "mistral": (_CONSOLIDATED,),
    "pt": ("*.pt",),
    "npcache": ("*.bin",),
    "gguf": ("*.gguf",),
}
"""Of each ``--load-format`` which files it loads: those of the first pattern that there are any of."""
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What weights are; ``value`` is empty where that is not known, and ``source`` then tells why."""

    value: str
    source: str


def unknown(reason: str) -> Fingerprint:
    """No fingerprint, and why."""
    return Fingerprint("", f"{UNKNOWN}: {reason}")


def weights_fingerprint(place: Path, load_format: str = "auto") -> Fingerprint:
    """The weights that vLLM loads from a folder, or of one file, with this ``--load-format``. Never raises.

    Of safetensors the same for two copies however they are split into files; of other formats by the files' names.
    """
    if load_format == "dummy":
        return Fingerprint("dummy", "dummy")
    patterns = _PATTERNS.get(load_format)
    if patterns is None:
        return unknown(f"weights of load format {load_format} are not read here")
    try:
        files = [place] if place.is_file() else _files(place, patterns)
        if not files:
            return unknown(f"no file of weights for load format {load_format} is there")
        if all(file.suffix == ".safetensors" for file in files):
            return Fingerprint(_short(WEIGHTS_VERSION, digest_tensors(files)), "safetensors")
        return Fingerprint(_short(WEIGHTS_VERSION, digest_files(files)), "files")
    except WeightsUnreadable as error:
        return unknown(str(error))
    except OSError as error:
        return unknown(error.strerror or str(error))


def read_configuration(
    folder: Path, names: tuple[str, ...] = ("config.json", "params.json")
) -> dict[str, Any]:
    """The first of these files that is there. Raises `WeightsUnreadable`."""
    present = [name for name in names if (folder / name).is_file()]
    if not present:
        raise WeightsUnreadable(f"no {' or '.join(names)}")
    return read_json(folder / present[0])


def configuration_fingerprint(version: str, *parts: object) -> str:
    """What a configuration is, with whatever else decides KV; ``version`` says what it was made of.

    Raises `WeightsUnreadable` for one that is nested too deeply.
    """
    return _short(version, digest_configuration(*parts))


def _short(version: str, digest: bytes) -> str:
    return version + digest.hex()[:DIGITS]


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    names = sorted(path.name for path in folder.iterdir())
    for pattern in patterns:
        found = [name for name in names if fnmatchcase(name, pattern) and not name.endswith(_NOT_WEIGHTS)]
        if found:
            index = folder / _INDEX
            if pattern == "*.safetensors" and index.is_file():
                found = _listed(index, found)
            return [folder / name for name in found]
    return []


def _listed(index: Path, found: list[str]) -> list[str]:
    """Those of ``found`` that the index names: a folder may hold the same tensors twice."""
    listed = read_json(index, longest=256 << 20).get("weight_map")
    if not isinstance(listed, dict):
        raise WeightsUnreadable(f"{index.name}: it has no weight_map")
    names = {str(name) for name in listed.values()}
    if missing := sorted(names.difference(found)):
        raise WeightsUnreadable(f"{index.name} names {missing[0]}, which is not there")
    return [name for name in found if name in names]
