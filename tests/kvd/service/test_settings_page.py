"""docs/settings.md is made of configs/kvd.yaml, whose comments say what each setting is for."""

from __future__ import annotations

import json
import os
import re
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml

from kvd.service.config import PREFIX, RELOADABLE, Config

ROOT = Path(__file__).parents[3]
SOURCE, PAGE = ROOT / "configs" / "kvd.yaml", ROOT / "docs" / "settings.md"
ABOUT = """Every setting of kvd, with its default. `kvd init` writes them to `/etc/kvd/kvd.yaml`; `--config` names
another file. Variables override the file, flags override both. `kvd --check-config --config FILE` checks a file.
Times are in seconds, sizes in bytes. [deploy.md](deploy.md#2-settings-of-kvd) says which to set, and
[connector.md](connector.md#configuration) has the settings of the connector.

`systemctl reload kvd` (SIGHUP) puts those in force that say so; the others need a restart. This page is made of
`configs/kvd.yaml`; do not edit it by hand."""


class Documented(NamedTuple):
    """One key of the file, or a section (no default): its path, and what the comment above it says."""

    key: str
    default: str
    told: str


def documented(text: str) -> list[Documented]:
    """The keys of the file, in their order. The comment at the top of the file is about all of it."""
    found: list[Documented] = []
    above: list[str] = []
    path: list[tuple[int, str]] = []
    for line in text.partition("\n\n")[2].splitlines():
        if comment := re.fullmatch(r"\s*# ?(.*)", line):
            above.append(comment[1])
        elif entry := re.fullmatch(r"(\s*)(\w+):(?: (.*))?", line):
            indent = len(entry[1])
            path = [*((at, name) for at, name in path if at < indent), (indent, entry[2])]
            key = ".".join(name for _, name in path)
            found.append(Documented(key, entry[3] or "", " ".join(above)))
            above = []
        else:
            above = []
    return found


def page() -> str:
    """The whole page: a part for each section of the file, a row for each setting."""
    lines = ["# Settings of kvd", "", ABOUT]
    section: str | None = None
    for key, default, told in documented(SOURCE.read_text()):
        top, _, below = key.partition(".")
        if not default and "." not in key:
            lines += ["", f"## {top}", "", told.replace("docs/deploy.md", "[deploy.md](deploy.md)"), ""]
            lines += _head(top)
            section = top
        elif not default:
            continue
        else:
            if not below and section is None:
                lines += ["", "## At the top", "", *_head("")]
                section = ""
            variable = PREFIX + key.upper().replace(".", "_")
            reload = " Reloadable." if not below and key in RELOADABLE else ""
            about = _of_section(key) + (told or "See the line above.")
            shown = about.replace("|", r"\|").replace("docs/deploy.md", "[deploy.md](deploy.md)")
            lines.append(f"| `{below or key}` | `{default}` | `{variable}` | {shown}{reload} |")
    return "\n".join(lines) + "\n"


def _head(top: str) -> list[str]:
    reload = [f"All of `{top}` is reloadable.", ""] if top in RELOADABLE else []
    return [*reload, "| setting | default | variable | what it is |", "|---|---|---|---|"]


def _of_section(key: str) -> str:
    """What the comment of a section within a section says, before its first setting."""
    rows = documented(SOURCE.read_text())
    at = next(number for number, row in enumerate(rows) if row.key == key)
    before = rows[at - 1]
    nested = at and not before.default and "." in before.key
    return f"{before.told} " if nested and before.told else ""


def test_the_page_has_every_setting_as_the_file_explains_it() -> None:
    if os.environ.get("WRITE_DOCS"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page()


def test_the_file_has_every_setting_with_its_default() -> None:
    defaults = Config()
    named = {row.key: row.default for row in documented(SOURCE.read_text()) if row.default}
    for key, default in named.items():
        found = msgspec.to_builtins(attrgetter(key)(defaults))
        assert json.dumps(yaml.safe_load(default)) == json.dumps(found), key
    assert set(named) == set(_leaves(msgspec.to_builtins(defaults)))


def _leaves(tree: dict[str, object], above: str = "") -> list[str]:
    found: list[str] = []
    for name, value in tree.items():
        found += _leaves(value, f"{above}{name}.") if isinstance(value, dict) else [f"{above}{name}"]
    return found
