"""The cache's host tier with a real model: what was cached of idle sessions comes back, and says the same."""

import random
from collections.abc import Iterator

import pytest

from limpet.backend.config import ConfigError, EngineConfig
from limpet.backend.core import Sequence
from limpet.backend.offline import LocalEngine, new_sequence
from limpet.backend.sampling_params import SamplingParams
from limpet.backend.sessions import SessionTable
from tests.aids.hash_runner import hash_engine, next_id
from tests.aids.ids_equal import assert_ids_equal
from tests.aids.tiny import one_thread
from tests.aids.tiny_models import ConvertedTiny, convert_tiny
from tests.aids.transformers_reference import greedy_reference

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConvertedTiny]:
    with one_thread():
        yield convert_tiny(tmp_path_factory.mktemp("host"), "grouped-query")


class Talker:
    """Sessions of one engine, driven without a front end."""

    def __init__(self, local: LocalEngine) -> None:
        self.local = local
        self._table = SessionTable(idle_timeout_s=3600, max_sessions=100)

    def ask(self, session: str, new: list[int], beside: list[int] | None = None) -> tuple[list[int], int, int]:
        """History after a turn whose answer is kept whole, tokens before it, cached tokens.

        While the turn's blocks are loaded the prompt `beside` is answered.
        """
        engine = self.local.engine
        other = new_sequence(1, beside or [], GREEDY, frozenset())
        if beside is not None:
            engine.add(other)
            engine.step()
        starts = session not in self._table.sessions
        lease = self._table.begin(session, start=starts, end=False, truncate_to=None, rewind=0)
        sequence = new_sequence(0, [*lease.history.tokens, *new], GREEDY, frozenset())
        sequence.cached_prefix = lease.reusable_prefix(sequence.tokens)
        sequence.is_turn = True
        engine.add(sequence)
        lease.accept(sequence, None)
        while engine.has_work:
            engine.step()
            engine.check_integrity()
        self._table.settle(lease, sequence.num_generated, engine.cached(sequence, len(sequence.tokens) - 1))
        engine.discard(other)
        return sequence.tokens, len(lease.history.tokens), sequence.num_cached or 0


@pytest.mark.parametrize("device", DEVICES)
def test_sessions_that_the_device_cannot_hold_come_back_whole(tiny: ConvertedTiny, device: str) -> None:
    blocks = {"cache_block_seq_len": 16, "max_prefill_token_num": 32, "max_batch_size": 2}
    block_bytes = _block_bytes(tiny)
    config = EngineConfig(
        device=device, dtype="float32", cache_bytes=9 * block_bytes, host_cache_bytes=60 * block_bytes, **blocks
    )
    chance = random.Random(1)
    with LocalEngine(tiny.model_dir, config) as local:
        talker = Talker(local)
        for turn in range(4):
            for session in ("ada", "bob", "cy", "dee", "eve"):
                new = [chance.randrange(4, 290) for _ in range(chance.randint(1, 20))]
                tokens, num_before, num_cached = talker.ask(session, new, beside=new[:4] if turn % 2 else None)
                assert num_cached == max(num_before - 1, 0), f"turn {turn} of {session}"
                prompt = tokens[:-NUM_TOKENS]
                assert_ids_equal(
                    tokens[-NUM_TOKENS:],
                    greedy_reference(tiny.reference, prompt, NUM_TOKENS),
                    prompt=prompt,
                    generate=lambda prompt, count: local.generate([prompt], GREEDY)[0].ids[:count],
                    name=f"turn {turn} of {session}",
                )
        cache = local.engine.cache
        assert cache.num_loaded > 20
        assert cache.pool.num_evicted > cache.num_offloaded > 20  # what came back is not copied a second time


def test_a_host_tier_of_less_than_a_block_is_refused(tiny: ConvertedTiny) -> None:
    with pytest.raises(ConfigError, match="host_cache_bytes holds no block"):
        LocalEngine(tiny.model_dir, EngineConfig(host_cache_bytes=10))


def test_more_host_memory_than_there_is_is_refused(tiny: ConvertedTiny) -> None:
    with pytest.raises(ConfigError, match=r"host_cache_bytes .* bytes of memory are free"):
        LocalEngine(tiny.model_dir, EngineConfig(host_cache_bytes=1 << 50))


def _block_bytes(tiny: ConvertedTiny) -> int:
    config = tiny.reference.config
    head_dim = config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * 16 * config.num_key_value_heads * head_dim * 4


def test_a_block_that_is_being_loaded_is_not_copied_for_another_request() -> None:
    """Both requests start in one step: the second one writes into a block that the first one shares."""
    engine = hash_engine(num_blocks=10, session_len=40, prefix_caching=True, num_host_blocks=20)
    params = SamplingParams(temperature=0.0, max_tokens=3)

    def answer(*sequences: Sequence) -> None:
        for sequence in sequences:
            engine.add(sequence)
        while engine.has_work:
            engine.step()
        for sequence in sequences:
            expected = list(sequence.tokens[: sequence.num_prompt])
            while len(expected) < len(sequence.tokens):
                expected.append(next_id(expected, 50))
            assert sequence.tokens == expected

    opening = list(range(12))
    first = new_sequence(0, [*opening, 13], params, frozenset())
    first.is_turn = True
    answer(first)
    answer(new_sequence(1, [40] * 37, params, frozenset()))  # takes all blocks
    assert engine.cache.count_blocks(first.cached_prefix)[0] == 0
    sharing = new_sequence(2, [*opening, 14], params, frozenset())
    rewound = new_sequence(3, [*opening[:10], 15], params, frozenset())
    rewound.cached_prefix = first.cached_prefix.first(10, 4)
    answer(sharing, rewound)
    assert (sharing.num_cached, rewound.num_cached) == (12, 10)
