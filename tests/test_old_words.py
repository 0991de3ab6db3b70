"""The names in the code are the words that the project uses now: none of those that it has left behind."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted([*ROOT.glob("kvctl/**/*.py"), *ROOT.glob("daemon/**/*.py")])

KINDS = frozenset(("module", "class", "function", "property", "parameter", "attribute", "variable"))

OLD = {
    "anew": "reannounce, or reload",
    "buried": "unclosed",
    "bury": "retry_close",
    "claim": "acquire: a claim is the lease's",
    "conversation": "SessionThread",
    "gate": "StreamGate",
    "gone": "on_peer_gone, client_gone; what is gone may say so",
    "heard": "acknowledged, last_heard, sign_of_life",
    "here": "WorkerContext, or LaneContext; a local name may say what is here",
    "home": "Backend; a home is the kvd that puts an engine's card together",
    "intake": "AdmissionQueue",
    "kept": "Pending, or what is kept",
    "know": "on_peer_ready",
    "landing": "Window",
    "landings": "Windows",
    "mark": "StreamEvent, record_event; mark_received",
    "meet": "pair_blocks, plan_peer",
    "meetings": "PairedBlocks, or overlaps",
    "met": "PairedBlocks",
    "open_home": "open_backend",
    "parts": "Daemon; a card's parts are parts",
    "passing": "forwarding, or changing",
    "pick": "Selection",
    "picks": "Selection",
    "pushed": "on_message; what is pushed may say so",
    "put_out": "stage",
    "put_outs": "StageOrder",
    "putout": "StageOrder",
    "putouts": "StageOrder",
    "quiet": "quiesced",
    "rankid": "Rank",
    "rank_id": "Rank",
    "ready": "StreamEvent; a state may be called ready",
    "serve": "progress (a window's, a target's); who answers requests serves",
    "talk": "SessionProtocol",
    "tick": "mark_received; a tick is one round of a timer",
    "timelines": "MissHistory",
    "turns": "LoopMonitor; a turn is one round of a loop or a rotation",
    "undead": "unclosed",
    "underway": "Arrivals, or under way",
    "verdict": "finding, result",
    "verdicts": "CompatibilityCache",
    "whole": "pieces.done; what is not cut may be called whole",
}
"""Words, in lower case, and what the code says instead; of some a plain meaning stays, behind the semicolon."""

ONLY_AS = {
    "gate": {"class"},
    "gone": {"function"},
    "heard": KINDS - {"variable"},
    "here": {"class"},
    "home": {"class"},
    "kept": {"class"},
    "mark": {"class", "function"},
    "parts": {"class"},
    "pushed": {"function", "parameter"},
    "ready": {"class"},
    "talk": {"class"},
    "turns": {"class"},
    "whole": KINDS - {"variable"},
}
"""As names of anything else these mean what they say."""

ONLY_BELOW = {
    "claim": ("daemon/kvd/backends", "daemon/kvd/topology"),
    "serve": ("daemon/kvd/backends", "daemon/kvd/worker"),
    "tick": ("daemon/kvd/backends", "daemon/kvd/worker"),
    "whole": ("daemon/kvd/worker",),
}
"""Outside of these folders they mean what they say."""

RIGHT = {
    ("daemon/kvd/backends/nixl/agent.py", "pick"): "which rows of NIXL's prepared list, a verb",
    ("daemon/kvd/service/peers/handshakes.py", "_mark"): "a verb: ready, or unreachable",
    ("daemon/kvd/service/peers/homes.py", "_Home"): "it makes an engine's card; `home` in the settings",
}
"""Names that are such a word, by their module, and why."""


def names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Whatever a module names, and of which kind it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, "class"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            told = any("property" in ast.unparse(one) for one in node.decorator_list)
            yield node.name, "property" if told else "function"
        elif isinstance(node, ast.arg):
            yield node.arg, "parameter"
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, "attribute"
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, "attribute"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            # A variable of a module may be an alias of a type.
            yield node.id, "class" if node.id[:1].isupper() and not node.id.isupper() else "variable"


def old_words(found: Iterable[tuple[str, str]], module: str = "") -> set[str]:
    """The names in a module that are an old word there."""
    return {
        name
        for name, kind in found
        if (word := name.strip("_").lower()) in OLD
        and kind in ONLY_AS.get(word, KINDS)
        and (not module or module.startswith(ONLY_BELOW.get(word, "")))
    }


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_name_is_an_old_word(path: Path) -> None:
    module = path.relative_to(ROOT).as_posix()
    found = old_words([*names(ast.parse(path.read_text())), (path.stem, "module")], module)
    excused = {name for where, name in RIGHT if where == module}
    assert {name: OLD[name.strip("_").lower()] for name in found - excused} == {}
    assert excused - found == set(), "an exception that is not needed"


def test_exceptions_are_of_modules_that_are_there() -> None:
    assert {where for where, _ in RIGHT} <= {path.relative_to(ROOT).as_posix() for path in MODULES}
    assert ONLY_AS.keys() | ONLY_BELOW.keys() <= OLD.keys()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class Here: ...", {"Here"}),
        ("class _Kept: ...", {"_Kept"}),
        ("Parts = list[int]", {"Parts"}),
        ("def f(quiet): ...", {"quiet"}),
        ("self._underway = 1", {"_underway"}),
        ("def _meet(): ...", {"_meet"}),
        ("here = home = parts = kept = 1", set()),
        ("class Ready: ...", {"Ready"}),
        ("self.ready = True", set()),
        ("def gone(self): ...", {"gone"}),
        ("class A:\n    @property\n    def gone(self): ...", set()),
        ("class A:\n    heard: float", {"heard"}),
        ("async def pushed(message): ...", {"pushed"}),
    ],
)
def test_such_names_are_found_wherever_they_stand(source: str, found: set[str]) -> None:
    assert old_words(names(ast.parse(source))) == found


@pytest.mark.parametrize(
    ("module", "found"),
    [("daemon/kvd/backends/nixl/lane.py", {"_claim", "serve"}), ("kvctl/commands/measuring/serve.py", set())],
)
def test_some_are_old_only_where_they_meant_something_else(module: str, found: set[str]) -> None:
    assert old_words([("_claim", "function"), ("serve", "function")], module) == found
