# ruff: noqa: INP001 - a script, in no package
"""Checks a built site: every internal link and anchor leads somewhere, and no page fetches anything from elsewhere.

Links to other sites are counted and not followed: CI has no network. `python site_links.py FOLDER`
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src")}
"""What a browser fetches by itself. Of <link>, it is style sheets, icons and whatever else is no mere relation."""
RELATIONS = {"canonical", "next", "prev", "alternate", "edit"}


class Page(HTMLParser):
    """The anchors, links and fetched addresses of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what one tag names or points to."""
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        self.fetched |= {value for name, value in values.items() if (tag, name) in FETCHED}
        if tag == "link" and values.get("rel") not in RELATIONS:
            self.fetched.add(values["href"])


def main(folder: Path) -> int:
    """Print what is wrong, one line each; return 1 if anything is."""
    pages = {path: Page(path) for path in sorted(folder.rglob("*.html")) if path.name != "404.html"}
    wrong, outside, inside = [], 0, 0
    for path, page in pages.items():
        where = path.relative_to(folder)
        wrong += [f"{where}: fetches {url}" for url in page.fetched if urlsplit(url).netloc]
        for link in sorted(page.links | page.fetched):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                outside += 1
                continue
            inside += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                wrong.append(f"{where}: {link}: there is no such file")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                wrong.append(f"{where}: {link}: there is no such anchor")
    sys.stdout.write("".join(f"docs: {line}\n" for line in wrong))
    sys.stdout.write(
        f"docs: {len(pages)} pages, {inside} internal links, {len(wrong)} wrong; {outside} external not followed\n"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
