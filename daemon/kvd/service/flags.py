"""The parser of kvd's flags: what is wrong with them is told as every other error is."""

from __future__ import annotations

import argparse
from typing import NoReturn

from kvd.service.errors import ConfigError


class FlagParser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that raises `ConfigError`, where the original prints all flags and exits."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and where the flags are told."""
        raise ConfigError(message, hint=f"`{self.prog} --help` has the flags")
