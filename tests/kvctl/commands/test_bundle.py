"""`kvctl bundle`: what lies in it, what does not, and over what it is not written."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvctl.doctor import evidence
from kvctl.doctor.evidence import configuration, log_of, redacted

if TYPE_CHECKING:
    from tests.kvctl.conftest import FakeDaemon, Run

WRITTEN = (
    "peer:\n  listen: 10.0.0.7:7766\n  curve:\n    key_file: /etc/kvd/host.keys\nmetrics:\n  password: hunter2\n"
    "tokens: [a, b]\n"
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "kvd.yaml"
    path.write_text(WRITTEN)
    return path


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        files = {member.name.removeprefix("kvctl-bundle/"): archive.extractfile(member) for member in archive}
        return {name: file.read() for name, file in files.items() if file is not None}


def test_it_holds_what_kvd_and_the_host_say_with_a_manifest(
    run: Run, daemon: FakeDaemon, tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "kvd.log"
    log.write_text("old\n" * 9 + "GET http://me:hunter2@host/ token=abcdef\n")
    monkeypatch.setattr(evidence, "its_log", lambda _: str(log))
    path = tmp_path / "b.tar.gz"
    outcome = run("bundle", path, "--kvd-config", config, "--last", "2", "--socket", daemon.directory)
    assert outcome.code == 0, outcome.err
    found = members(path)
    assert set(found) == {
        "manifest.json", "versions.json", "status.json", "engines.json", "workers.json", "transfers.json",
        "doctor.json", "kvd.yaml", "log.txt",
    }  # fmt: skip
    assert [
        len(json.loads(found["transfers.json"])["transfers"]),
        len(json.loads(found["engines.json"])["engines"]),
    ] == [2, 3]
    assert json.loads(found["status.json"])["kvd_id"] == "kvd-node7"
    assert b"hunter2" not in b"".join(found.values())
    assert b"abcdef" not in found["log.txt"]
    manifest = json.loads(found["manifest.json"])
    for member in manifest["members"]:
        data = found[member["name"]]
        assert (member["bytes"], member["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert member["name"] in outcome.out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {one.name for one in tmp_path.iterdir()} >= {"b.tar.gz"}
    assert not list(tmp_path.glob(".*.part"))


def test_without_kvd_it_holds_the_rest_and_says_what_is_left_out(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "b.tar.gz"
    outcome = run(
        "bundle", path, "--kvd-config", tmp_path / "none", "--runtime-dir", tmp_path / "away", "-o", "json"
    )
    assert outcome.code == 0
    assert {"manifest.json", "versions.json", "doctor.json"} <= set(members(path))
    left_out = {member["name"]: member["left_out"] for member in json.loads(outcome.out)["members"]}
    assert left_out["status.json"].endswith("[KVD-UNREACHABLE]")
    assert left_out["kvd.yaml"] == f"cannot read {tmp_path / 'none'}: No such file or directory"


@pytest.mark.parametrize("kind", ["device", "pipe", "link", "folder"])
def test_what_is_no_regular_file_is_refused_and_stays(run: Run, tmp_path: Path, kind: str) -> None:
    path = Path("/dev/null") if kind == "device" else tmp_path / "there"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        path.mkdir()
    before = path.lstat()
    outcome = run("bundle", path, "--runtime-dir", tmp_path / "away")
    assert (outcome.code, "is no regular file" in outcome.err) == (5, True)
    assert outcome.err.endswith("[KVD-CTL-REFUSED]\n")
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert not (tmp_path / "elsewhere").exists()


def test_a_place_that_cannot_be_written_is_one_line(run: Run, tmp_path: Path) -> None:
    outcome = run("bundle", tmp_path / "no" / "b.tar.gz", "--runtime-dir", tmp_path / "away")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert "cannot be written: No such file or directory" in outcome.err


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("http://me:pw@host:1/x", "http://(redacted)@host:1/x"),
        ("Authorization: Bearer abc.def rest", "Authorization: (redacted) rest"),
        ('"api_key": "abc", "tp": 2', '"api_key": "(redacted)", "tp": 2'),
        ("hf_" + "a" * 30, "(redacted)"),
        ("VLLM_API_KEY=sk-1 HF_TOKEN=x", "VLLM_API_KEY=(redacted) HF_TOKEN=(redacted)"),
        (
            "AWS_SECRET_ACCESS_KEY=x, access_token: y",
            "AWS_SECRET_ACCESS_KEY=(redacted), access_token: (redacted)",
        ),
        ("vllm serve m --api-key sk-1 --port 1", "vllm serve m --api-key (redacted) --port 1"),
        (
            "https://ghp_x@host/a and http://me:p/w@q@host",
            "https://(redacted)@host/a and http://(redacted)@host",
        ),
        ('{\\"token\\": \\"x y\\"}', '{\\"token\\": \\"(redacted)\\"}'),
        ("password='two words'", "password='(redacted)'"),
        ("1024 tokens in 2 ms, token_ids 5", "1024 tokens in 2 ms, token_ids 5"),
        ("kv_transfer tokens: 1024", "kv_transfer tokens: 1024"),
    ],
)
def test_what_looks_like_a_secret_is_left_out(text: str, kept: str) -> None:
    assert redacted(text) == kept


def test_a_configuration_keeps_its_entries_without_values_of_secrets(config: Path) -> None:
    kept = configuration(config)
    assert "key_file: /etc/kvd/host.keys" in kept
    assert "password: (redacted)" in kept
    config.write_text("peer: [")
    with pytest.raises(ValueError, match="not YAML"):
        configuration(config)


def test_of_a_long_log_the_end_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "LOG_BYTES", 10)
    (tmp_path / "log").write_text("a" * 50 + "\nthe newest")
    assert log_of(str(tmp_path / "log")) == "the newest"
    with pytest.raises(ValueError, match="where its stderr goes"):
        log_of("where its stderr goes")
