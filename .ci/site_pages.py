# ruff: noqa: INP001 - a hook, in no package
"""Hooks of mkdocs: README.md, CHANGELOG.md and CONTRIBUTING.md are pages of the site too.

They stand at the root of the repository, where a reader looks for them. Links between them and docs/ are links to
files, so that they work there; here they become links between pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the three pages."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_kwargs: Any) -> str:
    """Turn links between the root of the repository and docs/ into links between pages."""
    up = "../" * page.file.src_uri.count("/")
    if page.file.src_uri in PAGES.values():
        markdown = markdown.replace("](docs/", "](")
    for source, target in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{re.escape(source)}", f"]({up}{target}", markdown)
    return markdown
