"""A headless Chromium, driven over its own pipe: what a page looks like at a width, in dark or light."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--hide-scrollbars", "--force-color-profile=srgb", "--font-render-hinting=none", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """One page of a browser. Chromium reads commands from descriptor 3 and writes answers to 4, each ended by a NUL."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._number, self._read, self._session = 0, b"", ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")

    def show(self, page: Path, width: int, scheme: Literal["dark", "light"], height: int = 800) -> None:
        """Load a page into a window of that width; return once it is drawn."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._call("Page.navigate", url=page.absolute().as_uri())
        self._event("Page.loadEventFired")

    def value(self, script: str) -> Any:
        """What a script of JavaScript gives on the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """The window as PNG."""
        answer = self._call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])

    def close(self) -> None:
        """Have it end."""
        with suppress(OSError, EOFError):
            self._call("Browser.close", session=False)

    def _call(self, method: str, *, session: bool = True, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        body: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session and session:
            body["sessionId"] = self._session
        os.write(self._commands, json.dumps(body).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        found: dict[str, Any] = answer["result"]
        return found

    def _event(self, name: str) -> None:
        while self._next().get("method") != name:
            pass

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            more = os.read(self._answers, 1 << 20)
            if not more:
                raise EOFError("chromium has ended")
            self._read += more
        body, _, self._read = self._read.partition(b"\0")
        found: dict[str, Any] = json.loads(body)
        return found


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own, ended with all its processes."""
    assert CHROMIUM
    to_read, commands = os.pipe()
    answers, to_write = os.pipe()

    def descriptors() -> None:
        spare = os.dup(to_write)
        os.dup2(to_read, 3)
        os.dup2(spare, 4)

    with TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
            preexec_fn=descriptors,  # noqa: PLW1509 (the two descriptors must have these numbers)
            pass_fds=(3, 4, to_read, to_write),
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        try:
            found = Browser(commands, answers)
            yield found
            found.close()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(commands)
            os.close(answers)
