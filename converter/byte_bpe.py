"""Byte-level BPE tokenizers from a vocabulary, its merges and the name of the pre-tokenizer they were learned with."""

from collections.abc import Mapping, Sequence

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

from limpet.converter.deepseek_split import deepseek_split
from limpet.converter.errors import ConversionError
from limpet.converter.library_faults import told_as

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The names are llama.cpp's values of `tokenizer.ggml.pre`; each stands for the pre-tokenizer of the models' own files.
_REGEX_SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "dbrx", "pixtral"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
}
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b")
_PLAIN = ("gpt-2", "olmo", "mpt")
_DEEPSEEK = "deepseek-llm"
LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe")


def pre_tokenizer(name: str) -> PreTokenizer:
    """The split that the merges were learned with; raises ConversionError for a name it does not know."""
    if name in _REGEX_SPLITS:
        split = Split(Regex(_REGEX_SPLITS[name]), behavior="isolated")
        return pre_tokenizers.Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    if name in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if name in _PLAIN:
        return ByteLevel(add_prefix_space=False)
    if name == _DEEPSEEK:
        return deepseek_split()
    known = ", ".join(sorted((_DEEPSEEK, *_REGEX_SPLITS, *_SINGLE_DIGITS, *_PLAIN)))
    raise ConversionError(f"The tokenizer's pre-tokenizer {name!r} is not supported; known are {known}.")


def build_byte_bpe(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], pre: str) -> Tokenizer:
    """A tokenizer without special tokens. Llama 3 takes a whole word of the vocabulary before any merge.

    Raises ConversionError for an unknown pre-tokenizer, or a merge of tokens that the vocabulary lacks.
    """
    with told_as("The tokenizer's merges do not fit its vocabulary"):
        model = BPE(vocab=dict(vocabulary), merges=list(merges), ignore_merges=pre in LLAMA3_NAMES)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
