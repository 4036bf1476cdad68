"""Guided decoding: each id is the likeliest of those that keep the answer within its form, as `regex` itself says."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import regex
import torch

from limpet.backend.checkpoint import CheckpointDir
from limpet.backend.config import EngineConfig
from limpet.backend.core import RequestError
from limpet.backend.guide_compiler import GuideCompiler
from limpet.backend.offline import LocalEngine, new_sequence
from limpet.backend.sampling_params import Guide, SamplingParams
from limpet.backend.token_masks import TokenMasks
from tests.aids.chain_tokenizer import EOS_ID, SPECIAL_TOKENS, byte_characters
from tests.aids.tiny import one_thread
from tests.aids.tiny_models import ConvertedTiny, convert_tiny

BLOCK_BYTES = 2 * 2 * 2 * 8 * 16 * 4  # K and V, layers, K/V heads, head_dim, tokens, float32
PROMPT = [5, 17, 123, 44]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
WARM = SamplingParams(temperature=1.5, max_tokens=400)
BYTES = {len(SPECIAL_TOKENS) + index: chr(byte) for index, byte in enumerate(byte_characters())}  # id -> Latin-1
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["rock", "tide"]},
        "depth": {"type": "integer", "minimum": -40, "maximum": 7},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "depth", "tags"],
}
PATTERN = r"(yes|no), [a-f]{2,6}(\.[0-9]+)?!"


def guided(params: SamplingParams, kind: Any, source: str, **settings: Any) -> SamplingParams:
    return msgspec.structs.replace(params, guide=Guide(kind, source), **settings)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConvertedTiny]:
    with one_thread():
        yield convert_tiny(tmp_path_factory.mktemp("guided"), "grouped-query")


def engine_of(tiny: ConvertedTiny, num_blocks: int = 400) -> LocalEngine:
    config = EngineConfig(max_batch_size=8, cache_block_seq_len=16, cache_bytes=num_blocks * BLOCK_BYTES)
    return LocalEngine(tiny.model_dir, config)


@pytest.fixture(scope="module")
def engine(tiny: ConvertedTiny) -> Iterator[LocalEngine]:
    with engine_of(tiny) as engine:
        yield engine


def text_of(ids: list[int]) -> str:
    return "".join(BYTES[token] for token in ids if token != EOS_ID)


def expected_ids(tiny: ConvertedTiny, pattern: str) -> list[int]:
    """Greedy ids of transformers' logits among those with which the text can still become a match."""
    ids: list[int] = []
    while EOS_ID not in ids:
        with torch.inference_mode():
            logits = tiny.reference(torch.tensor([PROMPT + ids])).logits[0, -1]
        text = text_of(ids)
        allowed = [token for token, byte in BYTES.items() if regex.fullmatch(pattern, text + byte, partial=True)]
        allowed += [EOS_ID] if regex.fullmatch(pattern, text) else []
        ids.append(max(allowed, key=lambda token: float(logits[token])))
    return ids


@pytest.mark.parametrize("pattern", [PATTERN, r"[A-Z0-9 ]{12}", r"(cat|catalogue|cart){1,3}", r"\d{3}-\d{4}"])
def test_guided_ids_are_the_likeliest_that_can_still_match(
    tiny: ConvertedTiny, engine: LocalEngine, pattern: str
) -> None:
    [answer] = engine.generate([PROMPT], guided(GREEDY, "regex", pattern))
    assert answer.ids == expected_ids(tiny, pattern)
    assert answer.finish_reason == "stop"
    assert answer.ids != engine.generate([PROMPT], GREEDY)[0].ids


@pytest.mark.parametrize("seed", range(4))
def test_every_sampled_answer_follows_its_schema(engine: LocalEngine, seed: int) -> None:
    [answer] = engine.generate([PROMPT], guided(WARM, "json_schema", json.dumps(SCHEMA), seed=seed))
    value = json.loads(text_of(answer.ids).encode("latin-1"))
    assert list(value) == ["name", "kind", "depth", "tags"]
    assert len(value["name"]) <= 8
    assert value["kind"] in ("rock", "tide")
    assert -40 <= value["depth"] <= 7
    assert 1 <= len(value["tags"]) <= 3
    assert all(isinstance(tag, bool) for tag in value["tags"])


def eight_settings() -> list[SamplingParams]:
    return [
        GREEDY,
        guided(GREEDY, "regex", PATTERN),
        guided(WARM, "json_schema", json.dumps(SCHEMA), seed=1),
        guided(WARM, "json_schema", json.dumps(SCHEMA), seed=2, repetition_penalty=1.3),
        guided(GREEDY, "grammar", 'root ::= "a" | "b" root "c"'),
        msgspec.structs.replace(WARM, seed=3, max_tokens=50, top_k=40),
        guided(GREEDY, "regex", r"[0-9 ]{40}", presence_penalty=0.5, ignore_eos=True),
        guided(WARM, "regex", r"[a-z]{5,30}", seed=4, logprobs=2),
    ]


