"""`vllm bench serve`, several times in one process that imports vLLM once; its own parser reads its own options.

    python -m benchmarks.serving.clients < RUNS

Each line of RUNS is a JSON list of options; each result is a line that begins with RESULT.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


def main() -> int:
    """Do what the lines of standard input say, one after the other."""
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    for line in sys.stdin:
        found: dict[str, Any] = asyncio.run(main_async(parser.parse_args(json.loads(line))))
        kept = {name: value for name, value in found.items() if not isinstance(value, list)}
        sys.stdout.write(f"\nRESULT {json.dumps(kept, default=str)}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
