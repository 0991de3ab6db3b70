"""`kvctl connector-config`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kvctl import daemon
from kvctl.cli.option_kinds import choice
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.errors import UsageError
from kvctl.views.output import show
from kvctl.views.setting_up.connector_config import ConnectorConfig
from kvd.backends.registry import OFFERED

SECTION = "Set up"
EXAMPLES = (
    "kvctl connector-config --role prefill",
    "kvctl connector-config --role decode --mode push --set load_timeout=10",
)
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
"""Our word for what an engine does, and vLLM's."""
POLICIES = ("recompute", "fail")
MODES = ("pull", "push")


def connector_config(
    settings: Settings,
    *,
    role: Annotated[str, choice("--role", ROLES, help="What the engine does.")],
    engine_id: Annotated[
        str | None,
        typer.Option("--engine-id", metavar="ID", help="The engine's name; without it vLLM draws one."),
    ] = None,
    policy: Annotated[
        str, choice("--policy", POLICIES, help="What becomes of a request whose KV does not come.")
    ] = "recompute",
    backend: Annotated[
        str | None, choice("--backend", OFFERED, help="What moves the bytes, alike on both sides. [nixl]")
    ] = None,
    mode: Annotated[str | None, choice("--mode", MODES, help="Who begins a transfer. [pull]")] = None,
    entries: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="An entry of docs/connector.md; several times for several."
        ),
    ] = None,
) -> None:
    """The flag for vllm serve that has an engine exchange KV.

    The flag is quoted for a shell, to be pasted, or taken as it is:

    eval "vllm serve MODEL $(kvctl connector-config --role prefill)"

    Settings are checked as the engine will check them. With --runtime-dir or --socket the engine is told of that kvd;
    else it finds kvd as kvctl does. No kvd is asked. The value alone: -o json | jq -c .config.
    """
    from kvd.worker.errors import BadSettings
    from kvd.worker.settings import read_settings

    extra = _entries(entries or ())
    for name, value in (("backend", backend), ("mode", mode)):
        if value is not None:
            if name in extra:
                raise UsageError(f"{name} is given twice: --{name} {value} and --set {name}={extra[name]}")
            extra[name] = value
    if settings.socket or settings.runtime_dir:
        extra.setdefault("runtime_dir", str(daemon.directory(settings)))
    try:
        read_settings(extra)
    except BadSettings as error:
        raise UsageError(error.message, "docs/connector.md lists all entries") from None
    if engine_id is not None and (not engine_id.isprintable() or not engine_id.strip()):
        raise UsageError(f"--engine-id: {engine_id!r} is no name: give printable characters")
    if policy == "fail":
        say("with policy fail a request whose KV does not come ends in an error; recompute has it computed")
    config: dict[str, Any] = {
        "kv_connector": "KvdConnector",
        "kv_connector_module_path": "kvd.vllm",
        "kv_role": ROLES[role],
        "kv_load_failure_policy": policy,
    }
    if engine_id is not None:
        config["engine_id"] = engine_id
    if extra:
        config["kv_connector_extra_config"] = extra
    show(ConnectorConfig(role=role, flag="--kv-transfer-config", config=config), settings)


def _entries(given: list[str] | tuple[str, ...]) -> dict[str, Any]:
    """``NAME=VALUE`` as entries: a value that is JSON is taken as such (10.0, true, {...}), all else as text."""
    entries: dict[str, Any] = {}
    for one in given:
        name, equals, text = one.partition("=")
        if not equals or not name:
            raise UsageError(f"--set: {one!r} is not NAME=VALUE", "write for example --set load_timeout=10")
        if name in entries:
            raise UsageError(f"--set: {name} is given twice", "leave one out")
        try:
            entries[name] = json.loads(text)
        except ValueError:
            entries[name] = text
    return entries
