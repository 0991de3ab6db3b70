"""The picture of a topology: the matrix in the manner of `nvidia-smi topo -m`, groups, differences, findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvctl.cli.settings import Settings
from kvctl.views.output import text_of
from kvctl.views.topology.document import PairDocument, PairFactor, Topology
from kvd.topology.describe import EngineSummary, GroupSummary, ReadSummary
from kvd.topology.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL = "Qwen/Qwen3-8B"


def end(name: str, tp: int, pp: int = 1, blocks: Sequence[int] = (16,)) -> EngineSummary:
    return EngineSummary(
        engine_id=name, generation="9c", model=MODEL, tp=tp, pp=pp, dcp=1, block_sizes=tuple(blocks)
    )


def pair(reads: Sequence[ReadSummary], groups: Sequence[GroupSummary], **changes: object) -> PairDocument:
    values: dict[str, object] = {
        "local": end("decode-0", 2),
        "remote": end("prefill-0", 4),
        "compatible": True,
        "factors": (PairFactor(name="dtype", local="bfloat16", remote="bfloat16", ok=True, note=""),),
        "groups": tuple(groups),
        "reads": tuple(reads),
        "findings": (),
    }
    return PairDocument(**(values | changes))  # type: ignore[arg-type]


FULL = GroupSummary(
    index=0, kind="full", layers=tuple(map(str, range(36))), block_size=16, bytes_per_block=32768
)


def read(
    local: str, remote: str, group: int = 0, heads: tuple[int, int] | None = None, share: int = 16384
) -> ReadSummary:
    return ReadSummary(
        local_rank=local,
        remote_rank=remote,
        group=group,
        heads=heads,
        bytes_per_block=share,
        segments_per_block=2,
        layers=36 if group == 0 else 12,
    )


SPLIT = pair(
    [
        read("tp0", "tp0", heads=(0, 2)),
        read("tp0", "tp1", heads=(2, 4)),
        read("tp1", "tp2", heads=(4, 6)),
        read("tp1", "tp3", heads=(6, 8)),
    ],
    [FULL],
)


def drawn(*pairs: PairDocument, wide: bool = False) -> str:
    return text_of(Topology(pairs=pairs), Settings(output="wide" if wide else "table"))


def test_the_matrix_has_local_ranks_as_rows_and_remote_ranks_as_columns() -> None:
    assert drawn(SPLIT) == (
        "decode-0 (tp2, blocks of 16) reads from prefill-0 (tp4, blocks of 16): compatible\n"
        "Qwen/Qwen3-8B\n"
        "\n"
        "     tp0  tp1  tp2  tp3\n"
        "tp0  50%  50%  .    .\n"
        "tp1  .    .    50%  50%\n"
        "\n"
        "  N%  part of the bytes that the row's rank reads from the column's rank\n"
        "  .   nothing\n"
        "\n"
        "GROUP  KIND  LAYERS  TOKENS/BLOCK  BYTES/BLOCK\n"
        "g0     full      36            16     32.0 KiB\n"
    )


def test_a_cell_names_the_groups_when_they_are_not_all() -> None:
    state = GroupSummary(
        index=1, kind="mamba", layers=tuple(map(str, range(12))), block_size=640, bytes_per_block=32768
    )
    both = pair(
        [
            read("tp0", "tp0", share=32768),
            read("tp0", "tp0", 1, share=16384),
            read("tp0", "tp1", 1, share=16384),
        ],
        [FULL, state],
    )
    text = drawn(both)
    assert "tp0  88%  12% g1\n" in text
    assert "gN  of these groups only" in text


def test_wide_shows_each_read_and_the_factors_that_agree() -> None:
    text = drawn(SPLIT, wide=True)
    assert "dtype   bfloat16  bfloat16  yes  -\n" in text
    assert "tp1     tp3     g0     6-7        36     16.0 KiB             2\n" in text
    assert "dtype" not in drawn(SPLIT)


def test_an_incompatible_pair_shows_what_differs_and_no_matrix() -> None:
    wrong = pair(
        [],
        [FULL],
        compatible=False,
        factors=(
            PairFactor(name="dtype", local="bfloat16", remote="bfloat16", ok=True, note=""),
            PairFactor(
                name="cache_dtype", local="fp8", remote="auto", ok=False, note="bytes mean other numbers"
            ),
        ),
        findings=(
            Finding(
                code="COMPAT_MISMATCH",
                severity="error",
                message="cache_dtype differs",
                hint="start both with one --kv-cache-dtype",
            ),
        ),
    )
    assert drawn(wrong) == (
        "decode-0 (tp2, blocks of 16) reads from prefill-0 (tp4, blocks of 16): NOT compatible\n"
        "Qwen/Qwen3-8B\n"
        "\n"
        "FACTOR       LOCAL  REMOTE  OK  NOTE\n"
        "cache_dtype  fp8    auto    NO  bytes mean other numbers\n"
        "\n"
        "error COMPAT_MISMATCH: cache_dtype differs\n"
        "  start both with one --kv-cache-dtype\n"
    )


def test_ranks_stand_in_the_order_of_their_numbers() -> None:
    many = pair([read("tp0", f"tp{n}") for n in (10, 9, 2)] + [read("tp0", "tp0.pp1")], [FULL])
    assert "     tp2  tp9  tp10  tp0.pp1\n" in drawn(many)


@pytest.mark.parametrize(("width", "tables"), [(80, 2), (160, 1), (24, 6)])
def test_a_matrix_wider_than_the_terminal_goes_on_below(
    monkeypatch: pytest.MonkeyPatch, width: int, tables: int
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    big = pair([read(f"tp{n}", f"tp{n}") for n in range(16)], [FULL])
    lines = text_of(Topology(pairs=(big,)), Settings(color="never")).splitlines()
    assert sum(line.startswith("tp15") for line in lines) == tables
    matrix = [line for line in lines if line.startswith(("tp", "   "))]
    assert max(len(line) for line in matrix) <= width


def test_pairs_stand_one_below_the_other() -> None:
    assert drawn(SPLIT, SPLIT).count(") reads from prefill-0 (") == 2
    assert drawn() == ""
