"""Serves requests by pairs of engines, ours and vLLM's connectors in turns; writes results as benchmarks.gpu does.

    PYTHONPATH=daemon:. python3 -m benchmarks.serving --out DIR [--only STAGE[+STAGE],...] [--budget SECONDS] ...

Decode steps run in CUDA graphs, scheduling is asynchronous, requests come at random times and at several rates
(`benchmarks.serving.cells`). This process is the router. `python3 -m benchmarks.gpu.tables DIR --tables
serving,serving-split` draws the tables.
"""

from __future__ import annotations

import sys

from benchmarks.gpu.__main__ import main
from benchmarks.serving.stages import STAGES

if __name__ == "__main__":
    sys.exit(main(STAGES, "benchmarks.serving", __doc__))
