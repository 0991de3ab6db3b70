"""Puts a document on stdout in the form that was asked for."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from kvctl.cli.settings import DRAWINGS, Settings
from kvctl.views.registry import kind_of, lines, wrapped

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PIPE_WIDTH = 100_000
"""Columns where stdout is no terminal, or -o wide was asked for: a line is then never folded."""

SCREENS = {
    "Engines": "kvctl.render.engines:engines_screen",
    "Workers": "kvctl.render.workers:workers_screen",
    "Transfers": "kvctl.render.transfers:transfers_screen",
    "TransferGroups": "kvctl.render.transfer_groups:transfer_groups_screen",
    "WholeTransfer": "kvctl.render.whole_transfer:whole_transfer_screen",
    "Slow": "kvctl.render.slow:slow_screen",
    "Trace": "kvctl.render.trace:trace_screen",
    "Traces": "kvctl.render.trace:traces_screen",
    "Status": "kvctl.render.status:status_screen",
    "Event": "kvctl.render.event:event_screen",
    "Doctor": "kvctl.render.doctor:doctor_screen",
    "Topology": "kvctl.render.topology:topology_screen",
    "Diff": "kvctl.render.diff:diff_screen",
    "ForcedMiss": "kvctl.render.forced_miss:forced_miss_screen",
    "ClearedOrders": "kvctl.render.forced_miss:cleared_orders_screen",
    "Verification": "kvctl.render.verification:verification_screen",
    "Demo": "kvctl.render.demo:demo_screen",
    "Benchmark": "kvctl.render.benchmark:benchmark_screen",
    "HandshakeBenchmark": "kvctl.render.handshake:handshake_screen",
    "Replay": "kvctl.render.replay:replay_screen",
    "Version": "kvctl.render.version:version_screen",
    "Kinds": "kvctl.render.kinds:kinds_screen",
}
"""For each kind that a command prints, the function that draws it: ``screen(body, wide) -> renderable``."""

PICTURES = {
    ("Topology", "dot"): "kvctl.views.topology.dot:topology_dot",
    ("Topology", "mermaid"): "kvctl.views.topology.mermaid:topology_mermaid",
    ("Topology", "svg"): "kvctl.views.topology.svg:topology_svg",
}
"""For each kind and drawing the function that makes the drawing's text of the document."""


def show(body: msgspec.Struct, settings: Settings) -> None:
    """Write a document to stdout and flush it."""
    sys.stdout.write(text_of(body, settings))
    sys.stdout.flush()


def text_of(body: msgspec.Struct, settings: Settings) -> str:
    """The document as text that ends in a newline (or is empty: a list without items, as JSON lines)."""
    if settings.output == "jsonl":
        return "".join(msgspec.json.encode(line).decode() + "\n" for line in lines(body))
    if settings.output in ("json", "yaml"):
        return plain_text(wrapped(body), settings)
    if settings.output in DRAWINGS:
        picture: str = _function(PICTURES[kind_of(body).name, settings.output])(body)
        return picture
    screen: RenderableType = _function(SCREENS[kind_of(body).name])(body, settings.output == "wide")
    return _drawn(screen, settings)


def plain_text(document: dict[str, Any], settings: Settings) -> str:
    """Plain values as YAML or indented JSON."""
    if settings.output == "yaml":
        import yaml

        return "---\n" + yaml.safe_dump(
            document, sort_keys=False, allow_unicode=True, default_flow_style=False
        )
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def clear(settings: Settings) -> bool:
    """Clear the screen before a table is drawn again; False, and nothing done, where stdout is no terminal."""
    if settings.output not in ("table", "wide") or not sys.stdout.isatty():
        return False
    sys.stdout.write("\x1b[H\x1b[2J")
    return True


def _function(target: str) -> Callable[..., Any]:
    module, name = target.split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _drawn(screen: RenderableType, settings: Settings) -> str:
    console = _console(settings)
    console.print(screen, crop=False, overflow="fold")
    # rich fills every line up to its column's width; blanks at a line's end help nobody.
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    return "".join(line.rstrip() + "\n" for line in drawn.splitlines())


def _console(settings: Settings) -> Console:
    from rich.console import Console

    terminal = sys.stdout.isatty()
    coloured = settings.color == "always" or (settings.color == "auto" and terminal)
    width = None if terminal and settings.output != "wide" else PIPE_WIDTH
    return Console(
        file=io.StringIO(),
        force_terminal=coloured,
        no_color=not coloured,
        color_system="standard" if coloured else None,
        width=width,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
    )
