"""Becomes a kvd for which names mean what a file says, read at each look-up; a name that is not there is not found.

``python tests/support/named_hosts.py FILE python -m kvd.service ARGUMENTS``
"""

import json
import socket
import sys
from pathlib import Path


def run() -> None:
    """Put the file in place of DNS, then be kvd."""
    from kvd.service import main
    from kvd.service.sockets import resolver

    names = Path(sys.argv[1])

    def look(host: str) -> list[resolver.Address]:
        found = json.loads(names.read_text()).get(host)
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET6 if ":" in address else socket.AF_INET, address) for address in found]

    resolver.Resolver.__init__.__defaults__ = (look,)
    main.run(sys.argv[5:])


if __name__ == "__main__":
    run()
