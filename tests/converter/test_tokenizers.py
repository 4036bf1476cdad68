"""Tokenizers of every source encode as their reference does, and a raw prompt gets BOS once."""

import importlib
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import regex
import sentencepiece
from tokenizers import AddedToken, Tokenizer, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.utils import sentencepiece_model_pb2_new

from limpet.backend.checkpoint import CheckpointDir
from limpet.backend.tokenizer import Tokenizer as ServedTokenizer
from limpet.converter.byte_bpe import build_byte_bpe, pre_tokenizer
from limpet.converter.cli import main
from limpet.converter.errors import ConversionError
from limpet.converter.sentencepiece_model import read_sentencepiece_model
from limpet.converter.sentencepiece_vocab import build_sentencepiece
from limpet.converter.tiktoken_vocab import build_llama3
from tests.aids.tiny import write_tiny
from tests.converter.checkpoints import run_convert, write_gguf
from tests.converter.families import build, write_folder, write_meta_folder
from tests.converter.vocabularies import (
    sentencepiece_bytes,
    strings,
    train_byte_level,
    write_sentencepiece_model,
    write_tiktoken_model,
)

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def smollm_like(*, adds_bos: bool) -> Tokenizer:
    tokenizer = train_byte_level(SPECIAL)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
        )
    return tokenizer


def write_folder_with(folder: Path, tokenizer: Tokenizer, **settings: object) -> None:
    write_folder(folder, build("meta"))
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(content | settings), "utf-8")


def encode(checkpoint: CheckpointDir, text: str) -> list[int]:
    """A raw prompt, as the front end encodes it."""
    return ServedTokenizer.load(checkpoint).encode_prompt(text)


def assert_all_equal(found: Sequence[list[int]], expected: Sequence[list[int]], texts: Sequence[str]) -> None:
    assert [text for text, one, other in zip(texts, found, expected, strict=True) if one != other] == []


@pytest.mark.parametrize("adds_bos", [False, True])
def test_tokenizer_json_encodes_as_transformers_does(tmp_path: Path, adds_bos: bool) -> None:
    write_folder_with(tmp_path / "source", smollm_like(adds_bos=adds_bos))
    served = ServedTokenizer.load(run_convert(tmp_path / "source", tmp_path))
    reference = AutoTokenizer.from_pretrained(tmp_path / "source")
    texts = strings(extra=(*SPECIAL, "<think>"))
    ids = [served.backend.encode(text).ids for text in texts]
    assert_all_equal(ids, [reference(text)["input_ids"] for text in texts], texts)
    assert [served.decode(i) for i in ids] == [reference.decode(i, skip_special_tokens=True) for i in ids]


def test_gguf_metadata_encodes_as_the_tokenizer_it_was_made_from(tmp_path: Path) -> None:
    tokenizer = smollm_like(adds_bos=False)
    write_gguf(tmp_path / "source.gguf", build("meta"), tokenizer=tokenizer)
    served = ServedTokenizer.load(run_convert(tmp_path / "source.gguf", tmp_path))
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    texts = strings(extra=(*SPECIAL, "<think>"))
    assert_all_equal([served.encode_prompt(text) for text in texts], [reference(t)["input_ids"] for t in texts], texts)


SENTENCEPIECE_KINDS: dict[str, dict[str, Any]] = {
    "Llama's": {},
    "without prefix": {"add_dummy_prefix": False},
    "one space for many": {"remove_extra_whitespaces": True},  # OpenLLaMA's
    "own words": {"user_defined_symbols": "<tool>,<tool>s,the"},
}


@pytest.mark.parametrize("kind", SENTENCEPIECE_KINDS)
def test_sentencepiece_model_encodes_as_sentencepiece_does(tmp_path: Path, kind: str) -> None:
    changes = SENTENCEPIECE_KINDS[kind]
    model = read_sentencepiece_model(write_sentencepiece_model(tmp_path / "tokenizer.model", **changes))
    tokenizer = build_sentencepiece(model.pieces, model.spaces)
    reference = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_bytes(**changes))
    texts = strings(extra=("<tool>", "<tool>s"))
    found = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert_all_equal(found, [reference.encode(text) for text in texts], texts)
    decoded = [tokenizer.decode(ids, skip_special_tokens=True) for ids in found]
    assert decoded == [reference.decode(ids) for ids in found]


