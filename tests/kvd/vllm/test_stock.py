"""What is configured for a stock connector, as the installed vLLM has it."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.vllm.stock import UNREAD, connector_settings
from kvd.worker.stock import STOCK_SETTINGS, StockSetting

PAGE = Path(__file__).parents[3] / "docs" / "switching.md"
TABLE = re.compile(r"(?<=test_stock.py` -->\n).*?(?=<!-- end -->)", re.DOTALL)
OURS = {
    "kv_connector",
    "kv_connector_extra_config",
    "kv_connector_module_path",
    "kv_load_failure_policy",
    "kv_role",
    "engine_id",
    "kv_buffer_device",
}


@pytest.fixture(scope="module")
def vllm() -> Path:
    """The installed package; nothing of it is imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed: nothing to compare with")
    return Path(next(iter(spec.submodule_search_locations)))


def read_entries(source: ast.AST) -> set[str]:
    """Entries of the extra config that a module asks for by name."""
    calls = [
        n
        for n in ast.walk(source)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.args
    ]
    asked = [
        call.args[0]
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and (
            call.func.attr == "get_from_extra_config"
            or (
                call.func.attr == "get" and ast.unparse(call.func.value).endswith("kv_connector_extra_config")
            )
        )
    ]
    return {str(name.value) for name in asked if isinstance(name, ast.Constant)}


def configured(device: str = "cuda", extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra or {}, **fields),
        device_config=SimpleNamespace(device_type=device),
    )


def test_all_that_the_stock_connectors_read_is_known(vllm: Path) -> None:
    connectors = vllm / "distributed/kv_transfer/kv_connector/v1"
    sources = [*(connectors / "nixl").glob("*.py"), connectors / "mooncake/mooncake_connector.py"]
    read = {name for source in sources for name in read_entries(ast.parse(source.read_text()))}
    assert {"kv_lease_duration", "mooncake_protocol"} <= read
    assert read - set(STOCK_SETTINGS) == set()


def test_every_field_of_vllms_configuration_is_ours_or_named(vllm: Path) -> None:
    tree = ast.parse((vllm / "config/kv_transfer.py").read_text())
    config = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == "KVTransferConfig")
    fields = {
        n.target.id: n.value
        for n in config.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    assert set(fields) - set(UNREAD) == OURS
    for name in set(fields) & set(UNREAD):
        value = fields[name]
        assert value is not None
        assert ast.literal_eval(value) == UNREAD[name][0], name


def test_fields_at_their_defaults_are_not_spoken_of() -> None:
    defaults = {name: default for name, (default, _) in UNREAD.items()}
    settings, said = connector_settings(configured(kv_buffer_device="cuda", **defaults))
    assert (settings.backend, said) == ("nixl", "")


@pytest.mark.parametrize("name", UNREAD)
def test_fields_that_are_set_are_named(name: str) -> None:
    fields: dict[str, Any] = {name: 7}
    assert f"{name} (" in connector_settings(configured(**fields))[1]


def test_a_buffer_in_host_memory_is_the_staged_backend() -> None:
    settings, said = connector_settings(configured(kv_buffer_device="cpu"))
    assert settings.backend == "staged"
    assert 'kv_buffer_device is taken for "backend": "staged"' in said


@pytest.mark.parametrize(
    ("device", "extra", "said"),
    [("cpu", {}, ""), ("cuda", {"backend": "direct"}, "without effect: kv_buffer_device")],
)
def test_a_backend_that_is_named_and_memory_of_the_host_stay(
    device: str, extra: dict[str, Any], said: str
) -> None:
    settings, line = connector_settings(configured(device, extra, kv_buffer_device="cpu"))
    assert settings.backend == extra.get("backend", "nixl")
    assert said in line
    assert bool(line) == bool(said)


def test_without_a_configuration_all_is_default() -> None:
    assert connector_settings(SimpleNamespace(kv_transfer_config=None))[1] == ""


def table() -> str:
    rows = [f"| `{name}` | {stock.connector} | {becomes(stock)} |" for name, stock in STOCK_SETTINGS.items()]
    rows += [f"| `{name}` | vLLM's own | no effect: {instead} |" for name, (_, instead) in UNREAD.items()]
    return "\n".join(["| setting | read by | with KvdConnector |", "|---|---|---|", *rows, ""])


def becomes(stock: StockSetting) -> str:
    if stock.ours:
        return f"taken for `{stock.ours}`"
    if stock.option:
        return f'with `"backend": "mooncake"` taken for `{stock.option}` of `backend_options`; else no effect'
    return f"no effect: {stock.instead}"


def test_the_page_about_switching_says_what_becomes_of_each() -> None:
    written = PAGE.read_text()
    now = TABLE.sub(lambda _match: table(), written)
    if os.environ.get("WRITE_DOCS"):
        PAGE.write_text(now)
    assert table() in PAGE.read_text()
    assert PAGE.read_text() == now


def flags_of(vllm: Path, groups: set[str]) -> set[str]:
    """The flags of vLLM's CacheConfig, ParallelConfig and SchedulerConfig, by the groups of its parser."""
    calls = (
        node
        for node in ast.walk(ast.parse((vllm / "engine" / "arg_utils.py").read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "add_argument"
    )
    return {
        str(word.value)
        for call in calls
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in groups
        for word in call.args
        if isinstance(word, ast.Constant) and str(word.value).startswith("--")
    }


def test_every_flag_on_that_page_is_one_and_all_of_kv_are_there(vllm: Path) -> None:
    flags = set(re.findall(r'"(--[a-z0-9-]+)"', (vllm / "engine" / "arg_utils.py").read_text()))
    assert "--kv-transfer-config" in flags
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `--")]
    named = {flag for row in rows for flag in re.findall(r"`(--[a-z0-9-]+)`", row.split("|")[1])}
    assert named - flags == set()
    of_kv = flags_of(vllm, {"cache_group", "parallel_group", "scheduler_group"})
    assert "--use-replayssm" in of_kv
    assert {flag for flag in of_kv if not flag.startswith("--data-parallel-")} - named == set()
    touching = {
        flag for flag in flags if re.search(r"kv-(?!cache-metrics)|prefix-caching|-parallel-size$", flag)
    }
    assert touching - named == set()
