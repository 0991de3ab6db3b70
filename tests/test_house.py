"""The shape of the house: files that can be read at one sitting, rooms that can be seen at a glance, one name each."""

from __future__ import annotations

import ast
import builtins
import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.daemons import ROOT

MOST_LINES = 400
MOST_MODULES = 25
LEAST_LINES = 4
CAPITALISED = re.compile(r"_?[A-Z]\w*[a-z]|_?[A-Z]$")
"""The name of a class or a type; one of two capital letters and more is a constant."""
TWICE = {
    "Count": "how many: of a setting, of a message and of a document, each with the bounds of its place",
    "Seconds": "a duration: of a setting, of a message and of a document, each with the bounds of its place",
    "Name": "of the target of a push, and in params: not told apart yet",
    "Told": "what metrics are made of, and who hears of a probe: not told apart yet",
}
"""Names of classes and types that may stand in two places, with the reason."""
INTERNAL = {
    "Difference": "of a measurement; the command says it with what was measured",
    "EtcdAway": "of a source of members; `kvctl status` says it as the source's state",
    "LineFull": "of a line; who stands in it says what is full",
    "NewerSchema": "of a database; the ledger says it with its path",
    "NotResolved": "of a name; who dialled says it with the address",
    "Untold": "of what a source of members says; the log says it with the source",
    "_InBetween": "of a reader that waits until the new files are there",
    "_KvdLost": "of a wait that asks again",
    "_SumsUnavailable": "of one comparison; its result says why",
    "_Unknown": "of a prompt that has no digest",
}
"""Exceptions that are no `KvdError`: whoever catches them says it in words of its own."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> list[Path]:
    """Every module of the product."""
    found = [path for top in ("kvctl", "daemon") for path in sorted((ROOT / top).rglob("*.py"))]
    assert len(found) > 300
    return found


def test_no_file_is_longer_than_can_be_read_at_once() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in modules()
        if (lines := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert long == {}


def test_no_folder_has_more_modules_than_can_be_seen_at_once() -> None:
    """Each file is a module that is read, ``__init__.py`` too: it says what its room is about."""
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in modules())
    assert counts["daemon/kvd/worker"] > 10
    assert {folder: count for folder, count in counts.items() if count > MOST_MODULES} == {}


def names(text: str) -> Iterator[str]:
    """The names of classes and of types under a name of their own, as ``Pair = tuple[str, str]``, of a module.

    Type variables are left out: each means whatever it stands for.
    """
    body = ast.parse(text).body
    for node in [*body, *(inner for one in body if isinstance(one, ast.If) for inner in one.body)]:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            made = node.value.func if isinstance(node.value, ast.Call) else None
            for name in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if (
                    isinstance(name, ast.Name)
                    and CAPITALISED.match(name.id)
                    and ast.unparse(made or name) != "TypeVar"
                ):
                    yield name.id


def two_meanings(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """The names that several modules give to something, with these modules."""
    places: dict[str, list[str]] = {}
    for path, text in texts.items():
        for name in names(text):
            places.setdefault(name, []).append(path)
    return {name: where for name, where in places.items() if len(where) > 1}


def test_a_name_of_a_class_or_a_type_means_one_thing() -> None:
    found = two_meanings({str(path.relative_to(ROOT)): path.read_text() for path in modules()})
    assert set(found) == set(TWICE), found


@pytest.mark.parametrize(
    "second",
    [
        "class Pair: ...",
        "Pair = tuple[int, int]",
        "Pair: TypeAlias = tuple[int, int]",
        "if TYPE_CHECKING:\n    Pair = int",
    ],
)
def test_a_name_with_two_meanings_is_found(second: str) -> None:
    texts = {
        "a.py": "Pair = tuple[str, str]\nT = TypeVar('T')\nPAIR = 1",
        "b.py": "T = TypeVar('T')\nPAIR = 2",
    }
    assert two_meanings(texts) == {}
    assert two_meanings({**texts, "c.py": second}) == {"Pair": ["a.py", "c.py"]}


def test_every_error_is_of_one_tree_but_those_that_nobody_reads() -> None:
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for path in modules()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    python = {
        name for name, it in vars(builtins).items() if isinstance(it, type) and issubclass(it, BaseException)
    }
    roots = {name for name, of in bases.items() if of & python and not of & set(bases)}
    assert roots == {"KvdError", *INTERNAL}


def shape(function: Function) -> str:
    """What a function does, whatever it calls itself and what is its own; empty for short ones."""
    body = [
        one
        for one in function.body
        if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
    ]
    if not body or (body[-1].end_lineno or 0) - body[0].lineno + 1 < LEAST_LINES:
        return ""
    own = [node.arg for node in ast.walk(function) if isinstance(node, ast.arg)]
    made = ast.Module(copy.deepcopy(body), [])
    names = [node for node in ast.walk(made) if isinstance(node, ast.Name)]
    own += [name.id for name in names if isinstance(name.ctx, ast.Store)]
    numbers = {name: str(number) for number, name in enumerate(dict.fromkeys(own))}
    for name in names:
        name.id = numbers.get(name.id, name.id)
    return ast.dump(made)


def test_no_function_stands_in_two_modules() -> None:
    places: dict[str, dict[str, str]] = {}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Function) and (found := shape(node)):
                places.setdefault(found, {})[str(path.relative_to(ROOT))] = node.name
    assert [where for where in places.values() if len(where) > 1] == []


def test_functions_that_differ_in_names_alone_are_found() -> None:
    texts = [
        f"def {name}({a}, {b}):\n    'says {name}'\n    {c} = {a}.x\n    if {c}:\n        f({b})\n    return {c}"
        for name, a, b, c in ("gabc", "hxyz")
    ]
    one, other = (ast.parse(text).body[0] for text in texts)
    assert isinstance(one, Function)
    assert isinstance(other, Function)
    assert shape(one) == shape(other) != ""
