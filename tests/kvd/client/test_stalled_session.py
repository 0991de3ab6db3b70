"""A session whose thread stands still while kvd sends, in a process of its own: that process is vLLM's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.daemons import ROOT

PUSHES = 20_000

KVD = """
import os, signal, sys, time
import zmq
from kvd.wire.frame import decode, encode
from kvd.wire.handshake import PeerGone
from kvd.wire.registration import Registered
address, generation, pushes = sys.argv[1], sys.argv[2], int(sys.argv[3])
socket = zmq.Context().socket(zmq.ROUTER)
socket.sndhwm = 0
socket.bind(address)
route, frame = socket.recv_multipart()
registered = Registered(kvd_generation=generation, engine_generation="e", heartbeat_seconds=60.0)
socket.send_multipart([route, encode(registered, decode(frame)[1])])
sys.stdin.readline()
for number in range(pushes):
    socket.send_multipart([route, encode(PeerGone(engine_id="f", generation="g", reason="test"))])
time.sleep(0.2)  # for libzmq's own thread, which tells nobody how far it is
os.kill(os.getpid(), signal.SIGKILL)
"""

WORKER = """
import subprocess, sys, threading, time
from kvd.client.session import KvdSession
from tests.support.daemons import facts, worker
directory, pushes, kvd = sys.argv[1:]
def serve(generation, pushes):
    command = [sys.executable, "-c", kvd, f"ipc://{directory}/kvd.sock", generation, pushes]
    return subprocess.Popen(command, stdin=subprocess.PIPE)
stands, goes_on = threading.Event(), threading.Event()
def pushed(message):
    stands.set()
    goes_on.wait()
first = serve("first", pushes)
card = worker(facts("e"))
session = KvdSession(lambda: card, pushed, directory=directory)
session.wait(lambda state: state.kvd_generation == "first", 20)
first.stdin.close()
first.wait()
assert stands.is_set()
time.sleep(1.0)  # libzmq ended the process as soon as it noticed
goes_on.set()
second = serve("second", "0")
session.wait(lambda state: state.kvd_generation == "second", 20)
second.kill()
print("came back")
"""


def test_it_survives_the_end_of_a_kvd_that_had_sent_it_too_much(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(tmp_path), str(PUSHES), KVD],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'daemon'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "came back\n"), done.stderr
