"""Stand-ins for what surrounds the connector: tensors on numpy, vLLM's specs by name, a scripted session."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from kvd.client.errors import ClientError
from kvd.client.session import SessionState
from kvd.geometry.rank import Rank
from kvd.vllm.memory.groups import group_facts
from kvd.vllm.memory.tensors import Place
from kvd.vllm.prompt.parts import Prompt, prompt_of
from kvd.vllm.prompt.seal import sealed
from kvd.wire.frame import Message, decode, encode
from kvd.wire.handshake import PeerReady
from kvd.wire.identity import EngineCard, EngineFacts, WorkerCard
from kvd.worker.cause import Cause
from kvd.worker.orders import LoadOrder
from kvd.worker.remote import RemotePrefill

T = TypeVar("T")
GENERATION = "gen-1"
KEY = bytes(range(32))
"""The prefiller's, for digests of prompts."""


def eventually(look: Callable[[], T], seconds: float = 10.0) -> T:
    """What ``look`` gives as soon as it is true."""
    until = time.monotonic() + seconds
    while not (value := look()):
        assert time.monotonic() < until, f"still {value!r} after {seconds:g} s"
        threading.Event().wait(0.001)
    return value


@dataclass(frozen=True)
class Dtype:
    """A torch dtype, as far as it is looked at."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


BF16, F32, I8 = Dtype("bfloat16", 2), Dtype("float32", 4), Dtype("int8", 1)
NUMPY = {BF16: np.uint16, F32: np.float32, I8: np.int8}


class Tensor:
    """A torch tensor, as far as it is looked at: a strided view of a shared buffer."""

    def __init__(
        self,
        buffer: np.ndarray[Any, Any],
        dtype: Dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        at: int = 0,
    ) -> None:
        """``strides`` in elements, ``at`` in bytes from the buffer's start."""
        self.buffer, self.dtype, self.shape, self._strides, self._at = buffer, dtype, shape, strides, at
        self.device = SimpleNamespace(type="cpu", index=None)

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def data_ptr(self) -> int:
        return int(self.buffer.ctypes.data) + self._at

    def element_size(self) -> int:
        return self.dtype.itemsize

    def untyped_storage(self) -> SimpleNamespace:
        return SimpleNamespace(
            data_ptr=lambda: int(self.buffer.ctypes.data), nbytes=lambda: int(self.buffer.nbytes)
        )

    def unsqueeze(self, dim: int) -> Tensor:
        shape, strides = list(self.shape), list(self._strides)
        shape.insert(dim, 1)
        strides.insert(dim, self.shape[dim] * self._strides[dim])
        return Tensor(self.buffer, self.dtype, tuple(shape), tuple(strides), self._at)

    def view(self, dtype: Dtype) -> Tensor:
        return Tensor(self.buffer, dtype, self.shape, self._strides, self._at)  # wrong but for `as_strided`

    def as_strided(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        return Tensor(self.buffer, self.dtype, shape, strides, self._at)


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor."""
    return tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))


class AttentionSpec:
    """vLLM's specs are told by the names of their classes."""

    def __init__(self, **facts: Any) -> None:
        for name, value in {"dcp_sharded": True, **facts}.items():
            setattr(self, name, value)


class FullAttentionSpec(AttentionSpec):
    pass


class SinkFullAttentionSpec(FullAttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(AttentionSpec):
    pass


class ChunkedLocalAttentionSpec(AttentionSpec):
    pass


class MambaSpec(AttentionSpec):
    pass


class CrossAttentionSpec(AttentionSpec):
    pass


class CircularBufferSpec(AttentionSpec):
    pass


class HiSparseHotSpec:
    pass


def full(block_size: int = 4, heads: int = 2, size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=size, head_size_v=size)


def gdn(block_size: int = 4, heads: int = 2) -> MambaSpec:
    """Conv of 3 taps x (q 4 + k 4 + v heads*2) channels bf16, ssm (heads, 2, 2) float32, on one rank."""
    return MambaSpec(
        block_size=block_size,
        mamba_type=SimpleNamespace(name="GDN_ATTN"),
        shapes=((3, 8 + 2 * heads), (heads, 2, 2)),
        dtypes=(BF16, F32),
        num_speculative_blocks=0,
    )


def cache_config(num_blocks: int, *groups: tuple[Any, tuple[str, ...]]) -> SimpleNamespace:
    """A KVCacheConfig of (spec, layer names)."""
    return SimpleNamespace(
        num_blocks=num_blocks,
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec, layer_names=list(names)) for spec, names in groups
        ],
    )


def place(tp_rank: int = 0, tp: int = 1, kv_heads: int = 2, **more: Any) -> Place:
    return Place(rank=Rank(tp=tp_rank), tp=tp, dcp=1, kv_heads=kv_heads, **more)


