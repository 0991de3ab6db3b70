"""`kvctl serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl.cli.parsing import chosen_devices, cuda_devices, size
from kvctl.cli.settings import Settings
from kvctl.engines.pair_options import KeyFileOption

SECTION = "Measure"
EXAMPLES = ("kvctl serve 10.0.0.2 --key-file /etc/kvd/peer.key",)


def serve(
    settings: Settings,
    *,
    address: Annotated[
        str,
        typer.Argument(metavar="HOST[:PORT]", help="An address of this host, where the other reaches it."),
    ],
    memory: Annotated[
        int, typer.Option("--memory", metavar="SIZE", parser=size, help="Most memory that is given. [2GiB]")
    ] = 2 << 30,
    devices: Annotated[
        str | None,
        typer.Option("--device", metavar="cpu|cuda[:N]", parser=cuda_devices, help="Where it is. [cpu]"),
    ] = None,
    key_file: KeyFileOption = None,
) -> None:
    """The other side of a benchmark or replay between two hosts.

    Takes memory of the shape that `kvctl benchmark --to` or `kvctl replay --to` names, and has its transfer engine
    serve it, one of them at a time, until Ctrl-C. It touches no engine and no kvd. Listening where the network reaches
    takes a pair of keys, the same file on both hosts.
    """
    del settings
    from kvctl.bench import serving
    from kvctl.bench.remote import endpoint, keys
    from kvctl.bench.run import workplace

    host, port = endpoint(address)
    offer = serving.Offer(host, port, memory, chosen_devices(devices)[0], keys(key_file))
    with workplace() as folder:
        serving.serve(offer, folder)
