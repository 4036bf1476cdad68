"""The chain checkpoint's tokenizer: byte-level BPE with a token for each piece of the scripts and each script's key.

The pieces have no merges, so no prompt is ever encoded to one of them; the keys have, so that a prompt whose last word
is a key ends with that key's token.
"""

from functools import cache

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from tests.aids.chain_scripts import SCRIPTS, ChainScript

BOS, EOS, SYSTEM, USER, ASSISTANT = "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BOS, EOS, SYSTEM, USER, ASSISTANT)
BOS_ID, EOS_ID = 0, 1

# Append-only, and the generation prompt is empty: the last token before the answer is the user's last one.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- message.content + eos_token -}}
{%- elif message.role == 'system' -%}
{{- '<|system|>' + message.content -}}
{%- else -%}
{{- '<|user|>' + message.content -}}
{%- endif -%}
{%- endfor -%}
"""


@cache
def byte_characters() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in visible}
    for byte in range(256):
        table.setdefault(byte, chr(256 + len(table) - len(visible)))
    return table


def _spell(data: bytes) -> str:
    return "".join(byte_characters()[byte] for byte in data)


def _key_merges() -> list[tuple[str, str]]:
    """The merges that build each key from left to right."""
    merges = {(script.key[:end], script.key[end]) for script in SCRIPTS for end in range(1, len(script.key))}
    return sorted(merges, key=lambda merge: (len(merge[0]), merge))


@cache
def vocabulary() -> dict[str, int]:
    """Token to id: special tokens, bytes, what the keys' merges make, pieces of the scripts."""
    merged = ["".join(merge) for merge in _key_merges()]
    pieces = [_spell(piece) for script in SCRIPTS for piece in script.pieces if len(piece) > 1]
    tokens = [*SPECIAL_TOKENS, *(byte_characters()[byte] for byte in range(256)), *merged, *pieces]
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise ValueError(f"Tokens that occur twice: {sorted(token for token in ids if tokens.count(token) > 1)}.")
    return ids


def piece_ids(script: ChainScript) -> list[int]:
    return [vocabulary()[_spell(piece)] for piece in script.pieces]


def key_id(script: ChainScript) -> int:
    return vocabulary()[script.key]


def build_tokenizer() -> Tokenizer:
    """The tokenizer; it puts BOS before a text unless told to add no special tokens."""
    tokenizer = Tokenizer(BPE(vocab=vocabulary(), merges=_key_merges()))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return tokenizer
