"""Real `vllm serve` processes, as operators start them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import nursery

CALM = {
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parent / "calm"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
}
"""Environment for `vllm serve`: its processes wait without sched_yield, see kvctl.demo.engine_host."""


@contextlib.contextmanager
def program(words: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Iterator[int]:
    """A program in a session of its own, ended with all that it started; its process, which leads the session."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    with _ended(process):
        yield process.pid


@contextlib.contextmanager
def server(words: Sequence[str], log: Path, env: Mapping[str, str]) -> Iterator[int]:
    """A `program` of `serve_words`, out of the process that has imported vLLM: that alone takes 15 s of a core."""
    process = nursery.spawn(words, log, env, cwd=Path.cwd())
    with _ended(process):
        yield process.pid


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes] | nursery.Fostered) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def serve_words(
    model: Path, port: int, config: Mapping[str, Any] | None, *, host: str = "127.0.0.1", **more: Any
) -> list[str]:
    """A command line of `vllm serve` for a tiny model, which it serves as "tiny", with that kv_transfer_config.

    ``more`` are further options, with underscores in their names; they win. True stands for an option without a value,
    False for its opposite; a mapping goes as JSON.
    """
    template = model.parent / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    options = {
        "--served-model-name": "tiny",
        "--host": host,
        "--port": port,
        "--max-model-len": 2048,
        "--kv-cache-memory-bytes": 64 << 20,
        "--max-num-batched-tokens": 256,
        "--max-num-seqs": 8,
        "--chat-template": template,
        **({"--kv-transfer-config": json.dumps(config)} if config is not None else {}),
        **{"--" + name.replace("_", "-"): value for name, value in more.items()},
    }
    words = [word for name, value in options.items() for word in _words(name, value)]
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    return [*serve, "--enforce-eager", "--no-enable-prefix-caching", *words]


def _words(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return (name if value else f"--no-{name.removeprefix('--')}",)
    return name, json.dumps(value) if isinstance(value, Mapping) else str(value)
