"""Small tokenizers of the kinds that checkpoints bring, trained in a moment on a few lines of many scripts."""

import json
from functools import cache

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from limpet.backend.checkpoint import TokenizerConfig
from limpet.backend.tokenizer import Tokenizer

CORPUS = [
    "The limpet leaves its place on the rock at every tide and comes back to exactly that spot.",
    "a cat, the cats; there then their them. 1234 5678  two  spaces\n\nnew\nlines\tand tabs",
    "def tide(n):\n    return n * 2  # and so on\n",
    "你好，世界。潮水退去，帽贝回到原处。",
    "Привет, мир! Прилив и отлив. Καλημέρα κόσμε.",
    "😀😃 👩‍👩‍👧‍👦 🏴󠁧󠁢󠁥󠁮󠁧󠁿 naïve café",
]
BOS, EOS, TOOL = "<|begin|>", "<|end|>", "<tool>"
SPECIAL = [BOS, EOS]


@cache
def byte_level() -> Tokenizer:
    """As Llama 3, Qwen, SmolLM2 and DeepSeek: tokens are strings of bytes."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        show_progress=False,
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_tokens([AddedToken(TOOL, normalized=False), AddedToken("<naïve>", normalized=False)])
    return Tokenizer(backend, TokenizerConfig(bos_token=BOS, eos_token=EOS))


@cache
def sentencepiece(*, strips: bool = True, adds_bos: bool = True) -> Tokenizer:
    """As Llama 2: words begin with a low line, unknown characters are spelled in byte tokens."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*"), "isolated")
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(show_progress=False, vocab_size=500, special_tokens=["<unk>", *SPECIAL, *byte_tokens])
    backend.train_from_iterator(CORPUS[:2] * 3, trainer)
    # Trained as special tokens to get their places; in a real vocabulary the bytes are ordinary ones.
    description = json.loads(backend.to_str())
    description["added_tokens"] = [t for t in description["added_tokens"] if t["content"] not in byte_tokens]
    prepend = [{"type": "Prepend", "prepend": "▁"}] if strips else []
    description["normalizer"] = {"type": "Sequence", "normalizers": [*prepend, description["normalizer"]]}
    description["pre_tokenizer"] = None
    backend = Backend.from_str(json.dumps(description))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
        )
    return Tokenizer(backend, TokenizerConfig(bos_token=BOS, eos_token=EOS))


@cache
def metaspace() -> Tokenizer:
    """A decoder of no special kind: words begin with a low line, no bytes."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(show_progress=False, vocab_size=400, special_tokens=["<unk>", *SPECIAL])
    backend.train_from_iterator(CORPUS * 3, trainer)
    return Tokenizer(backend, TokenizerConfig(bos_token=BOS, eos_token=EOS))