@pytest.mark.parametrize("source", ["hf", "meta", "gguf"])
def test_every_source_with_a_sentencepiece_vocabulary_encodes_as_transformers_does(
    tmp_path: Path, source: str, sentencepiece_in_transformers: None
) -> None:
    model = write_sentencepiece_model(tmp_path / "tokenizer.model")
    _write_folder_with_sentencepiece(tmp_path / "hf", model, add_bos_token=True)
    if source == "meta":
        write_meta_folder(tmp_path / "meta", build("meta"), model, 1)
    elif source == "gguf":
        write_gguf(tmp_path / "gguf.gguf", build("meta"), sentencepiece=read_sentencepiece_model(model).pieces)
    checkpoint = run_convert(tmp_path / ("gguf.gguf" if source == "gguf" else source), tmp_path / "out")
    served = ServedTokenizer.load(checkpoint)
    reference = AutoTokenizer.from_pretrained(tmp_path / "hf")
    texts = strings(extra=("<s>", "</s>", "<unk>"))
    assert_all_equal(
        [served.encode_prompt(t) for t in texts], [one_bos(reference(t)["input_ids"]) for t in texts], texts
    )
    assert served.encode_prompt("<s>the tide")[:2].count(1) == 1
    assert set(checkpoint.model_config().eos_token_ids) >= {2}


def test_space_prefix_at_the_beginning_only_where_the_settings_say_so(
    tmp_path: Path, sentencepiece_in_transformers: None
) -> None:
    model = write_sentencepiece_model(tmp_path / "tokenizer.model")
    _write_folder_with_sentencepiece(tmp_path / "hf", model, add_bos_token=True, legacy=False)
    served = ServedTokenizer.load(run_convert(tmp_path / "hf", tmp_path / "out"))
    reference = AutoTokenizer.from_pretrained(tmp_path / "hf")
    texts = strings(extra=("<s>", "</s>"))
    assert_all_equal(
        [served.encode_prompt(t) for t in texts], [one_bos(reference(t)["input_ids"]) for t in texts], texts
    )


@pytest.fixture
def sentencepiece_in_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads the file by its own classes: sentencepiece's want a protobuf that this environment has not."""
    reader = importlib.import_module("transformers.convert_slow_tokenizer")
    monkeypatch.setattr(reader, "import_protobuf", lambda: sentencepiece_model_pb2_new)


def one_bos(ids: list[int]) -> list[int]:
    """transformers puts a BOS before a text that begins with one already."""
    return ids[1:] if ids[:2] == [1, 1] else ids


def _write_folder_with_sentencepiece(folder: Path, model: Path, **settings: object) -> None:
    write_folder(folder, build("meta"))
    (folder / "tokenizer.json").unlink()
    shutil.copyfile(model, folder / "tokenizer.model")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def test_tiktoken_ranks_encode_as_joining_by_rank_does(tmp_path: Path) -> None:
    ranks = write_tiktoken_model(tmp_path / "tokenizer.model")

    def join_by_rank(word: bytes) -> list[int]:
        parts = [bytes([byte]) for byte in word]
        while True:
            pairs = [left + right for left, right in itertools.pairwise(parts)]
            joins = [(ranks[pair], place) for place, pair in enumerate(pairs) if pair in ranks]
            if not joins:
                return [ranks[part] for part in parts]
            place = min(joins)[1]
            parts[place : place + 2] = [parts[place] + parts[place + 1]]

    texts = strings()
    tokenizer = build_llama3(tmp_path / "tokenizer.model")
    expected = [
        [i for word in regex.findall(LLAMA3_SPLIT, text) for i in join_by_rank(word.encode())] for text in texts
    ]
    assert_all_equal([tokenizer.encode(text).ids for text in texts], expected, texts)
    assert tokenizer.token_to_id("<|begin_of_text|>") == len(ranks)
    assert tokenizer.token_to_id("<|eot_id|>") == len(ranks) + 9
    assert tokenizer.token_to_id("<|reserved_special_token_247|>") == len(ranks) + 255


def test_meta_folder_of_llama3_stops_at_the_end_of_a_turn(tmp_path: Path) -> None:
    ranks = write_tiktoken_model(tmp_path / "tokenizer.model")
    write_meta_folder(
        tmp_path / "source", build("llama-3-meta"), tmp_path / "tokenizer.model", 2, embedding_by_rows=True
    )
    checkpoint = run_convert(tmp_path / "source", tmp_path / "out", "--chat-template", "llama3")
    assert set(checkpoint.model_config().eos_token_ids) == {len(ranks) + 1, len(ranks) + 8, len(ranks) + 9}
    assert encode(checkpoint, "tide")[0] == len(ranks)


@pytest.mark.parametrize(("stated", "expected"), [(True, True), (False, False), (None, True)])
def test_add_bos_token_of_the_settings_decides_over_the_tokenizer(
    tmp_path: Path, stated: bool | None, expected: bool
) -> None:
    write_folder_with(tmp_path / "source", smollm_like(adds_bos=True), add_bos_token=stated)
    checkpoint = run_convert(tmp_path / "source", tmp_path)
    assert checkpoint.tokenizer_config().add_bos == expected
    assert (encode(checkpoint, "tide")[0] == 0) == expected


