"""The tables of docs/matrix.md: which backends, modes and kinds of cache are tried together, and with which faults."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from kvctl.cli.units import Mode
from tests.support.configurations import COLUMNS, CONFIGURATIONS

BACKENDS = ("nixl", "mooncake", "direct")
MODES: tuple[Mode, ...] = ("pull", "push")


@dataclass(frozen=True)
class Cell:
    """One deployment. ``caching`` is prefix caching; ``tp`` are the prefiller's and the decoder's workers."""

    model: str
    caching: bool
    backend: str
    mode: Mode
    tp: tuple[int, int] = (1, 1)

    def __str__(self) -> str:
        return f"{self.row}-{self.column}".replace(" ", "_")

    @property
    def row(self) -> str:
        """Its kind of cache, and the numbers of workers where there are several."""
        caching = {"qwen3.5-gdn": " cached" if self.caching else " uncached"}.get(self.model, "")
        return f"{self.model}{caching}" + ("" if self.tp == (1, 1) else " tp{} to tp{}".format(*self.tp))

    @property
    def column(self) -> str:
        """Its backend and mode."""
        return f"{self.backend} {self.mode}"


KINDS = (
    ("llama", True),
    ("qwen3.5-gdn", True),
    ("qwen3.5-gdn", False),
    ("gemma3", True),
    ("deepseek-v2", False),
)
RESHARDED = tuple(
    Cell(model, True, "nixl", "push", tp) for model in ("llama", "qwen3.5-gdn") for tp in ((1, 2), (2, 1))
)
CELLS = (
    *(
        Cell(model, caching, backend, mode)
        for (model, caching), backend, mode in itertools.product(KINDS, BACKENDS, MODES)
    ),
    *RESHARDED,
)
ALWAYS = (
    Cell("qwen3.5-gdn", True, "nixl", "push"),
    Cell("llama", True, "mooncake", "push"),
    Cell("gemma3", True, "direct", "push"),
)
"""Those that are part of every run: each backend once, each kind of group once."""

UNEQUAL = tuple(
    Cell(model, True, "nixl", "pull", tp)
    for model, tp in itertools.product(("llama", "gemma3", "qwen3.5-gdn"), ((1, 2), (2, 1)))
)
"""The pulls between different numbers of workers."""

FAULTY = tuple(
    Cell(model, True, backend, "push")
    for model, backend in itertools.product(("llama", "qwen3.5-gdn"), BACKENDS)
)
FAULTS = {
    "test_a_layer_that_cannot_be_written_is_a_miss": "a layer's write cannot be started, or fails",
    "test_a_kvd_killed_and_restarted_in_the_middle": "kvd of either side killed (SIGKILL) in mid-prefill",
    "test_a_decoder_that_is_asked_late_and_one_that_is_asked_twice": "the announcement comes late, or twice",
    "test_what_the_other_side_never_hears_of_ends_by_itself": "one of the two sides never hears of the request",
    "test_an_abort_at_the_decoder_frees_the_prefiller": "the request aborted at the decoder in mid-prefill",
    "test_what_shares_the_landing_of_a_request_that_was_given_up_arrives_all_the_same": (
        "one of two requests given up while the prefiller stands still"
    ),
    "test_an_abort_at_the_prefiller_is_a_miss_at_once": "the request aborted at the prefiller in mid-prefill",
    "test_a_prefiller_that_stands_still_past_the_deadline_and_goes_on": (
        "the prefiller stopped (SIGSTOP) past the deadline, then continued"
    ),
    "test_a_decoder_killed_after_its_announcement": "the decoder killed (SIGKILL) after its announcement",
    "test_a_prefiller_killed_in_mid_prefill": "the prefiller killed (SIGKILL) in mid-prefill",
}
"""The tests of faults, in the order in which a pair of engines meets them, and what each is about."""


@dataclass(frozen=True)
class Table:
    """One table of the page. ``corner`` stands above its rows, ``text`` before it."""

    title: str
    text: str
    corner: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    places: frozenset[tuple[str, str]]


Place = tuple[str, str, str]
"""A table's title, a row, a column."""


def _table(title: str, text: str, cells: tuple[Cell, ...]) -> Table:
    places = [(cell.row, cell.column) for cell in cells]
    rows, columns = (tuple(dict.fromkeys(names)) for names in zip(*places, strict=True))
    return Table(title, text, "model", rows, columns, frozenset(places))


