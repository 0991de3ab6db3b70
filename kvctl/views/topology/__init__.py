"""The Topology document: what `kvctl describe-topology` prints, as a screen and as drawings."""

from __future__ import annotations

from kvctl.views.registry import View
from kvctl.views.topology.document import PairDocument, Topology
from kvctl.views.topology.dot import topology_dot
from kvctl.views.topology.mermaid import topology_mermaid
from kvctl.views.topology.screen import topology_screen
from kvctl.views.topology.svg import topology_svg

VIEWS = (
    View(
        Topology,
        topology_screen,
        "pairs",
        PairDocument,
        {"dot": topology_dot, "mermaid": topology_mermaid, "svg": topology_svg},
    ),
)
