"""The demo with real vLLM engines: a prefiller, a decoder, and a single one whose answers are the right ones."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from kvctl.cli.units import Mode
from kvctl.demo.deployment import AskedRequest, Deployment, engines, launch
from kvctl.demo.engine import EngineAnswer, EngineProcess
from kvctl.demo.engine_spec import EngineSpec
from kvctl.demo.kinds import TINY
from kvctl.demo.models import prompt
from kvctl.demo.running import ASKED, DemoOutcome, Running
from kvctl.demo.screen import Board
from kvctl.processes.daemons import two_hosts
from kvctl.processes.errors import EngineStartFailed
from kvctl.processes.interruption import held, unwinding
from kvctl.processes.spawn import spawn

PROMPTS = (300, 1000, 120, 700, 1300, 500)
"""Lengths of the requests' prompts, in tokens."""
NEW_TOKENS = 16
ANSWER_SECONDS, START_SECONDS = 120.0, 300.0
MIB = 1 << 20

WRITE_MODEL = """
import sys
from pathlib import Path
from kvctl.demo.kinds import TINY
from kvctl.demo.models import write_model
write_model(TINY, Path(sys.argv[1]))
"""


@contextlib.contextmanager
def real(mode: Mode, backend: str, folder: Path, lasting: Path, board: Board) -> Iterator[Running]:
    """Two kvds, two engines and the single engine, all ready; ended on the way out.

    The model and what vLLM finds out about it go below ``lasting``, everything else below ``folder``. Raises
    `DaemonStartFailed` and `EngineError`.
    """
    with unwinding() as stack:
        board.begin("model", f"writing a tiny model: {TINY.cache}")
        model = _written(folder, lasting / "models")
        board.end("model")
        board.begin("kvd", "starting two kvds, peers over loopback TCP")
        hosts = stack.enter_context(two_hosts(folder, ASKED))
        board.end("kvd")
        names = ("prefill", "decode", "single")
        for name in names:
            board.begin(name, f"starting the {name} engine")
        prefill, decode, alone = (_spec(name, model, folder, lasting) for name in names)
        start = stack.enter_context(engines())
        deployment = launch(start, hosts, prefill, decode, mode=mode, extra={"backend": backend})
        single = start(alone)
        _wait_ready(dict(zip(names, (deployment.prefill, deployment.decode, single), strict=True)), board)
        yield Running(
            prefill_host=hosts[0],
            decode_host=hosts[1],
            model=TINY.name,
            mode=mode,
            simulated=False,
            prompts=PROMPTS,
            serve=lambda number: _serve(number, deployment, single),
        )


def _written(folder: Path, models: Path) -> Path:
    """Write the model in a process of its own, which takes torch away with it when it ends."""
    log_path = folder / "model.log"
    environment = dict(os.environ) | {
        "HF_HOME": str(folder / "huggingface"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TMPDIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    with held():
        process = spawn([sys.executable, "-c", WRITE_MODEL, str(models)], log_path, environment)
    try:
        status = process.wait()
    finally:
        process.kill()
        process.wait()
    if status:
        raise EngineStartFailed(
            f"writing the model failed with status {status}; its log:\n{log_path.read_text(errors='replace')}"
        )
    return models / TINY.name


def _spec(name: str, model: Path, folder: Path, lasting: Path) -> EngineSpec:
    return EngineSpec(
        model=model,
        work_dir=folder / name,
        log_path=folder / f"{name}.log",
        dtype=TINY.dtype,
        max_model_len=2048,
        kv_cache_memory_bytes=64 * MIB,
        forced_first_tokens=name == "single",
        cache_dir=lasting / "vllm-cache",
    )


def _wait_ready(engines: dict[str, EngineProcess], board: Board) -> None:
    """Wait for all engines; the first that fails ends it."""
    # Not a `with` block: after a failure the other threads end only once their engines are stopped.
    threads = ThreadPoolExecutor(len(engines))
    starting = {threads.submit(engine.wait_ready, START_SECONDS): name for name, engine in engines.items()}
    try:
        for future in as_completed(starting):
            name, error = starting[future], future.exception()
            board.end(name, good=error is None)
            if error is not None:
                raise EngineStartFailed(f"the {name} engine did not start: {error}") from error
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _serve(number: int, deployment: Deployment, single: EngineProcess) -> DemoOutcome:
    """One prompt through both engines, and through the single one at the same time."""
    tokens = prompt(number, PROMPTS[number % len(PROMPTS)])
    expected = single.submit_alone(tokens, NEW_TOKENS)
    asked = deployment.ask(tokens, NEW_TOKENS, ANSWER_SECONDS)
    alone = expected.result(ANSWER_SECONDS)
    decoded = asked.decoded
    equal = not alone.error and decoded.token_ids == alone.token_ids[1:]
    return DemoOutcome(
        name=f"request-{number + 1}",
        prompt_tokens=len(tokens),
        external_tokens=decoded.num_cached_tokens or 0,
        output_tokens=len(decoded.token_ids),
        handed_over=asked.handed_over,
        equal=equal,
        problem=_problem(asked, alone, equal=equal),
    )


def _problem(asked: AskedRequest, alone: EngineAnswer, *, equal: bool) -> str:
    """Why the answers of the prefiller, the decoder and the single engine are not what they should be."""
    for name, answer in (("prefill", asked.prefilled), ("decode", asked.decoded), ("single", alone)):
        if answer.error:
            return f"the {name} engine: {answer.error}"
    if not asked.handed_over:
        return "the prefiller returned no kv_transfer_params"
    if not equal:
        return (
            f"output {list(asked.decoded.token_ids)} where the single engine has {list(alone.token_ids[1:])}"
        )
    return ""