ANSWERS = _table(
    "Answers",
    """The prompts had one prefill chunk and many. In push the two sides heard of them in every possible order. Eight
requests were sent at once, too, and prompts with prefixes that one side has already. `equal`: every answer was, token
for token, that of one engine alone. Every transfer stands in the ledger as done, and in the end no block was held.""",
    CELLS,
)
WORKERS = _table(
    "Pulls between different numbers of workers",
    "Two prompts. `equal` as above; every worker read, and every worker was read from.",
    UNEQUAL,
)
FAULTS_OF_PUSH = Table(
    "Faults of a push",
    """`right`: every answer was the decoder's own or that of a hand-over, as the ledger says which; every block came
back; the next request was handed over. `-`: nothing is written with `direct`, the decoder reads.""",
    "fault",
    tuple(FAULTS.values()),
    tuple(f"{cell.model} {cell.backend}" for cell in FAULTY),
    frozenset(itertools.product(FAULTS.values(), (f"{cell.model} {cell.backend}" for cell in FAULTY))),
)
OF_CONFIGURATIONS = Table(
    "Configurations",
    """Two prompts, for each data-parallel rank: one of a chunk and one of several. `works`: the answer was, token for
token, that of the decoder alone. The ledger and vLLM's own count say that all of the prompt was loaded, and none of it
computed again. As many drafts were accepted as without a hand-over. `prefixes cached`: each prompt goes on where the
one before ended, and no whole block that the decoder has was moved again. For GDN the right answer is that of a
hand-over with empty caches. Pull and push are KvdConnector's; `stock` are vLLM's NixlConnector and NixlPushConnector on
the same engines. Where something else came of it, the words in backticks are an engine's.

`works, by hand`: vLLM's CPU build does not run it. So vLLM's own scheduler is stepped by hand: it offers, or pushes,
all of the prompt, and a decoder's scheduler loads all of it. No bytes move there. Which bytes such workers read of each
other is tested against an oracle that looks at every byte ([geometry.md](geometry.md)).""",
    "configuration",
    tuple(row.name for row in CONFIGURATIONS),
    tuple(COLUMNS),
    frozenset(itertools.product((row.name for row in CONFIGURATIONS), COLUMNS)),
)
TABLES = (ANSWERS, WORKERS, OF_CONFIGURATIONS, FAULTS_OF_PUSH)
GOOD = {ANSWERS.title: "equal", WORKERS.title: "equal", FAULTS_OF_PUSH.title: "right"}
"""What stands in a place of which all tests passed, by table."""
OF_FILE = {"test_push.py": ANSWERS, "test_unequal_tp.py": WORKERS, "test_push_faults.py": FAULTS_OF_PUSH}


def place_of(file: str, test: str, cell: Cell) -> Place | None:
    """Where the page says what came of a test; None where it does not."""
    table = OF_FILE.get(file)
    if table is None:
        return None
    row, column = (
        (cell.row, cell.column) if test not in FAULTS else (FAULTS[test], f"{cell.model} {cell.backend}")
    )
    return (table.title, row, column) if (row, column) in table.places else None


@dataclass(frozen=True)
class NotHere:
    """What stock connectors do and KvdConnector does not: what happens ``here``, and ``why``."""

    what: str
    here: str
    why: str


NOT_HERE = (
    NotHere(
        "an engine with `kv_role` `kv_consumer` keeps something for others: what it has of an earlier turn for a "
        "prefiller (`bidirectional_kv_xfer`), or a prompt that it is asked to prefill",
        "without effect: the prefiller has the turn in its own cache, reads it out of the decoder's with "
        "[`prefixes`](prefixes.md), or computes it. `kv_both` engines prefill, and read from each other",
        "a decoder would keep blocks that nobody may ever ask for, out of the memory that it decodes in",
    ),
    NotHere(
        "push from several data-parallel ranks, none of them named",
        "the router names the rank to both engines "
        "([routers.md](routers.md#prefillers-with-several-data-parallel-ranks)). A pull needs no "
        "name",
        "a push begins before the prefiller has answered: nobody knows yet which rank it will be",
    ),
    NotHere(
        "sleep mode on vLLM before 0.33",
        "the engine does not start",
        "vLLM tells no connector before it unmaps memory that peers read",
    ),
    NotHere(
        "NIXL without UCX: `backends` with LIBFABRIC (EFA), UCCL or GPUNETIO",
        "KV goes by UCX, and the log says so; `kvctl doctor` names paths that are slow for it",
        "what ends a late write of theirs is not known, so memory that vLLM uses again could be written to",
    ),
    NotHere(
        "some caches of the last builds: HiSparse with its host pool; circular buffers that "
        "`--decode-context-parallel-size` spreads. Between engines with different numbers of workers: keys and values "
        "in slots of their own (NVFP4), and states with records beside them",
        "the engine does not start, and names the group; the unlike pair is refused at the handshake "
        "([connector.md](connector.md#kinds-of-cache))",
        "which bytes belong to which head, row or block is not known there: the pool has blocks of its own, and stock "
        "takes every rank's rows for whole and cuts slots by their number",
    ),
)
"""At most five."""
PAGE = """# What was tried with what

Written by `make e2e-matrix`; a run of some cells leaves the others as they were. Each cell is a pair of vLLM engines on
a CPU.

With {versions}.
"""


def page(found: Mapping[Place, str], versions: Mapping[str, str]) -> str:
    """docs/matrix.md: ``found`` is what came of each place, ``versions`` of what it was tried with."""
    parts = [PAGE.format(versions=", ".join(f"{name} {version}" for name, version in versions.items()))]
    for table in TABLES:
        parts += [f"\n## {table.title}\n\n{table.text}\n\n"]
        parts += [f"| {table.corner} | {' | '.join(table.columns)} |\n|---|{'---|' * len(table.columns)}\n"]
        for row in table.rows:
            values = [
                found.get((table.title, row, column), "not run") if (row, column) in table.places else ""
                for column in table.columns
            ]
            parts += [f"| {row} | {' | '.join(values)} |\n"]
    parts += [
        "\n## What stock connectors do and KvdConnector does not\n\n| what | here | why |\n|---|---|---|\n"
    ]
    return "".join([*parts, *(f"| {one.what} | {one.here} | {one.why} |\n" for one in NOT_HERE)])


def read(text: str) -> dict[Place, str]:
    """What a page says was found."""
    found: dict[Place, str] = {}
    for table in TABLES:
        lines = text.partition(f"## {table.title}\n")[2].partition("\n## ")[0].splitlines()
        for row in table.rows:
            line = next((line for line in lines if line.startswith(f"| {row} | ")), None)
            if line is not None:
                values = [value.strip() for value in line.strip("|").split("|")[1:]]
                pairs = zip(table.columns, values, strict=True)
                found |= {(table.title, row, column): value for column, value in pairs if value}
    return found
