"""`kvctl explain`: every code has a text, and every text a test that brings its situation about."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from typing import TYPE_CHECKING

import pytest

from kvctl.commands.engines import STATES
from kvctl.doctor.reasons import REASONS
from kvctl.explained.entries import KINDS, codes, entries, texts
from kvd.errors import KvdError
from kvd.wire.codes import CODES
from kvd.wire.miss import MISS_MEANINGS
from tests.support.daemons import ROOT

if TYPE_CHECKING:
    from tests.kvctl.conftest import Run

TEXTS = {kind.name: texts(kind) for kind in KINDS}
FAMILIES = {"KVD-WIRE", "KVD-TOPOLOGY", "KVD-GEOMETRY"}
"""Codes of classes that are only the base of others: nothing is raised with them."""


def sources(*places: str) -> str:
    """The text of these files."""
    return "".join(path.read_text() for place in places for path in sorted(ROOT.glob(place)))


@cache
def classes() -> dict[str, set[str]]:
    """The classes of errors by their code."""
    found: dict[str, set[str]] = {}
    for top in ("daemon", "kvctl"):
        for path in (ROOT / top).rglob("*.py"):
            for name, code in re.findall(
                r'^class (\w+)\(.*?\):\n(?:(?!^class ).)*?^    code(?:: \w+)? = "(KVD-[A-Z-]+)"',
                path.read_text(), re.MULTILINE | re.DOTALL,
            ):  # fmt: skip
                found.setdefault(code, set()).add(name)
    return found


def raised(name: str) -> bool:
    """Whether the product makes an error of this class itself."""
    return re.search(rf"(?:raise|return) {name}\(", sources("daemon/**/*.py", "kvctl/**/*.py")) is not None


@cache
def definitions(path: str) -> dict[str, ast.stmt]:
    """All that a file of tests defines, by name."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def words(node: ast.AST) -> set[str]:
    """What is named and quoted below a node: no comments, and no docstring."""
    told = {
        part.value.value
        for part in ast.walk(node)
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
    }
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str | bytes) and part.value not in told:
            found |= set(re.findall(r"[\w-]+", str(part.value).removeprefix("b'")))
        elif isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
    return found


def reached(test: str) -> set[str]:
    """What a test says itself, and the tables of its file that it names."""
    path, _, name = test.partition("::")
    defined = definitions(path)
    own = words(defined[name])
    return own.union(*(words(node) for table, node in defined.items() if table.isupper() and table in own))


def expects(test: str) -> bool:
    """Whether a test can fail for what it sees."""
    path, _, name = test.partition("::")
    node = definitions(path)[name]
    return any(isinstance(part, ast.Assert) for part in ast.walk(node)) or "raises" in words(node)


# --- what there is to explain ---


def test_every_refusal_and_every_class_of_errors_has_a_text_and_no_text_is_of_none() -> None:
    written = set(TEXTS["refusals"]) | set(TEXTS["errors"])
    assert written == CODES | set(classes()) - {KvdError.code}
    assert set(TEXTS["refusals"]) == CODES


def test_every_miss_has_a_text_that_says_what_its_code_means() -> None:
    assert {code: text.says for code, text in TEXTS["misses"].items()} == MISS_MEANINGS


def test_every_check_of_doctor_has_a_text() -> None:
    source = sources("kvctl/doctor/*.py", "kvctl/commands/doctor.py")
    found = set(re.findall(r'"(?:ok|warning|failed|skipped)",\s+"([A-Z_]+)"', source))
    found |= set(re.findall(r'checked\(\s*"\w+",\s+\w+,\s+"([A-Z_]+)"', source))
    found |= {f"ENGINE_{state.upper()}" for state in STATES if state != "ready"}
    found |= {"NOT_DISAGGREGATED", "TRANSFERS", "WEIGHTS_UNKNOWN"}  # by a variable, or from the topology
    found |= {"LISTENER_DEAD", "PORT_CLASH", "STOCK_MODEL"}  # by what was raised
    found |= {"NIXL", "MOONCAKE", "DIRECT", "SLOW_PATH"}  # by their backend
    assert set(TEXTS["checks"]) == found


def test_every_reason_why_nothing_is_handed_over_has_a_text() -> None:
    assert set(TEXTS["reasons"]) == {reason.name for reason in REASONS}


def test_every_finding_of_ports_has_a_text() -> None:
    found = re.findall(r'code="([A-Z]+(?:_[A-Z]+)+)"', sources("kvctl/commands/setting_up/ports.py"))
    assert set(TEXTS["ports"]) == set(found)
    assert len(found) == 4


