"""The command `kvd`: reads flags and settings, then serves."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kvd.installed import own_version
from kvd.service.config import Config, load
from kvd.service.ending import FAULT, end_with_threads
from kvd.service.errors import ServiceError
from kvd.service.flags import FlagParser
from kvd.service.init import init
from kvd.service.log import marking, to_journal, writing
from kvd.service.loop_monitor import LoopMonitor, event_loop
from kvd.service.notify import from_environment
from kvd.service.peers import trust
from kvd.service.run import checked, run_daemon

log = logging.getLogger("kvd.service")

DEFAULT_CONFIG = Path("/etc/kvd/kvd.yaml")
CANNOT_START = 2
LEAST_ADDRESS_SPACE = 1 << 30
"""Bytes, with stacks of threads and what malloc only reserves; of memory proper kvd takes a tenth of that."""
SWITCH_SECONDS = 0.0005
"""How long the loop may have to wait for the interpreter while another thread writes or reads the ledger."""


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point. Exit codes: 0 stopped as told, 1 a fault of its own, 2 bad flags, settings or sockets."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        sys.exit(init(words[1:]) if words[:1] == ["init"] else _act(_parser().parse_args(words)))
    except ServiceError as error:
        told = f"kvd: {error.message} [{error.code}]" + (f"\nkvd: next: {error.hint}" if error.hint else "")
        marked = marking(sys.stderr.fileno())
        sys.stderr.writelines(f"{marked(logging.ERROR, line)}\n" for line in told.split("\n"))
        sys.exit(CANNOT_START)
    except KeyboardInterrupt:
        sys.exit(130)


def _act(given: argparse.Namespace) -> int:
    if given.new_keys:
        public = trust.create(given.new_keys)
        sys.stdout.write(f"wrote {given.new_keys}, public key {public}\n")
        return 0
    config = _load(given)
    if given.check_config:
        checked(config)
        where = f"runtime directory {config.directory}, state in {config.state_directory}"
        sys.stdout.write(f"kvd: settings are good; {where}\n")
        return 0
    descriptor = sys.stderr.fileno()
    with writing(descriptor, _log_format(descriptor)):
        logging.getLogger("kvd").setLevel(config.log_level.upper())
        return _serve(given, config)


def _serve(given: argparse.Namespace, config: Config) -> int:
    _raise_file_limit()
    _warn_of_little_memory()
    end_with_threads()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        monitor = LoopMonitor()
        with asyncio.Runner(loop_factory=lambda: event_loop(monitor)) as runner:
            runner.run(run_daemon(config, lambda: _load(given), from_environment(os.environ), monitor))
    except ServiceError:
        raise
    except Exception:  # the outermost of the daemon: systemd is told by the status, a person by the log
        log.exception("a part of kvd failed; it ends, so that it can be started again")
        return FAULT
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="kvd",
        description="Control plane of KV cache transfer between vLLM engines: one daemon a host. "
        "`kvd init` makes what a host needs before the first one; `kvd init --dry-run` says what that is.",
        epilog="Exit codes: 0 stopped as told, 1 a fault of its own, 2 bad flags, settings or sockets. "
        "SIGTERM drains and stops, SIGHUP reloads. KVD_SECTION_KEY variables override the file, flags override both.",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"settings (default: {DEFAULT_CONFIG} if it exists)"
    )
    parser.add_argument(
        "--runtime-dir", metavar="DIR", help="where the sockets stand (default: $KVD_RUNTIME_DIR, /run/kvd)"
    )
    parser.add_argument(
        "--state-dir", metavar="DIR", help="where the ledger stands (default: $STATE_DIRECTORY)"
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help="serve other kvds there; port 0 takes any")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="default: info")
    parser.add_argument(
        "--check-config", action="store_true", help="read the settings, say whether they are good, end"
    )
    parser.add_argument(
        "--new-keys", type=Path, metavar="FILE", help="write a new pair of CURVE keys for peers, end"
    )
    parser.add_argument("--version", action="version", version=f"kvd {own_version()}")
    return parser


def _load(given: argparse.Namespace) -> Config:
    path = given.config or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)
    flags = {
        "runtime_dir": given.runtime_dir,
        "state_dir": given.state_dir,
        "peer.listen": given.listen,
        "log_level": given.log_level,
    }
    return load(path, os.environ, {key: value for key, value in flags.items() if value is not None})


def _log_format(descriptor: int) -> str:
    # The journal adds the time, and takes the level from a mark.
    name_and_text = "%(name)s: %(message)s"
    return name_and_text if to_journal(descriptor) else f"%(asctime)s %(levelname)s {name_and_text}"


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _warn_of_little_memory() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
        log.warning(
            "this process may have %d MiB of address space (RLIMIT_AS), kvd wants %d MiB: it ends where that is too"
            " little; limit memory (systemd's MemoryMax=) instead of address space (LimitAS=, ulimit -v)",
            limit >> 20,
            LEAST_ADDRESS_SPACE >> 20,
        )
