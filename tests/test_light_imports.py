"""Importing kvctl and kvd never pulls in torch, vLLM or a transfer engine."""

import json
import subprocess
import sys

SCRIPT = """
import importlib, json, pkgutil, sys
import kvctl, kvd
for package in (kvctl, kvd):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        # The connector and the reference's logits processor are classes of vLLM's, and imported by vLLM alone.
        if not module.name.startswith(("kvd.vllm", "kvctl.demo.reference", "kvctl.__main__")):
            importlib.import_module(module.name)
print(json.dumps(sorted({"torch", "vllm", "transformers", "nixl", "mooncake"} & set(sys.modules))))
"""


def test_no_module_imports_a_heavy_library() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
