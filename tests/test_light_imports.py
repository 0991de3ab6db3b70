"""Importing kvctl and kvd never pulls in torch, vLLM or a transfer engine."""

import json
import subprocess
import sys

SCRIPT = """
import importlib, json, pkgutil, sys
import kvctl, kvd
# The connector and the reference's logits processor are classes of vLLM's, the kernel of direct reads is Triton's; each
# is imported only where that is used. The full screen is textual's, aiohttp asks etcd, OpenTelemetry brings spans.
HEAVY = ("kvd.service.membership.etcd", "kvd.service.tracing.exporter")
HEAVY += ("kvd.vllm", "kvctl.demo.reference", "kvctl.__main__", "kvctl.top.app", "kvd.backends.direct.cuda.kernel")
for package in (kvctl, kvd):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith(HEAVY):
            importlib.import_module(module.name)
OTHERS = {"torch", "vllm", "transformers", "nixl", "mooncake", "triton", "textual", "aiohttp", "opentelemetry"}
print(json.dumps(sorted(OTHERS & set(sys.modules))))
"""


def test_no_module_imports_a_heavy_library() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_a_worker_does_not_load_what_seals_between_hosts() -> None:
    script = "import sys, kvd.worker.worker; print(sorted({'nacl', 'zmq'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
