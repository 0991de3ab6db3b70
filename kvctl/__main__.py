"""`python -m kvctl`."""

from kvctl.main import run

run()