def facts(engine_id: str, groups: int = 1) -> EngineFacts:
    return EngineFacts(engine_id=engine_id, model="m", groups=groups)


def ready(card: WorkerCard, generation: str = GENERATION, local: str = "d") -> PeerReady:
    """What kvd answers about the engine of one worker."""
    return PeerReady(
        local_engine=local,
        peer=EngineCard(engine=card.engine, generation=generation, workers=(card,), digest_key=KEY),
        seconds=0.25,
    )


def prompt(token_ids: Iterable[int] = range(8), **more: Any) -> Prompt:
    """The prompt of a request with these tokens; ``more`` is what only some requests have."""
    ids = list(token_ids)
    return prompt_of(
        SimpleNamespace(
            **{"prompt_token_ids": ids, "num_prompt_tokens": len(ids), "_all_token_ids": ids, **more}
        )
    )


def prefill(
    blocks: tuple[tuple[int, ...], ...],
    *,
    request_id: str = "p-1",
    tokens: int = 8,
    first: tuple[int, ...] | None = None,
    generation: str = GENERATION,
    engine_id: str = "p",
    lease_opened: float | None = None,
    digest: str | None = None,
) -> RemotePrefill:
    """Under its seal. Without a ``digest`` it is of a prompt of the tokens 0, 1, 2, ..."""
    made = RemotePrefill(
        engine_id=engine_id,
        request_id=request_id,
        generation=generation,
        host="h",
        port=7,
        tokens=tokens,
        blocks=blocks,
        first_blocks=first or tuple(0 for _ in blocks),
        lease_seconds=30.0,
        lease_opened=time.time() if lease_opened is None else lease_opened,
        digest=prompt(range(tokens)).digest(KEY, tokens) if digest is None else digest,
    )
    try:
        return sealed(KEY, made)
    except OverflowError:  # a number that no prefiller has, for a test of what a worker does with it
        return made


def why(text: str) -> Cause:
    """A cause of some code."""
    return Cause(text, "TRANSFER_FAILED")


def order(
    remote: RemotePrefill,
    *local: tuple[int, ...],
    request_id: str = "d-1",
    seconds: float = 10.0,
    refused: str = "",
) -> LoadOrder:
    return LoadOrder(
        request_id=request_id,
        prefill=remote,
        groups={g: (0, ids) for g, ids in enumerate(local)},
        tokens=remote.tokens,
        seconds=seconds,
        claimed=time.monotonic(),
        refused=why(refused) if refused else None,
    )


@dataclass
class Asked:
    """A call or a delivery, and its future."""

    message: Any
    future: Future[Message]
    key: str = ""
    after: float = 0.0

    def answer(self, message: Message) -> None:
        self.future.set_result(message)

    def fail(self, error: ClientError) -> None:
        self.future.set_exception(error)


@dataclass
class Script:
    """A session with a kvd that says what the test tells it to say."""

    state: SessionState = field(
        default_factory=lambda: SessionState(
            connected=True, kvd_generation="k-1", engine_generation=GENERATION, host="me", port=9
        )
    )
    calls: list[Asked] = field(default_factory=list)
    delivered: list[Asked] = field(default_factory=list)
    closed: bool = False
    card: Callable[[], Any] = lambda: None
    push: Callable[[Message], Message | None] = lambda _message: None

    def open(self, card: Callable[[], Any], push: Callable[[Message], Message | None]) -> Script:
        self.card, self.push = card, push
        return self

    def call(self, message: Message, timeout: float) -> Future[Message]:  # noqa: ARG002 - as the real one
        self.calls.append(Asked(_over_the_wire(message), Future()))
        return self.calls[-1].future

    def deliver(
        self,
        key: str,
        message: Message | Callable[[], Message],
        keep_seconds: float = 600.0,  # noqa: ARG002 - as the real one
        *,
        after: float = 0.0,
    ) -> Future[Message]:
        fresh = message() if callable(message) else message
        self.delivered.append(Asked(_over_the_wire(fresh), Future(), key, after))
        return self.delivered[-1].future

    def close(self, timeout: float = 2.0) -> None:  # noqa: ARG002 - as the real one
        self.closed = True

    def asked(self, kind: type[T]) -> list[Asked]:
        """Calls of one kind, in order."""
        return [asked for asked in self.calls if isinstance(asked.message, kind)]

    def told(self, kind: type[T]) -> list[T]:
        """Delivered messages of one kind, in order."""
        return [asked.message for asked in self.delivered if isinstance(asked.message, kind)]


def _over_the_wire(message: Message) -> Message:
    """The message as kvd would read it. One that cannot be sent is an error here, as it is in a real session."""
    return decode(encode(message))[0]


def groups_of(config: SimpleNamespace) -> Any:
    return group_facts(config)
