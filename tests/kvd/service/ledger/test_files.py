"""Files that were set aside: they do not fill the disk."""

from __future__ import annotations

from pathlib import Path

from kvd.service.ledger import files


def test_of_ledgers_that_were_taken_over_the_newest_are_kept(tmp_path: Path) -> None:
    """Each may have gigabytes, and a bad disk damages one after the other."""
    path = tmp_path / "l"
    (tmp_path / "l.broken-0").mkdir()
    for number in range(1, 8):
        path.write_text("damaged")
        Path(f"{path}-wal").write_text("its log")
        aside = files.set_aside(path, f"l.damaged-{number}")
        assert aside is not None
        assert files.settle(aside, path, 1 << 20).name == f"l.broken-{number}"
    (tmp_path / "l.damaged-9").write_text("not taken over yet")
    kept = {f"l.broken-{number}{suffix}" for number in (4, 5, 6, 7) for suffix in ("", "-wal")}
    assert {p.name for p in tmp_path.iterdir()} == kept | {"l.broken-0", "l.damaged-9"}


def test_of_large_ones_only_the_newest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "l"
    for number, size in ((1, 10), (2, 900), (3, 2000)):
        path.write_bytes(bytes(size))
        aside = files.set_aside(path, f"l.damaged-{number}")
        assert aside is not None
        files.settle(aside, path, 1000)
    assert [p.name for p in tmp_path.iterdir()] == ["l.broken-3"]
    path.write_bytes(bytes(10))
    aside = files.set_aside(path, "l.damaged-4")
    assert aside is not None
    files.settle(aside, path, 1000)
    assert [p.name for p in tmp_path.iterdir()] == ["l.broken-4"]
