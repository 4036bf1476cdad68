"""The committed greedy references of SmolLM2; reading them needs neither torch nor transformers."""

from pathlib import Path

import msgspec

from tests.aids.ids_equal import Reference

SMOLLM2_REFERENCE = Path(__file__).parents[1] / "data" / "smollm2_reference.json"


class ReferencePrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and its greedy continuation. `text` is a raw prompt, or the user's message of a templated chat."""

    name: str
    text: str
    is_chat: bool
    prompt: list[int]
    reference: Reference


class ReferenceFile(msgspec.Struct, frozen=True, kw_only=True):
    """What the references were made with, and their prompts."""

    model: str
    transformers: str
    torch: str
    prompts: list[ReferencePrompt]


def smollm2_references() -> list[ReferencePrompt]:
    """The references, short and long prompts, chats and raw texts (tests/data/make_smollm2_reference.py makes them)."""
    return msgspec.json.decode(SMOLLM2_REFERENCE.read_bytes(), type=ReferenceFile).prompts
