"""The whole demo from an empty folder to the verdict, and nothing of it left behind."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from kvctl.cli.settings import Settings
from kvctl.cli.units import Mode
from kvctl.demo.engines import real
from kvctl.demo.running import DemoOutcome, Running, keep_sending, send_requests, summarize
from kvctl.demo.screen import board
from kvctl.demo.simulate import simulated
from kvctl.errors import CheckFailed, UsageError
from kvctl.processes.errors import DaemonStartFailed, EngineError, WorkerFailed
from kvctl.processes.interruption import held, interrupted, one_interruption, unwinding
from kvctl.views.demo import Demo
from kvctl.views.output import show
from kvd.client.errors import ClientError

ENDING = "demo: ending all that was started ..."


def run(
    settings: Settings,
    *,
    mode: Mode,
    backend: str | None,
    simulate: bool,
    keep: bool,
    loop: bool,
    directory: Path | None,
    keep_files: bool,
) -> None:
    """Run the demo and print its document.

    ``backend`` is None for NIXL, or direct where that is not installed; ``directory`` is for what outlasts a demo, None
    for a throwaway one.

    Raises:
        UsageError: what it runs on is not installed, or cannot do that.
        CheckFailed: something did not start, or a request did not come out right.
        KeyboardInterrupt: it was told to end before the summary.
    """
    if simulate and mode == "push":
        raise UsageError(
            "--simulate is pull only: its workers compute no layers that could leave one by one",
            "leave --simulate out, or --mode push",
        )
    _check_installed(simulate=simulate)
    backend = _backend(backend)
    with (
        one_interruption("" if sys.stderr.isatty() else ENDING),
        _workplace(directory, keep_files=keep_files) as (folder, lasting),
    ):
        began = time.monotonic()
        try:
            with unwinding() as stack:
                with board(settings.color) as steps:
                    if simulate:
                        running = stack.enter_context(simulated(backend, folder, steps))
                    else:
                        running = stack.enter_context(real(mode, backend, folder, lasting, steps))
                    document = summarize(running, send_requests(running, steps), began)
                show(document, settings)
                if keep or loop:
                    _keep(running, loop=loop)
                if not interrupted() or sys.stderr.isatty():
                    _say(ENDING)
        except (DaemonStartFailed, EngineError, WorkerFailed, ClientError) as error:
            raise _failed(error, keep_files=keep_files) from error
    _judge(document)


def _check_installed(*, simulate: bool) -> None:
    """Raise `UsageError` with the next step where what the demo runs on is missing."""
    if not simulate and find_spec("vllm") is None:
        raise UsageError(
            "vLLM is not installed here", "type `make demo` in a checkout, or `kvctl demo --simulate`"
        )


def _backend(asked: str | None) -> str:
    """The backend to run with; raise `UsageError` where the one that was asked for has no engine here."""
    if asked is None and find_spec("nixl") is None:
        _say(
            "demo: NIXL is not installed here; the workers read each other's memory directly (--backend direct)"
        )
        return "direct"
    backend = asked or "nixl"
    # auto does without an engine on one host, and says so in the workers' logs.
    if backend in ("nixl", "mooncake") and find_spec(backend) is None:
        name = {"nixl": "NIXL", "mooncake": "Mooncake"}[backend]
        raise UsageError(
            f"{name} is not installed here",
            f"type `pip install 'kvctl[{backend}]'`, `make demo` in a checkout, or `kvctl demo --backend direct`",
        )
    return backend


@contextlib.contextmanager
def _workplace(given: Path | None, *, keep_files: bool) -> Iterator[tuple[Path, Path]]:
    """The folder of this run and the one for what outlasts it; the first is removed, and the second unless given."""
    with unwinding() as stack:
        with held():
            try:
                made = Path(tempfile.mkdtemp(prefix="kvctl-demo-")) if given is None else given.absolute()
                made.mkdir(parents=True, exist_ok=True)
                folder = made if given is None else Path(tempfile.mkdtemp(prefix="run-", dir=made))
            except OSError as error:
                raise UsageError(
                    f"no files can be made in {given or tempfile.gettempdir()}: {error.strerror}",
                    "name another directory with --dir",
                ) from None
            if keep_files:
                stack.callback(_say, f"demo: its files are in {folder}")
            else:
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder, made


def _keep(running: Running, *, loop: bool) -> None:
    """Say what can be tried, then wait for Ctrl-C; with ``loop`` requests go on meanwhile."""
    here, there = (shlex.quote(str(host.directory)) for host in (running.decode_host, running.prefill_host))
    commands = (
        f"kvctl --runtime-dir {here} top",
        f"kvctl --runtime-dir {here} describe-topology -o wide",
        f"kvctl --runtime-dir {here} transfers -o wide",
        f"kvctl --runtime-dir {here} engines",
        f"kvctl --runtime-dir {here} status --fleet",
        f"kvctl --runtime-dir {there} workers",
        f"kvctl --runtime-dir {there} status",
        f"kvctl --runtime-dir {there} events",
    )
    _say("", "Everything still runs. Try in another terminal:", *(f"  {line}" for line in commands))
    _say("Requests go on; Ctrl-C ends it all." if loop else "Ctrl-C ends it all.")
    sent = 0

    def told(number: int, one: DemoOutcome) -> None:
        nonlocal sent
        sent = number + 1
        if one.problem or not one.equal:
            _say(f"demo: {one.name}: {one.problem or 'the output differs'}")

    with contextlib.suppress(KeyboardInterrupt):
        if loop:
            keep_sending(running, told)
        while True:
            time.sleep(3600)
    if loop:
        _say(f"demo: {max(sent, len(running.prompts))} requests were sent")


def _say(*lines: str) -> None:
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()


def _failed(error: Exception, *, keep_files: bool) -> CheckFailed:
    """The error in one line; the log that came with it goes to stderr before."""
    first, _, log = str(error).partition("\n")
    if log:
        _say(log)
    hint = "see the log above" if log else ""
    if not keep_files:
        hint += ("; " if hint else "") + "kvctl demo --keep-files leaves all logs behind"
    return CheckFailed(first.removesuffix(":").removesuffix("; the end of its log"), hint)


def _judge(document: Demo) -> None:
    """Raise `CheckFailed` naming the requests that did not come out right."""
    bad = [request for request in document.requests if request.problem or not request.equal]
    if bad:
        what = f"{bad[0].request}: {bad[0].problem.splitlines()[0]}"
        raise CheckFailed(
            f"{len(bad)} of {len(document.requests)} requests did not come out right: {what}",
            "kvctl demo --keep-files leaves the logs behind",
        )
