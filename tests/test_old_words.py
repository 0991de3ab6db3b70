"""The names in the code are the words that the project uses now: none of those that it has left behind."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted([*ROOT.glob("kvctl/**/*.py"), *ROOT.glob("daemon/**/*.py")])

OLD = {
    "anew": "reannounce, or reload",
    "bury": "retry_close",
    "conversation": "SessionThread",
    "here": "WorkerContext, or LaneContext; a local name may say what is here",
    "home": "Backend; a home is the kvd that puts an engine's card together",
    "intake": "AdmissionQueue",
    "kept": "Pending, or what is kept",
    "know": "on_peer_ready",
    "landing": "Window",
    "landings": "Windows",
    "meet": "pair_blocks, plan_peer",
    "meetings": "PairedBlocks, or overlaps",
    "met": "PairedBlocks",
    "open_home": "open_backend",
    "parts": "Daemon; a card's parts are parts",
    "picks": "Selection",
    "put_out": "stage",
    "put_outs": "StageOrder",
    "putout": "StageOrder",
    "putouts": "StageOrder",
    "quiet": "quiesced",
    "rankid": "Rank",
    "talk": "SessionProtocol",
    "timelines": "MissHistory",
    "turns": "LoopMonitor; a turn is one round of a loop or a rotation",
    "undead": "unclosed",
    "underway": "Arrivals, or under way",
    "verdicts": "CompatibilityCache",
}
"""Words, in lower case, and what the code says instead; of some a plain meaning stays, behind the semicolon."""

CLASSES_ONLY = {"here", "kept", "parts", "talk", "turns"}
"""As names of anything but a class these mean what they say."""

RIGHT = {
    "_Home": "kvd.service.peers.homes: the kvd that puts an engine's card together, as `home` in the settings"
}
"""Names that are such a word, and why it is right there."""


def names(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Whatever a module names, and whether that is a class: functions, parameters, attributes and variables too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, True
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, False
        elif isinstance(node, ast.arg):
            yield node.arg, False
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            # A variable of a module may be an alias of a type.
            yield node.id, node.id[:1].isupper() and not node.id.isupper()


def old_words(names: Iterator[tuple[str, bool]]) -> set[str]:
    """The names that are an old word."""
    return {
        name
        for name, of_class in names
        if (word := name.strip("_").lower()) in OLD
        and (of_class or word not in CLASSES_ONLY | {"home"})
        and name not in RIGHT
    }


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_name_is_an_old_word(path: Path) -> None:
    found = old_words(names(ast.parse(path.read_text())))
    assert not found, {name: OLD[name.strip("_").lower()] for name in found}
    assert path.stem not in OLD.keys() - CLASSES_ONLY - {"home"}, OLD[path.stem]


def test_what_is_excused_is_there() -> None:
    used = {name for path in MODULES for name, _ in names(ast.parse(path.read_text()))}
    assert used >= RIGHT.keys()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class Here: ...", {"Here"}),
        ("class _Kept: ...", {"_Kept"}),
        ("Parts = list[int]", {"Parts"}),
        ("def f(quiet): ...", {"quiet"}),
        ("self._underway = 1", {"_underway"}),
        ("def _meet(): ...", {"_meet"}),
        ("class _Home: ...", set()),
        ("here = home = parts = kept = 1", set()),
    ],
)
def test_such_names_are_found_wherever_they_stand(source: str, found: set[str]) -> None:
    assert old_words(names(ast.parse(source))) == found
