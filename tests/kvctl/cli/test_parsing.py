"""What every option's parser owes: `ValueError` for a text that it cannot read, which one place makes the error of."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import TYPE_CHECKING, get_args

import pytest

from kvctl.cli.parsing import typed_duration
from kvctl.main import group

if TYPE_CHECKING:
    from tests.kvctl.conftest import Run

JUNK = "\u00a7"
PARSERS = {
    f"{row.name} {parameter.name}": parser
    for command in group().rows
    for row in (command, *command.rows)
    for function in [getattr(importlib.import_module(row.module), row.module.rpartition(".")[2])]
    for parameter in inspect.signature(function, eval_str=True).parameters.values()
    for info in get_args(parameter.annotation)[1:]
    if (parser := getattr(info, "parser", None))
}


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_raises_value_error_that_names_the_text(name: str) -> None:
    with pytest.raises(ValueError, match=repr(JUNK)):
        PARSERS[name](JUNK)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("force-miss", "--seed", "x"), "'x' is not a whole number"),
        (("force-miss", "--group", "-1"), "'-1' is not a whole number"),
        (("force-miss", "--rank", "pp1"), "'pp1' is no rank; write tp1, tp1.pp2 or tp0.dcp1"),
        (("replay", "friday", "--speed", "fast"), "'fast' is no speed; write 1, 10 or 0.5"),
    ],
)
def test_its_words_are_those_of_the_error(run: Run, words: tuple[str, ...], told: str) -> None:
    outcome = run(*words)
    assert (outcome.code, outcome.out) == (2, "")
    assert told in outcome.err
    assert outcome.err.count("\n") == 1


COMMANDS = [
    (*above, row.name)
    for command in group().rows
    for above, row in (((), command), *(((command.name,), one) for one in command.rows))
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_no_types_of_python_and_each_default_once(run: Run, command: tuple[str, ...]) -> None:
    text = " ".join(run(*command, "--help").out.split())
    assert not re.search(r"<(str|int|float|bool|list|Path)", text)
    assert "[[" not in text.replace("[[ENGINE", "").replace("[ENGINE [FROM]]", "")
    assert "] [default:" not in text
    assert "2147483648" not in text


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_n_is_the_same_option_everywhere(run: Run, command: tuple[str, ...]) -> None:
    """At most so many: of transfers the newest, of a trace the first, of events the next."""
    text = " ".join(run(*command, "--help").out.split())
    assert ("-n," in text) == ("--limit" in text)


@pytest.mark.parametrize(
    ("seconds", "typed"),
    [(86400, "1d"), (7200, "2h"), (600, "10m"), (90, "90s"), (5, "5s"), (0.25, "250ms"), (1.5, "1.5s")],
)
def test_a_duration_is_repeated_as_it_is_typed(seconds: float, typed: str) -> None:
    assert typed_duration(seconds) == typed


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("help", "--help"),
        ("help engines", "engines --help"),
        ("keys help trust", "keys trust --help"),
        ("help keys trust", "keys trust --help"),
    ],
)
def test_help_is_also_a_word(run: Run, typed: str, meant: str) -> None:
    assert run(*typed.split()) == run(*meant.split())
    assert run("help", "nothing").code == 2
