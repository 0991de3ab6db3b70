"""docs/connector.md, docs/deploy.md and README.md say what the code does."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from kvd.vllm.params import finished_prefill
from kvd.worker.settings import ConnectorSettings, read_settings
from tests.support.rigs.bench import prefill

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "connector.md"
ROUTERS = ROOT / "docs" / "routers.md"
TABLE = re.compile(r"(?<=test_docs.py` -->\n).*?(?=<!-- end -->)", re.DOTALL)
CONFIG = re.compile(r"\{[^`']*\"kv_connector\"[^`']*\}")


def table() -> str:
    hints, defaults = get_type_hints(ConnectorSettings, include_extras=True), ConnectorSettings()
    rows = [
        f"| `{name}` | `{json.dumps(getattr(defaults, name))}` | {hint.__metadata__[0].description} |"
        for name, hint in hints.items()
    ]
    return "\n".join(["| entry | default | meaning |", "|---|---|---|", *rows, ""])


def test_the_table_of_settings_is_the_settings() -> None:
    written = PAGE.read_text()
    now = TABLE.sub(lambda _match: table(), written)
    if os.environ.get("WRITE_DOCS"):
        PAGE.write_text(now)
    assert PAGE.read_text() == now


def test_every_entry_of_the_params_is_explained() -> None:
    entries = finished_prefill(prefill(((1,),)), tp=1, pp=1, dcp=1)
    page = ROUTERS.read_text()
    missing = [name for name in entries if f"`{name}`" not in page]
    assert missing == []


def configurations() -> list[Any]:
    return [
        pytest.param(json.loads(found), id=f"{page.name}-{number}")
        for page in (PAGE, ROOT / "docs" / "deploy.md", ROOT / "README.md")
        for number, found in enumerate(CONFIG.findall(page.read_text()))
    ]


@pytest.mark.parametrize("config", configurations())
def test_configurations_that_are_shown_can_be_used(config: dict[str, Any]) -> None:
    assert config["kv_connector"] == "KvdConnector"
    assert config["kv_connector_module_path"] == "kvd.vllm"
    assert config["kv_role"] in ("kv_producer", "kv_consumer", "kv_both")
    read_settings(config.get("kv_connector_extra_config", {}))


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", PAGE, ROOT / "docs" / "architecture.md"], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert targets
    assert [target for target in targets if not (page.parent / target).exists()] == []