def test_every_finding_of_slow_has_a_text() -> None:
    found = re.findall(
        r'"([A-Z]+(?:_[A-Z]+)*)", "(?:warning|info)"', sources("kvctl/ledger/slow_findings.py")
    )
    assert set(TEXTS["slow"]) == set(found)


def test_every_finding_of_a_topology_has_a_text() -> None:
    places = (
        "daemon/kvd/topology/findings.py",
        "daemon/kvd/topology/rate.py",
        "daemon/kvd/topology/stock/findings.py",
    )
    found = set(re.findall(r'"([A-Z]+(?:_[A-Z]+)+)"', sources(*places)))
    assert set(TEXTS["topology"]) == found


# --- what brings it about ---


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_text_names_a_test_that_sees_exactly_its_code(kind: object) -> None:
    unseen = {
        code: text.test
        for of, code, text in entries()
        if of is kind and code not in FAMILIES and not (code in reached(text.test) and expects(text.test))
    }
    assert unseen == {}


def test_the_codes_without_a_test_are_those_that_nothing_is_raised_with() -> None:
    assert {code for _, code, text in entries() if not text.test} == FAMILIES
    assert not any(raised(name) for code in FAMILIES for name in classes()[code])


def test_no_part_of_a_text_is_missing() -> None:
    assert [
        code
        for _, code, text in entries()
        if min(map(len, (text.says, text.cause, text.next))) < 5 or not text.evidence
    ] == []


# --- the command ---


def test_a_code_is_explained_with_its_cause_what_to_look_at_and_what_to_do(run: Run) -> None:
    outcome = run("explain", "PEER_DOWN")
    text = TEXTS["checks"]["PEER_DOWN"]
    assert outcome.code == 0
    for part in (text.says, text.cause, text.evidence, text.next):
        assert part in outcome.out
    assert text.test not in outcome.out
    assert text.test in run("explain", "PEER_DOWN", "-o", "wide").out


@pytest.mark.parametrize("typed", ["KVD-BUSY", "kvd-busy", "[KVD-BUSY]"])
def test_a_code_may_be_typed_as_an_error_ends_with_it(run: Run, typed: str) -> None:
    [one] = json.loads(run("explain", typed, "-o", "json").out)["explanations"]
    assert (one["code"], one["next"]) == ("KVD-BUSY", TEXTS["refusals"]["KVD-BUSY"].next)


def test_a_code_of_several_meanings_is_explained_in_each(run: Run) -> None:
    found = json.loads(run("explain", "PROMPT_MISMATCH", "-o", "json").out)["explanations"]
    assert [one["shown_by"] for one in found] == [
        "kvctl transfers", "kvctl doctor", "kvctl doctor, in brackets",
    ]  # fmt: skip


def test_without_a_code_all_are_listed_in_a_line_each(run: Run) -> None:
    lines = run("explain").out.splitlines()
    assert len(lines) == 1 + len(list(entries()))
    assert {line.split()[0] for line in lines[1:]} == set(codes())


def test_an_unknown_code_is_2_with_the_nearest(run: Run) -> None:
    outcome = run("explain", "KVD-BUZY")
    assert (outcome.code, outcome.out) == (2, "")
    assert "there is no code 'KVD-BUZY'; did you mean KVD-BUSY" in outcome.err
    assert outcome.err.endswith("kvctl explain lists all of them [KVD-CTL-USAGE]\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_codes(run: Run, shell: str) -> None:
    assert "KVD-PEER-UNREACHABLE" in run("completion", shell).out


def test_help_says_where_a_code_is_explained(run: Run) -> None:
    assert "kvctl explain CODE" in run("--help").out


def test_what_a_text_tells_to_type_is_a_command(run: Run) -> None:
    """Each command that a text names is one, with the options that it names."""
    named = {
        command
        for _, _, text in entries()
        for command in re.findall(r"`(kvctl [^`]+)`", f"{text.cause} {text.evidence} {text.next}")
    }
    assert len(named) > 40
    for command in sorted(named - {"kvctl COMMAND --help"}):
        words = command.split()[1:]
        path = [word for word in words[:2] if re.fullmatch(r"[a-z-]+", word) and not word.startswith("-")]
        known = run(*path[: 2 if path[0] in ("keys", "trace") else 1], "--help")
        assert known.code == 0, command
        for option in (word for word in words if word.startswith("-")):
            assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", known.out), command
