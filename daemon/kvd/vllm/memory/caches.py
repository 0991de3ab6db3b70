"""The KV tensors of every vLLM in the one form that `tensors` reads: four dimensions, a state's page whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvd.geometry.errors import UnknownShape


def in_one_form(kv_caches: Mapping[str, Any], byte: Any) -> dict[str, Any]:
    """What vLLM hands to register_kv_caches, with views of other shape where its version's are not today's.

    Before 0.29 latents are ``(block, token, content)``, without the one head. In 0.26 a recurrent layer is a list of
    its states, each a strided view of the same pages. Here it is one ``(block, 1, 1, bytes)`` over all of them.
    ``byte`` is the dtype of one byte. Nothing is copied. Raises `UnknownShape` where the states of a layer do not stand
    one after the other.
    """
    return {
        name: _page(name, cache, byte) if isinstance(cache, list | tuple) else _with_heads(cache)
        for name, cache in kv_caches.items()
    }


def by_layer(whole: Any, attention: Any, tensors: Sequence[Any]) -> dict[str, Any]:
    """The layers of one tensor over all of them, as vLLM 0.26 to 0.28 make it where blocks are outermost.

    ``attention`` is vLLM's attention backend, which says in which order the dimensions of ``whole`` stand: layers first
    in its own view, anywhere in memory. ``tensors`` are vLLM's, one for each layer of that view, with the names that
    share it. Nothing is copied.
    """
    stands = list(attention.get_kv_cache_stride_order(include_num_layers_dimension=True))
    layers = whole.permute(*(stands.index(dim) for dim in range(len(stands))))
    return {name: layers[at] for at, tensor in enumerate(tensors) for name in tensor.shared_by}


def _with_heads(tensor: Any) -> Any:
    return tensor.unsqueeze(1) if len(tensor.shape) == 3 else tensor


def _page(layer: str, states: Sequence[Any], byte: Any) -> Any:
    first, at = states[0], states[0].data_ptr()
    blocks, stride = first.shape[0], first.stride()[0] * first.element_size()
    for state in states:
        step = state.stride()[0] * state.element_size()
        if state.data_ptr() != at or state.shape[0] != blocks or step != stride:
            raise UnknownShape(
                f"{layer}: its states stand at {[s.data_ptr() for s in states]}, {state.shape[0]} blocks each {step}"
                f" bytes; known is one after the other, {blocks} blocks each {stride} bytes"
            )
        at += _dense(layer, state)
    content = at - first.data_ptr()
    return first.view(byte).as_strided((blocks, 1, 1, content), (stride, content, content, 1))


def _dense(layer: str, state: Any) -> int:
    """The bytes of one block's state, which has no gaps."""
    size = state.element_size()
    for extent, stride in zip(reversed(state.shape[1:]), reversed(state.stride()[1:]), strict=True):
        if stride * state.element_size() != size and extent > 1:
            raise UnknownShape(
                f"{layer}: a state of shape {tuple(state.shape)}, strides {state.stride()}, has gaps"
            )
        size *= extent
    return int(size)
