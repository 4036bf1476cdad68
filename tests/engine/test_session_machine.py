"""Sessions and scheduler against their reference, any order of events.

With a runner that hashes what it reads from the cache: thousands of steps a second. With a tiny random model: the same
events, every id recomputed by transformers in float32.
"""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from limpet.backend.build import build_engine
from limpet.backend.config import EngineConfig
from limpet.backend.engine import Engine
from limpet.converter.convert import convert
from limpet.converter.plan import Options, make_plan
from tests.aids.hash_runner import hash_engine, next_id
from tests.aids.tiny import one_thread, write_tiny
from tests.engine.session_machine import SessionMachine, Totals


class HashMachine(SessionMachine):
    def __init_subclass__(cls) -> None:
        cls.totals = Totals()

    def next_id(self, tokens: list[int]) -> int:
        return next_id(tokens, 50)


class SmallPoolMachine(HashMachine):
    """Eviction all the time and preemption often: the pool holds about one long session."""

    def build_engine(self) -> Engine:
        return hash_engine(num_blocks=12, session_len=48, prefix_caching=True)


class NoPrefixMachine(HashMachine):
    def build_engine(self) -> Engine:
        return hash_engine(num_blocks=14, session_len=40, prefix_caching=False)


class RoomyMachine(HashMachine):
    """Nothing is evicted: sessions must report every cached token."""

    def build_engine(self) -> Engine:
        return hash_engine(num_blocks=400, session_len=60, prefix_caching=False)


class HostTierMachine(HashMachine):
    """The device holds about one long session and host memory all: nothing is ever lost."""

    loses_nothing = True

    def build_engine(self) -> Engine:
        return hash_engine(num_blocks=14, session_len=48, prefix_caching=True, num_host_blocks=1000)


class SmallHostMachine(HashMachine):
    """Both tiers are short, and blocks are found by their owners only."""

    def build_engine(self) -> Engine:
        return hash_engine(num_blocks=12, session_len=44, prefix_caching=False, num_host_blocks=7)


def settings_for(num_steps: int, *, derandomize: bool) -> settings:
    """At least so many steps: hypothesis ends some examples early. `derandomize`: the same ones until code changes."""
    return settings(
        max_examples=num_steps // 35,
        stateful_step_count=50,
        deadline=None,
        derandomize=derandomize,
        report_multiple_bugs=False,
        database=None,
    )


def assert_enough_happened(machine: type[SessionMachine], num_steps: int) -> None:
    assert machine.totals.num_rules >= num_steps
    assert (machine.totals.num_evictions > 0) == (machine is not RoomyMachine)
    assert (machine.totals.num_preemptions > 0) == (machine is not RoomyMachine)


HASH_MACHINES = [SmallPoolMachine, NoPrefixMachine, RoomyMachine, HostTierMachine, SmallHostMachine]


@pytest.mark.parametrize("machine", HASH_MACHINES)
def test_sessions_equal_the_reference_in_any_order_of_events(machine: type[SessionMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings_for(500, derandomize=True))
    assert_enough_happened(machine, 500)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", HASH_MACHINES)
def test_sessions_equal_the_reference_for_long(machine: type[SessionMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings_for(30_000, derandomize=False))


@pytest.fixture(scope="module")
def tiny_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[SessionMachine]]:
    """The machine over a real engine whose pool holds 7 blocks of 16 tokens, and transformers as its reference."""
    source, workspace = tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("workspace")
    reference = write_tiny(source)
    convert(make_plan(Options(source=source, workspace=workspace, name="tiny")), lambda num_bytes: None)
    model_dir = workspace / "model_repository" / "tiny"
    block_bytes = 2 * 2 * 2 * 8 * 16 * 4  # K and V, layers, K/V heads, head_dim, tokens, float32
    config = EngineConfig(
        max_batch_size=3,
        cache_block_seq_len=16,
        cache_bytes=7 * block_bytes,
        host_cache_bytes=6 * block_bytes,
        max_prefill_token_num=16,
    )

    class TinyMachine(SessionMachine):
        totals = Totals()

        def build_engine(self) -> Engine:
            return build_engine(model_dir, config)[0]

        def next_id(self, tokens: list[int]) -> int:
            with torch.inference_mode():
                return int(reference(torch.tensor([tokens])).logits[0, -1].argmax())

    with one_thread():
        yield TinyMachine


def test_sessions_of_a_real_model_equal_transformers(tiny_machine: type[SessionMachine]) -> None:
    run_state_machine_as_test(tiny_machine, settings=settings_for(300, derandomize=True))
    assert_enough_happened(tiny_machine, 300)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_sessions_of_a_real_model_equal_transformers_for_long(tiny_machine: type[SessionMachine]) -> None:
    run_state_machine_as_test(tiny_machine, settings=settings_for(10_000, derandomize=False))
