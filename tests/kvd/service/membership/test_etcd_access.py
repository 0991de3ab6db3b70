"""etcd over https, and etcd that asks who is there."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.daemons import wait_for
from tests.support.etcd_kvds import all_linked, kvds, membership
from tests.support.etcds import NEEDS_ETCD, Etcd, etcd

pytestmark = NEEDS_ETCD


def certificates(folder: Path) -> tuple[Path, Path, Path]:
    """One that signs, and one for server and clients at 127.0.0.1, with its key."""
    ca, ca_key, cert, key, request = (
        folder / name for name in ("ca.pem", "ca.key", "one.pem", "one.key", "one.csr")
    )
    more = folder / "more"
    more.write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    for words in (
        ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", ca_key, "-out", ca, "-subj", "/CN=test"),
        ("req", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", request, "-subj", "/CN=one"),
        ("x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-out", cert, "-days", "9",
         "-extfile", more),
    ):  # fmt: skip
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
    return ca, cert, key


@contextmanager
def sealed() -> Iterator[tuple[Etcd, tuple[Path, Path, Path]]]:
    """An etcd that speaks https alone, and only with clients that have a certificate."""
    with tempfile.TemporaryDirectory(prefix="etcd-") as place:
        files = certificates(Path(place))
        ca, cert, key = map(str, files)
        arguments = ("--cert-file", cert, "--key-file", key, "--trusted-ca-file", ca, "--client-cert-auth")
        server = Etcd(Path(place), arguments=arguments, scheme="https")
        try:
            yield server.start(), files
        finally:
            server.kill()


def test_https_with_certificates_on_both_sides() -> None:
    with sealed() as (server, (ca, cert, key)):
        names = {"CA_FILE": ca, "CERT_FILE": cert, "KEY_FILE": key}
        more = {f"KVD_MEMBERSHIP_ETCD_{name}": str(file) for name, file in names.items()}
        with kvds(2, server, **more) as made:
            wait_for(lambda: all_linked(made), 20)


def test_an_etcd_whose_certificate_nobody_signed_is_away() -> None:
    with sealed() as (server, _files), kvds(1, server) as (kvd,):
        wait_for(lambda: "certificate" in membership(kvd).reason.lower(), 20)
        assert membership(kvd).state == "away"


@pytest.mark.parametrize("right", [True, False])
def test_a_user_with_a_password(tmp_path: Path, *, right: bool) -> None:
    with etcd() as server:
        for path, body in (
            ("/v3/auth/user/add", {"name": "root", "password": "secret"}),
            ("/v3/auth/user/grant", {"user": "root", "role": "root"}),
            ("/v3/auth/enable", {}),
        ):
            server.ask(path, body)
        password = tmp_path / "password"
        password.write_text("secret\n" if right else "wrong\n")
        more = {"KVD_MEMBERSHIP_ETCD_USER": "root", "KVD_MEMBERSHIP_ETCD_PASSWORD_FILE": str(password)}
        with kvds(2, server, **more) as made:
            if right:
                wait_for(lambda: all_linked(made), 20)
                answers = [kvd.status().counters["membership.answers"] for kvd in made]
                server.kill()  # it forgets whom it knew
                server.start_quietly()
                for kvd, before in zip(made, answers, strict=True):
                    wait_for(lambda k=kvd, b=before: k.status().counters["membership.answers"] > b, 30)  # type: ignore[misc]
                    wait_for(lambda k=kvd: membership(k).state == "known", 20)  # type: ignore[misc]
            else:
                wait_for(lambda: all(membership(kvd).state == "away" for kvd in made), 20)
                assert "authentication failed" in membership(made[0]).reason
            assert "secret" not in "".join(kvd.log for kvd in made)