def test_guided_ids_are_the_same_in_any_company(engine: LocalEngine) -> None:
    settings = eight_settings()
    alone = [engine.generate([PROMPT], params)[0].ids for params in settings]
    assert [answer.ids for answer in engine.generate([PROMPT] * 8, settings)] == alone
    assert [answer.ids for answer in engine.generate([PROMPT] * 8, settings[::-1])] == alone[::-1]


def test_preempted_guided_answers_go_on_where_they_were(tiny: ConvertedTiny, engine: LocalEngine) -> None:
    settings = eight_settings()
    expected = [answer.ids for answer in engine.generate([PROMPT] * 8, settings)]
    with engine_of(tiny, num_blocks=10) as tight:
        assert [answer.ids for answer in tight.generate([PROMPT] * 8, settings)] == expected
        assert tight.engine.scheduler.num_preemptions >= 3


def test_a_complete_form_ends_the_answer_though_end_ids_are_ignored(engine: LocalEngine) -> None:
    [answer] = engine.generate([PROMPT], guided(GREEDY, "regex", "ab", ignore_eos=True))
    assert (text_of(answer.ids), answer.ids[-1], answer.finish_reason) == ("ab", EOS_ID, "stop")


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("regex", "[", "a set does not end"),
        (
            "json_schema",
            '{"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"}',
            "cannot be followed: counts in",
        ),
        (
            "json_schema",
            json.dumps({"type": "object", "properties": {"a" * 5000: {}}, "additionalProperties": {}}),
            "4000",
        ),
        ("grammar", "root ::= missing", "missing"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum"),
        ("grammar", 'root ::= root "a"', "No token is left"),
    ],
)
def test_what_cannot_be_followed_is_one_clear_error(engine: LocalEngine, kind: str, source: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as raised:
        engine.generate([PROMPT], guided(GREEDY, kind, source))
    assert raised.value.code == "INVALID_ARG"
    assert "/" not in str(raised.value)
    assert "\n" not in str(raised.value)
    assert engine.generate([PROMPT], GREEDY)[0].ids


def test_an_end_id_is_no_text_though_it_is_an_ordinary_token(tiny: ConvertedTiny) -> None:
    token_a, token_b = (next(token for token, byte in BYTES.items() if byte == letter) for letter in "ab")
    compiler = GuideCompiler(CheckpointDir(tiny.model_dir), 300, [EOS_ID, token_b])
    guidance = compiler.begin(Guide("regex", "[ab]+"))
    assert guidance.wait() is None

    def allowed() -> set[int]:
        bits = np.unpackbits(compiler.fill([guidance]).view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits[:300]).tolist())

    assert allowed() == {token_a}
    assert guidance.accept(token_a)
    assert allowed() == {token_a, token_b, EOS_ID}
    compiler.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_masks_leave_other_rows_and_the_given_logits_alone(device: str) -> None:
    generator = np.random.Generator(np.random.PCG64(1))
    logits = torch.from_numpy(generator.random((4, 300), dtype=np.float32)).to(device)
    given = logits.clone()
    bits = generator.integers(-(2**31), 2**31, (2, 10)).astype(np.int32)
    masked = TokenMasks([3, 1], bits).apply(logits).cpu()
    allowed = np.unpackbits(bits.astype("<i4").view(np.uint8), axis=1, bitorder="little")[:, :300].astype(bool)
    assert torch.equal(logits, given)
    for place, row in ((3, allowed[0]), (1, allowed[1])):
        expected = np.where(row, given[place].cpu().numpy(), -np.inf)
        assert np.array_equal(masked[place].numpy(), expected)
    assert torch.equal(masked[[0, 2]], given[[0, 2]].cpu())


def test_others_are_answered_while_a_guide_compiles(tiny: ConvertedTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_guide = threading.Event(), GuideCompiler._compile

    def slow(compiler: GuideCompiler, guide: Guide) -> Any:
        compiled.wait()
        return compile_guide(compiler, guide)

    monkeypatch.setattr(GuideCompiler, "_compile", slow)
    with engine_of(tiny) as local:
        engine, ends = local.engine, frozenset({EOS_ID})
        waiting = new_sequence("guided", PROMPT, guided(GREEDY, "regex", PATTERN), ends)
        cancelled = new_sequence("cancelled", PROMPT, guided(GREEDY, "regex", "a"), ends)
        other = new_sequence("other", PROMPT, GREEDY, ends)
        for sequence in (waiting, cancelled, other):
            engine.add(sequence)
        while not other.finished:
            engine.step()
        assert not waiting.num_generated
        engine.stop(cancelled)
        compiled.set()
        assert waiting.guidance is not None
        assert waiting.guidance.wait() is None
        while not waiting.finished:
            engine.step()
        assert waiting.tokens[len(PROMPT) :] == expected_ids(tiny, PATTERN)
        engine.check_integrity()
