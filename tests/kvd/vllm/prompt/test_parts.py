"""From a request to what its digest covers; requests of vLLM's own class where it is installed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.vllm.prompt.parts import Prompt, prompt_of
from tests.support.rigs.bench import KEY

vllm_request = pytest.importorskip("vllm.v1.request")
torch = pytest.importorskip("torch")

IDS = [11, 12, 13, 14, 15, 16]


def prompt(ids: list[int] | None = IDS, **more: Any) -> Prompt:
    from vllm.sampling_params import SamplingParams

    request = vllm_request.Request(
        request_id="r",
        prompt_token_ids=ids,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        **more,
    )
    return prompt_of(request)


def digest(made: Prompt, tokens: int = 6) -> str:
    return made.digest(KEY, tokens)


def lora(path: object, name: str = "poet", number: int = 1) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(path))


def image(content: str = "c0ffee", identifier: str = "", offset: int = 1) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier or content,
        mm_position=PlaceholderRange(offset=offset, length=3),
        mm_hash=content,
    )


def test_output_does_not_count_and_neither_do_preemptions() -> None:
    made = prompt()
    before = digest(made)
    request: Any = made.request
    request.append_output_token_ids([21, 22])
    request.num_preemptions += 1
    request.num_computed_tokens = 0
    assert digest(prompt_of(request)) == before


def test_the_first_tokens_of_a_longer_prompt_are_those_of_the_shorter() -> None:
    assert digest(prompt([*IDS, 17])) == digest(prompt())
    assert digest(prompt(), 5) == digest(prompt(IDS[:5]), 5)


def test_a_prompt_of_the_base_model_is_not_one_of_an_adapter(tmp_path: Any) -> None:
    for name in ("first", "second", "copy"):
        folder = tmp_path / name / "poet"
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text('{"r": 8}')
        (folder / "adapter_model.bin").write_bytes(b"second" if name == "second" else b"first")
    base, first = digest(prompt()), digest(prompt(lora_request=lora(tmp_path / "first" / "poet")))
    assert base != first
    assert first != digest(prompt(lora_request=lora(tmp_path / "second" / "poet"))), "its weights differ"
    again = lora(tmp_path / "copy" / "poet", name="dichter", number=7)
    assert first == digest(prompt(lora_request=again)), "numbers, names and folders are an engine's own"


def test_an_adapter_that_is_known_by_its_name_goes_by_that() -> None:
    one, other = lora("org/poet"), lora("org/novelist")
    assert digest(prompt(lora_request=one)) == digest(prompt(lora_request=lora("org/poet", number=5)))
    assert digest(prompt(lora_request=one)) != digest(prompt(lora_request=other))


def test_images_go_by_their_content_wherever_an_engine_keeps_them() -> None:
    plain = digest(prompt(mm_features=[image()]))
    assert plain != digest(prompt())
    assert plain != digest(prompt(mm_features=[image("other")]))
    assert plain != digest(prompt(mm_features=[image(offset=2)]))
    assert plain == digest(prompt(mm_features=[image(identifier="poet:c0ffee")])), "an engine's cache key"


def test_images_that_vllm_did_not_hash_go_by_what_the_processor_made_of_them() -> None:
    def counted(number: int, pixel: float, *, here: bool = True) -> Any:
        found = image(f"renderer0-mm-{number}-image-0")
        pixels = torch.full((2, 3), pixel, dtype=torch.bfloat16)
        found.data = {"pixel_values": SimpleNamespace(data=[pixels, 2])} if here else None
        return found

    cat = digest(prompt(mm_features=[counted(1, 0.5)]))
    assert cat != digest(prompt(mm_features=[counted(1, 0.25)])), "two processes count alike"
    assert cat == digest(prompt(mm_features=[counted(2, 0.5)]))
    unknown = [digest(prompt(mm_features=[counted(1, 0.5, here=False)])) for _ in range(2)]
    assert unknown[0] != unknown[1], "an item that is not here is like no other"


def test_an_adapter_is_what_the_engine_loaded_not_what_its_files_are_now(tmp_path: Any) -> None:
    def write(content: bytes) -> None:
        (tmp_path / "adapter_config.json").write_text('{"r": 8}')
        (tmp_path / "adapter_model.bin").write_bytes(content * 100_000)

    write(b"1")
    first = digest(prompt(lora_request=lora(tmp_path, number=901)))
    write(b"2")
    assert first == digest(prompt(lora_request=lora(tmp_path, number=901))), (
        "vLLM reads a number's files once"
    )
    anew = lora(tmp_path, number=901)
    anew.load_inplace = True
    assert first != digest(prompt(lora_request=anew))
    assert first != digest(prompt(lora_request=lora(tmp_path, number=902)))


def counted(pixels: Any, name: str = "renderer0-mm-5-image-0") -> Any:
    """An image as vLLM gives it where neither of its caches wants a hash: named by a count of its own."""
    from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem, MultiModalSharedField

    field = MultiModalSharedField(batch_size=1)
    item = None
    if pixels is not None:
        item = MultiModalKwargsItem(
            {
                "pixels": MultiModalFieldElem(data=pixels, field=field),
                "sizes": MultiModalFieldElem(data=[torch.tensor(3), torch.tensor([4])], field=field),
            }
        )
    return dataclasses.replace(image(name), data=item)


def test_images_that_engines_only_count_go_by_their_pixels() -> None:
    """The fifth image of the prefiller and the fifth of the decoder have one name, whatever they show."""
    pixels = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    one = digest(prompt(mm_features=[counted(pixels)]))
    assert one == digest(prompt(mm_features=[counted(pixels.clone(), "renderer3-mm-9-image-0")]))
    assert one != digest(prompt(mm_features=[counted(pixels + 1)]))
    assert one != digest(prompt(mm_features=[counted(pixels.float())]))
    assert one != digest(prompt(mm_features=[counted(pixels.reshape(4, 3))]))


def test_a_counted_image_without_its_pixels_is_equal_to_none() -> None:
    made = [digest(prompt(mm_features=[counted(None)])) for _ in range(2)]
    assert made[0] != made[1]


def test_an_image_beyond_the_tokens_in_question_does_not_count() -> None:
    assert digest(prompt(mm_features=[image(offset=6)])) == digest(prompt())


def test_a_salt_counts() -> None:
    assert len({digest(prompt()), digest(prompt(cache_salt="a")), digest(prompt(cache_salt="b"))}) == 3


def test_embeddings_count_by_their_bytes() -> None:
    rows = torch.arange(24, dtype=torch.bfloat16).reshape(6, 4)
    other = rows.clone()
    other[5, 3] = -1.0
    one, changed = prompt(None, prompt_embeds=rows), prompt(None, prompt_embeds=other)
    assert digest(one) == digest(prompt(None, prompt_embeds=rows.clone()))
    assert digest(one) != digest(changed)
    assert digest(one, 5) == digest(changed, 5)
    strided = torch.arange(48, dtype=torch.bfloat16).reshape(6, 8)[:, ::2]
    assert digest(prompt(None, prompt_embeds=strided)) == digest(
        prompt(None, prompt_embeds=strided.contiguous())
    )


def test_where_embeddings_stand_between_tokens_both_count() -> None:
    rows = torch.ones(6, 4)
    mask = [True, True, False, False, True, True]
    one = prompt(IDS, prompt_embeds=rows, prompt_is_token_ids=mask)
    assert digest(one) != digest(prompt([99, *IDS[1:]], prompt_embeds=rows, prompt_is_token_ids=mask))
    assert digest(one) != digest(prompt(IDS, prompt_embeds=rows * 2, prompt_is_token_ids=mask))
    assert digest(one) != digest(
        prompt(IDS, prompt_embeds=rows, prompt_is_token_ids=[True, False, True, False, True, True])
    )


def test_a_build_without_all_that_has_digests_of_tokens() -> None:
    bare = SimpleNamespace(prompt_token_ids=IDS, num_prompt_tokens=6, _all_token_ids=[*IDS, 21])
    assert digest(prompt_of(bare)) == digest(prompt())
