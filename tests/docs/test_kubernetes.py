"""configs/kubernetes: kvd starts as each manifest starts it, with the directories, users and files of a kubelet.

There is no kubelet here: its part is played by what its documentation promises. `.ci/manifests` holds the manifests
against the schemas of Kubernetes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvd.keys import write_pair
from tests.support.daemons import ROOT
from tests.support.ports import free_port

FOLDER = ROOT / "configs" / "kubernetes"
BIN = Path(sys.executable).parent
KVD_USER, ENGINE_USER = 7766, 10001
WAIT_SECONDS = 30.0
needs_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run kvd as other users")


@dataclass(frozen=True)
class Pod:
    """A pod's template, with its paths below a directory of this test's."""

    root: Path
    spec: dict[str, Any]
    settings: dict[str, str]
    ports: dict[str, int]

    def container(self, name: str) -> dict[str, Any]:
        """One of its containers, of whichever kind."""
        both = [*self.spec.get("initContainers", []), *self.spec["containers"]]
        return next(one for one in both if one["name"] == name)

    def run_to_end(self, name: str, user: int, groups: list[int]) -> None:
        """An init container."""
        subprocess.run(
            self.container(name)["command"],
            check=True,
            env=_environment({}),
            user=user,
            group=user,
            extra_groups=groups,
        )

    @contextmanager
    def running(self, name: str, user: int, groups: list[int]) -> Iterator[subprocess.Popen[str]]:
        """A container that stays."""
        found = self.container(name)
        addresses = {"HOST_IP": "127.0.0.1", "POD_IP": "127.0.0.1"}
        variables = {
            one["name"]: re.sub(r"\$\((\w+)\)", lambda known: addresses[known[1]], one["value"])
            for one in found["env"]
            if "value" in one
        }
        process = subprocess.Popen(
            [*_as_user(user, groups), BIN / "kvd", *found["args"]],
            env=_environment(variables),
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=WAIT_SECONDS)

    def ready(self) -> bool:
        """What the readiness probe sees."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.ports['metrics']}/readyz", timeout=1
            ) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory that every user may pass through, as a node's root is."""
    with tempfile.TemporaryDirectory(prefix="kube-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def pod(root: Path, file: str, kind: str) -> Pod:
    """The pods of a manifest, as its ports and paths are here."""
    text = (FOLDER / file).read_text()
    ports = {name: free_port() for name in ("peers", "metrics")}
    for name, number in (("peers", 7766), ("metrics", 9402)):
        text = re.sub(rf":{number}\"", f':{ports[name]}"', text)
    for place in ("/run/kvd", "/var/lib/kvd", "/etc/kvd"):
        text = re.sub(rf"(?<![\w/]){place}", f"{root}{place}", text)
    found = {one["kind"]: one for one in yaml.safe_load_all(text)}
    return Pod(root, found[kind]["spec"]["template"]["spec"], found["ConfigMap"]["data"], ports)


def project(folder: Path, files: dict[str, str]) -> None:
    """A volume of a ConfigMap as a kubelet writes it: what is new comes by renaming one link."""
    version = folder / f"..{time.monotonic_ns()}"
    version.mkdir(parents=True)
    for name, text in files.items():
        (version / name).write_text(text)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    (folder / "..new").symlink_to(version.name)
    (folder / "..new").replace(folder / "..data")


@needs_users
def test_a_node_gets_its_kvd(root: Path) -> None:
    node = pod(root, "daemonset.yaml", "DaemonSet")
    for place in ("run/kvd", "var/lib/kvd", "etc/kvd"):
        (root / place).mkdir(parents=True)  # DirectoryOrCreate: root's, 0755
    project(root / "etc/kvd-fleet", node.settings)
    node.run_to_end("directories", 0, [])
    node.run_to_end("directories", 0, [])  # and again, when the pod is replaced: the key stays
    key = (root / "etc/kvd/host.keys").stat()
    assert (key.st_uid, key.st_mode & 0o777) == (KVD_USER, 0o600)
    with node.running("kvd", KVD_USER, []) as kvd:
        _until(node.ready, kvd)
        engine = _kvctl(root / "run/kvd", ENGINE_USER, [KVD_USER])
        assert engine.returncode == 0, engine.stderr
        assert _kvctl(root / "run/kvd", ENGINE_USER, []).returncode != 0
        # A node that joins the list later is trusted without a restart.
        theirs = write_pair(root / "theirs").decode()
        project(root / "etc/kvd-fleet", {**node.settings, "trusted.keys": f"{theirs} 10.0.0.8:7766\n"})
        _until(lambda: "1 trusted" in _kvctl(root / "run/kvd", ENGINE_USER, [KVD_USER]).stdout, kvd)


@needs_users
def test_a_pod_gets_a_kvd_of_its_own(root: Path) -> None:
    mine = pod(root, "sidecar.yaml", "Deployment")
    for place in ("run/kvd", "var/lib/kvd"):
        (root / place).mkdir(parents=True)
        _given_to_group(root / place, 0o2777)  # emptyDir of a pod with fsGroup
    project(root / "etc/kvd/settings", mine.settings)
    (root / "etc/kvd/secret").mkdir()
    write_pair(root / "etc/kvd/secret/fleet.keys")
    _given_to_group(root / "etc/kvd/secret/fleet.keys", 0o440)
    mine.run_to_end("key", ENGINE_USER, [KVD_USER])
    with mine.running("kvd", ENGINE_USER, [KVD_USER]) as kvd:
        _until(mine.ready, kvd)
        engine = _kvctl(root / "run/kvd/pod", ENGINE_USER, [KVD_USER])
        assert engine.returncode == 0, engine.stderr


def test_an_engine_finds_its_kvd_and_speaks_of_itself_by_one_name() -> None:
    for file in ("engine.yaml", "sidecar.yaml"):
        found = [
            one for one in yaml.safe_load_all((FOLDER / file).read_text()) if one["kind"] == "Deployment"
        ]
        spec = found[0]["spec"]["template"]["spec"]
        engine = spec["containers"][0]
        variables = {one["name"]: one for one in engine["env"]}
        mounted = {one["mountPath"] for one in engine["volumeMounts"]}
        assert any(variables["KVD_RUNTIME_DIR"]["value"].startswith(path) for path in mounted)
        config = yaml.safe_load(
            next(one for one in engine["args"] if "transfer-config" in one).split("=", 1)[1]
        )
        assert config["engine_id"] == "$(POD_NAME)"
        assert "$POD_NAME" in engine["lifecycle"]["preStop"]["exec"]["command"][-1]
        assert KVD_USER in spec["securityContext"]["supplementalGroups"]


def _as_user(user: int, groups: list[int]) -> list[str]:
    # It may still read this checkout and its Python, which may lie in root's home.
    reads = "+dac_read_search"
    among = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
    return [
        "setpriv",
        f"--reuid={user}",
        f"--regid={user}",
        among,
        f"--inh-caps={reads}",
        f"--ambient-caps={reads}",
    ]


def _given_to_group(path: Path, mode: int) -> None:
    os.chown(path, 0, KVD_USER)
    path.chmod(mode)


def _environment(more: dict[str, str]) -> dict[str, str]:
    return {"PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/", **more}


def _kvctl(directory: Path, user: int, groups: list[int]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_as_user(user, groups), BIN / "kvctl", "status", "--runtime-dir", directory],
        env=_environment({}),
        capture_output=True,
        text=True,
        check=False,
    )


def _until(true: Any, kvd: subprocess.Popen[str]) -> None:
    ends = time.monotonic() + WAIT_SECONDS
    while not true():
        assert kvd.poll() is None, kvd.communicate()[1]
        assert time.monotonic() < ends
        time.sleep(0.05)
