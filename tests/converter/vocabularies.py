"""Small vocabularies in the formats that checkpoints bring, and strings that try them."""

import base64
import io
import itertools
import random
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = (
    "The limpet leaves its place on the rock at every tide and comes back to exactly that spot.",
    "a cat, the cats; there then their them. 1234 5678  two  spaces",
    "def tide(n): return n * 2  # and so on",
    "你好，世界。潮水退去，帽贝回到原处。",
    "Привет, мир! Прилив и отлив. Καλημέρα κόσμε.",
    "naïve café don't it's",
)
_FRAGMENTS = (
    *" ".join(CORPUS).split(" "),
    *(
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        "😀",
        "👩‍👩‍👧‍👦",
        "🏴󠁧󠁢󠁥󠁮󠁧󠁿",
        "漢字",
        "한국어",
        "zzzq",
        "é",
        "ﬁ",
        "1",
        "23",
        "456789",
        "'ll",
        "…",
    ),
)


def strings(count: int = 300, extra: tuple[str, ...] = ()) -> list[str]:
    """Random joins of words, scripts, numbers, emoji, white space and `extra`, always the same ones."""
    source = random.Random(7)
    fragments = _FRAGMENTS + extra * 12
    lengths = [source.randint(1, 9) for _ in range(count)]
    return ["".join(source.choice(fragments) + source.choice(("", "", " ")) for _ in range(n)) for n in lengths]


@cache
def sentencepiece_bytes(**changes: Any) -> bytes:
    """A BPE model with byte fallback, trained as Llama's was; ids 0 to 2 are <unk>, <s> and </s>."""
    model = io.BytesIO()
    options = {
        "vocab_size": 560,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "character_coverage": 0.99,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20), model_writer=model, **options | changes
    )
    return model.getvalue()


def write_sentencepiece_model(path: Path, **changes: Any) -> Path:
    path.write_bytes(sentencepiece_bytes(**changes))
    return path


def train_byte_level(special: tuple[str, ...]) -> Tokenizer:
    """As SmolLM2's tokenizer.json: single digits, then GPT-2's split, then bytes; special tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=560,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    return tokenizer


def write_tiktoken_model(path: Path) -> dict[bytes, int]:
    """A list of ranks in Llama 3's format, trained by joining the commonest pair; returns the ranks."""
    words = [[bytes([byte]) for byte in word.encode()] for text in CORPUS * 2 for word in (" " + text).split(" ")]
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < 400:
        pairs: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                pairs[pair] = pairs.get(pair, 0) + 1
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks.setdefault(left + right, len(ranks))
        for word in words:
            place = 0
            while place < len(word) - 1:
                if word[place] == left and word[place + 1] == right:
                    word[place : place + 2] = [left + right]
                place += 1
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    path.write_text("".join(lines), "utf-8")
    return ranks
