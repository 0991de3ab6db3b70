"""Metadata of every generation of NixlConnector, from plain fields and from the installed vLLM's own classes."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvctl.stock.bounded import StockGarbage
from kvctl.stock.nixl_metadata import GENERATIONS, decode
from tests.support.stock_listeners import FIRST_FIELDS, stock_factors, stock_metadata, stock_payload

ADDED = tuple(name for generation in reversed(GENERATIONS) for name in generation.adds)


def of_generation(number: int) -> dict[str, Any]:
    """The metadata with the fields that the connector's version of that number has."""
    added = [name for g in GENERATIONS if g.first <= number for name in g.adds]
    whole = stock_metadata()
    return {name: whole[name] for name in (*FIRST_FIELDS, *added)}


@pytest.mark.parametrize("number", range(3, 16))
def test_the_generation_follows_from_the_fields(number: int) -> None:
    worker = decode(stock_payload(of_generation(number), stock_factors()), "here")
    assert worker.generation.first <= number <= worker.generation.last
    assert (worker.metadata.engine_id, worker.metadata.block_size, worker.unread) == ("prefill", 16, ())
    assert (worker.metadata.dcp_size is None) == (number < 8)


def test_fields_of_a_newer_vllm_are_named_and_do_no_harm() -> None:
    worker = decode(stock_payload(stock_metadata(new_field=3), stock_factors()), "here")
    assert worker.unread == ("new_field",)


def test_another_start_is_another_incarnation() -> None:
    first, again, other = (
        decode(stock_payload(stock_metadata(agent_metadata=agent), stock_factors()), "here").incarnation
        for agent in (b"a", b"a", b"b")
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"block_size": 0}, r"block_size"),
        ({"num_blocks": "16"}, r"Expected `int`, got `str`.*num_blocks"),
        ({"engine_id": "x" * 513}, r"engine_id"),
        ({"block_lens": []}, r"0 lengths of blocks and 64 of kv_caches_base_addr"),
        ({"region_names": ["one"]}, r"64 lengths of blocks and 1 of region_names"),
        ({"block_lens": [-1] * 64}, r"block_lens"),
    ],
)
def test_what_cannot_be_is_named(wrong: dict[str, Any], names: str) -> None:
    with pytest.raises(StockGarbage, match=names) as caught:
        decode(stock_payload(stock_metadata(**wrong), stock_factors()), "nixl://here:5600")
    assert caught.value.code == "KVD-STOCK-GARBAGE"
    assert "nixl://here:5600" in caught.value.message


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", b"hello", msgspec.msgpack.encode([1, 2]), msgspec.msgpack.encode({"compatibility_hash": "x"}),
        msgspec.msgpack.encode({"compatibility_hash": "0" * 64, "agent_metadata_bytes": b"\xc1"}),
        msgspec.msgpack.encode({"compatibility_hash": "0" * 64, "agent_metadata_bytes": b"\x91" * 5000}),
        msgspec.msgpack.encode({"compatibility_hash": "0" * 64, "agent_metadata_bytes": b"\x81\x01\x02"}),
    ],
)  # fmt: skip
def test_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(StockGarbage, match="not with metadata of NixlConnector"):
        decode(payload, "here")


def test_a_patched_build_that_left_a_field_out_is_refused() -> None:
    torn = stock_metadata()
    del torn["block_strides"]
    with pytest.raises(StockGarbage, match=r"generation 14-15 .* without block_strides"):
        decode(stock_payload(torn, stock_factors()), "here")


def vllm_classes() -> dict[str, Any]:
    """The dataclasses of the installed vLLM's metadata.py, made from its source: importing vLLM takes half a minute."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    path = Path(found.origin).parent / "distributed/kv_transfer/kv_connector/v1/nixl/metadata.py"
    if not path.exists():
        pytest.skip(f"this vLLM has no {path.name}")
    wanted = ("NixlAgentMetadata", "NixlHandshakePayload")
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in wanted]
    names: dict[str, Any] = {
        "dataclass": dataclasses.dataclass,
        "field": dataclasses.field,
        "KVConnectorHandshakeMetadata": object,
    }
    exec(compile(tree, str(path), "exec"), names)  # noqa: S102 - the classes of the installed vLLM
    return names


def test_what_the_installed_vllm_packs_is_read_whole() -> None:
    classes = vllm_classes()
    agent = classes["NixlAgentMetadata"]
    known = {field.name for field in dataclasses.fields(agent)}
    given = {name: value for name, value in stock_metadata().items() if name in known}
    inner = msgspec.msgpack.encode(agent(**given))
    payload = classes["NixlHandshakePayload"](compatibility_hash="ab" * 32, agent_metadata_bytes=inner)
    worker = decode(msgspec.msgpack.encode(payload), "here")
    assert worker.unread == ()
    assert {name: getattr(worker.metadata, name) for name in given} == given
    assert known <= set(FIRST_FIELDS) | set(stock_metadata())