def test_tokenizer_without_bos_gets_none_from_the_configuration(tmp_path: Path) -> None:
    """As Qwen2's: config.json has a bos_token_id, its tokenizer has no such token."""
    write_folder_with(tmp_path / "source", smollm_like(adds_bos=False), bos_token=None)
    assert run_convert(tmp_path / "source", tmp_path).tokenizer_config().bos_token is None


def test_tokenizer_without_settings_takes_bos_from_the_configuration(tmp_path: Path) -> None:
    write_folder_with(tmp_path / "source", smollm_like(adds_bos=True))
    (tmp_path / "source/tokenizer_config.json").unlink()
    settings = run_convert(tmp_path / "source", tmp_path).tokenizer_config()
    assert (settings.bos_token, settings.add_bos) == ("<|im_start|>", True)


def test_tokens_declared_beside_tokenizer_json_are_kept_whole(tmp_path: Path) -> None:
    tokenizer = smollm_like(adds_bos=False)
    size = tokenizer.get_vocab_size()
    entry = {"content": "<|tool|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    write_folder_with(tmp_path / "source", tokenizer, added_tokens_decoder={str(size): entry})
    assert encode(run_convert(tmp_path / "source", tmp_path), "a<|tool|>")[-1] == size


def test_declared_token_takes_the_place_of_an_unused_sentencepiece_piece(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", build("meta"))
    (tmp_path / "source/tokenizer.json").unlink()
    write_sentencepiece_model(tmp_path / "source/tokenizer.model")
    declared = {
        "559": {"content": "<|im_end|>", "special": True},
        "560": {"content": "<|im_start|>", "special": True},
        "1": {"content": "<s>", "special": True},
    }
    settings = {"added_tokens_decoder": declared, "eos_token": "<|im_end|>"}
    (tmp_path / "source/tokenizer_config.json").write_text(json.dumps(settings))
    checkpoint = run_convert(tmp_path / "source", tmp_path)
    assert encode(checkpoint, "tide<|im_end|><|im_start|>")[-2:] == [559, 560]
    assert 559 in checkpoint.model_config().eos_token_ids


def test_limits_of_the_training_run_are_dropped(tmp_path: Path) -> None:
    tokenizer = smollm_like(adds_bos=False)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    write_folder_with(tmp_path / "source", tokenizer)
    assert 4 < len(encode(run_convert(tmp_path / "source", tmp_path), "The limpet leaves its place")) < 64


def test_embedding_with_more_rows_than_the_tokenizer_has_ids_converts(tmp_path: Path) -> None:
    write_tiny(tmp_path / "source")
    checkpoint = run_convert(tmp_path / "source", tmp_path)
    served = ServedTokenizer.load(checkpoint)
    assert served.vocab_size < checkpoint.model_config().vocab_size
    assert served.decode([checkpoint.model_config().vocab_size - 1]) == ""


def test_added_token_with_another_id_than_declared_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"content": "<|tool|>", "special": True}
    write_folder_with(tmp_path / "source", smollm_like(adds_bos=False), added_tokens_decoder={"590": entry})
    assert main([str(tmp_path / "source"), "--dst", str(tmp_path)]) == 1
    assert "id 442, its file says 590" in capsys.readouterr().err


@pytest.mark.parametrize("bos", ["<|begin of text|>", "bos:1", "$A", "bos", " "])
def test_bos_may_be_spelled_as_it_likes(tmp_path: Path, bos: str) -> None:
    tokenizer = train_byte_level(SPECIAL)
    tokenizer.add_special_tokens([bos])
    write_folder_with(tmp_path / "source", tokenizer, bos_token=bos, add_bos_token=True)
    checkpoint = run_convert(tmp_path / "source", tmp_path)
    ids = encode(checkpoint, "tide")
    assert ids == [tokenizer.token_to_id(bos), *tokenizer.encode("tide").ids]
    assert ServedTokenizer.load(checkpoint).encode_prompt("tide") == ids


def test_declared_name_of_a_sentencepiece_bos_is_the_one_that_counts(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", build("meta"))
    (tmp_path / "source/tokenizer.json").unlink()
    write_sentencepiece_model(tmp_path / "source/tokenizer.model")
    settings = {"added_tokens_decoder": {"1": {"content": "<|begin|>", "special": True}}}
    (tmp_path / "source/tokenizer_config.json").write_text(json.dumps(settings))
    checkpoint = run_convert(tmp_path / "source", tmp_path)
    assert checkpoint.tokenizer_config().bos_token == "<|begin|>"
    assert encode(checkpoint, "tide")[0] == 1


def _without_unknown() -> Tokenizer:
    return Tokenizer(models.WordLevel({"<s>": 0}, unk_token="<unk>"))


def _with_template_of_an_unknown_token() -> Tokenizer:
    content = json.loads(smollm_like(adds_bos=True).to_str())
    content["post_processor"]["special_tokens"] = {}
    return Tokenizer.from_str(json.dumps(content))


@pytest.mark.parametrize("build_tokenizer", [_without_unknown, _with_template_of_an_unknown_token])
def test_tokenizer_that_fails_only_in_use_is_refused(
    tmp_path: Path, build_tokenizer: Callable[[], Tokenizer], capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder_with(tmp_path / "source", build_tokenizer())
    assert main([str(tmp_path / "source"), "--dst", str(tmp_path)]) == 1
    assert "The tokenizer fails on plain text" in capsys.readouterr().err


def test_prefix_of_subwords_is_refused_on_which_the_library_would_abort(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder_with(tmp_path / "source", smollm_like(adds_bos=False))
    path = tmp_path / "source/tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["continuing_subword_prefix"] = "x"
    path.write_text(json.dumps(content))
    assert main([str(tmp_path / "source"), "--dst", str(tmp_path)]) == 1
    assert "continuing_subword_prefix" in capsys.readouterr().err


@pytest.mark.parametrize("change", [(b"YQ== ", b"YWFhYWE= "), (b" 255\n", b" 9999\n")], ids=["no byte", "no rank"])
def test_ranks_with_a_gap_are_refused(tmp_path: Path, change: tuple[bytes, bytes]) -> None:
    write_tiktoken_model(tmp_path / "tokenizer.model")
    data = (tmp_path / "tokenizer.model").read_bytes()
    assert change[0] in data
    (tmp_path / "tokenizer.model").write_bytes(data.replace(*change))
    with pytest.raises(ConversionError, match="lacks a rank or a byte"):
        build_llama3(tmp_path / "tokenizer.model")


_PIECE = b"\x0a\x03\x0a\x01a"
NO_MODELS = {
    "empty": b"",
    "zeros": b"\x00\x01",
    "page": b"<html>404</html>",
    "field past the end": b"\x0a\xff\xff\xff\xff\x7f",
    "endless number": b"\xff" * 1000,
    "piece without text": b"\x0a\x00",
    "bos_id of bytes": _PIECE + b"\x12\x04\xca\x02\x01x",
    "type of bytes": b"\x0a\x06\x0a\x01a\x1a\x013",
}


@pytest.mark.parametrize("content", NO_MODELS.values(), ids=NO_MODELS)
def test_tokenizer_model_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ConversionError, match="no SentencePiece model"):
        read_sentencepiece_model(tmp_path / "tokenizer.model")


def test_unigram_model_is_refused(tmp_path: Path) -> None:
    data = sentencepiece_bytes().replace(b"\x18\x02", b"\x18\x01")  # trainer_spec.model_type: BPE to unigram
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(ConversionError, match=r"tokenizer\.json is needed"):
        read_sentencepiece_model(tmp_path / "tokenizer.model")


def test_qwen2s_pre_tokenizer_encodes_as_transformers_own_class_does() -> None:
    trained = json.loads(train_byte_level(SPECIAL).to_str())["model"]
    merges = [tuple(merge) for merge in trained["merges"]]
    reference = Qwen2Tokenizer(vocab=trained["vocab"], merges=merges)
    texts = strings()
    found = [build_byte_bpe(trained["vocab"], merges, "qwen2").encode(text).ids for text in texts]
    assert_all_equal(found, [reference(text)["input_ids"] for text in texts], texts)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("The limpet's 12 rocks,\r\n\nmoved  on", "The| limpet|'|s| |12| rocks|,|\r|\n|\n|moved| | on"),
        ("你好，世界 2024年。한국어", "你好|，|世界| |2024|年|。|한국어"),
        ("Прилив\tκαλημέρα", "Прилив|\tκαλημέρα"),
        ('x = {"a": [1, 2]}  ', 'x| =| {"|a|":| [|1|,| |2|]}|  '),
        ("שלום עולם", "שלום עולם"),  # letters without case stay together, spaces included
        # Later rules cut again what earlier ones found: ASCII counts as punctuation, U+0800 and up as syllables.
        ("naïve😀 café… \u1f6c\u03a9", "na|ï|ve|😀| caf|é|…| |\u1f6c|\u03a9"),
    ],
)
def test_deepseeks_pre_tokenizer_cuts_words_punctuation_syllables_and_numbers(text: str, pieces: str) -> None:
    places = [place for _, place in pre_tokenizer("deepseek-llm").pre_tokenize_str(text)]
    assert "|".join(text[start:end] for start, end in places) == pieces


def test_unknown_pre_tokenizer_is_refused() -> None:
    with pytest.raises(ConversionError, match="'default' is not supported"):
        pre_tokenizer("default")
