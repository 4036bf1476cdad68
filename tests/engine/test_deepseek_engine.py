"""The whole engine over latent attention and experts: what Llama's tests ask, asked of tiny DeepSeek-V2 models."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis.stateful import run_state_machine_as_test

from limpet.backend.build import build_engine
from limpet.backend.cache_layout import CacheLayout
from limpet.backend.config import EngineConfig
from limpet.backend.engine import Engine
from limpet.backend.offline import LocalEngine
from limpet.backend.sampling_params import SamplingParams
from tests.aids.deepseek import DEEPSEEK_SHAPES, LITE
from tests.aids.tiny import one_thread
from tests.aids.tiny_models import ConvertedTiny, convert_tiny
from tests.aids.transformers_reference import greedy_reference
from tests.engine.session_machine import SessionMachine, Totals
from tests.engine.test_parity_tiny import check_all
from tests.engine.test_session_machine import settings_for

ROW_DIM = LITE["kv_lora_rank"] + LITE["qk_rope_head_dim"]
BLOCK_BYTES = CacheLayout(LITE["num_hidden_layers"], 1, (ROW_DIM,)).block_bytes(16, torch.float32)


@pytest.fixture(scope="module")
def lite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConvertedTiny]:
    with one_thread():
        yield convert_tiny(tmp_path_factory.mktemp("lite"), "lite")


def test_a_block_holds_one_row_of_latents_a_token_and_layer() -> None:
    assert BLOCK_BYTES == 4 * 16 * (32 + 8) * 4  # layers, tokens, columns, float32


@pytest.mark.parametrize("shape", list(DEEPSEEK_SHAPES)[1:])
def test_ids_equal_transformers(tmp_path_factory: pytest.TempPathFactory, shape: str) -> None:
    tiny = convert_tiny(tmp_path_factory.mktemp("deepseek"), shape)
    check_all(tiny, EngineConfig(cache_block_seq_len=16, max_prefill_token_num=24))


def test_answers_stay_equal_under_preemption(lite: ConvertedTiny) -> None:
    """Nine requests want 607 tokens in all, the cache holds 192."""
    engine = check_all(lite, EngineConfig(cache_block_seq_len=16, cache_bytes=12 * BLOCK_BYTES))
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("shared", [16, 33, 150])
def test_a_prefix_hit_changes_no_id(lite: ConvertedTiny, shared: int) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    first, second = ([(start + 7 * place) % 290 + 4 for place in range(190)] for start in (0, 5))
    second = first[:shared] + second[shared:]
    with LocalEngine(lite.model_dir, EngineConfig(cache_block_seq_len=16, cache_bytes=100 * BLOCK_BYTES)) as engine:
        engine.generate([first], greedy)
        [answer] = engine.generate([second], greedy)
    assert answer.num_cached_tokens == shared // 16 * 16
    assert answer.ids == greedy_reference(lite.reference, second, 30).ids


def test_sessions_equal_transformers_in_any_order_of_events(lite: ConvertedTiny) -> None:
    config = EngineConfig(
        max_batch_size=3, cache_block_seq_len=16, cache_bytes=7 * BLOCK_BYTES, max_prefill_token_num=16
    )

    class DeepseekMachine(SessionMachine):
        totals = Totals()

        def build_engine(self) -> Engine:
            return build_engine(lite.model_dir, config)[0]

        def next_id(self, tokens: list[int]) -> int:
            with torch.inference_mode():
                return int(lite.reference(torch.tensor([tokens])).logits[0, -1].argmax())

    run_state_machine_as_test(DeepseekMachine, settings=settings_for(200, derandomize=True))
    assert DeepseekMachine.totals.num_rules >= 150
    assert DeepseekMachine.totals.num_evictions > 0
