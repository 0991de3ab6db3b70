"""The Geometry document, which is only ever a file."""

from kvctl.engines.geometry_file import Geometry
from kvctl.views.registry import View

VIEWS = (View(Geometry),)
