"""An engine whose model is shared by several processes, and one of them killed, stopped, or unable to start."""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from limpet.backend.checkpoint import CheckpointError
from limpet.backend.config import EngineConfig
from limpet.backend.offline import LocalEngine
from limpet.backend.ranks import follower_processes
from limpet.backend.ranks.follower_processes import RankError
from limpet.backend.sampling_params import SamplingParams
from tests.aids.engine_process import EngineUnderTest, engine_process
from tests.aids.fake_front_end import FakeFrontEnd
from tests.aids.live_server import wait_ended
from tests.aids.tiny_models import ConvertedTiny, convert_tiny

PARAMETERS = {"device": "cpu", "cache_bytes": str(4 << 20), "max_batch_size": "4"}
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)
ENDS_WITHIN_S = 5 * 5.0  # five seconds, five times that for busy machines


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ConvertedTiny:
    return convert_tiny(tmp_path_factory.mktemp("loss"), "eight-heads")


@contextmanager
def loaded_engine(
    tiny: ConvertedTiny, tp: int = 2
) -> Iterator[tuple[EngineUnderTest, FakeFrontEnd, list[psutil.Process]]]:
    """An engine with an answer under way, and the processes of its ranks past the first."""
    with engine_process(tiny.model_dir, PARAMETERS | {"tp": str(tp)}) as running:
        front_end = running.connect()
        ranks = psutil.Process(running.process.pid).children()
        assert len(ranks) == tp - 1
        front_end.collect(front_end.submit([5, 17], ENDLESS), at_least=10)
        try:
            yield running, front_end, ranks
        finally:
            assert not wait_ended(ranks, ENDS_WITHIN_S)


@pytest.mark.parametrize(
    ("tp", "number", "cause"),
    [(4, signal.SIGKILL, r"ended \(signal SIGKILL\) while computing steps"), (2, signal.SIGSTOP, "hangs: nothing was")],
)
def test_a_lost_rank_ends_the_engine_with_the_cause(
    tiny: ConvertedTiny, tp: int, number: signal.Signals, cause: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with loaded_engine(tiny, tp) as (running, front_end, ranks):
        ranks[-1].send_signal(number)
        assert running.process.wait(ENDS_WITHIN_S) == 1
        front_end.drop()
    assert re.search(rf"Rank {tp - 1} \(process {ranks[-1].pid}\) {cause}", capfd.readouterr().err)


def test_ranks_end_with_a_killed_engine_even_a_stopped_one(tiny: ConvertedTiny) -> None:
    with loaded_engine(tiny) as (running, front_end, ranks):
        ranks[0].suspend()
        running.process.kill()
        front_end.drop()


def test_a_clean_stop_is_one_of_all_ranks(tiny: ConvertedTiny, capfd: pytest.CaptureFixture[str]) -> None:
    with loaded_engine(tiny) as (running, front_end, _):
        running.process.terminate()
        assert running.wait_end() == 0
        front_end.drop()
    log = capfd.readouterr().err
    assert not re.search("ERROR|WARNING|Traceback|terminate called", log), log


def test_a_rank_that_does_not_get_on_is_named(tiny: ConvertedTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_processes, "START_DEADLINE_S", 0.01)
    with pytest.raises(RankError, match=r"Rank 1 \(process \d+\) is still starting after 0.01 s; rank 0 waits"):
        LocalEngine(tiny.model_dir, EngineConfig(tp=2, device="cpu"))


def test_a_checkpoint_that_no_rank_can_load_is_named(
    tiny: ConvertedTiny, tmp_path_factory: pytest.TempPathFactory
) -> None:
    damaged = convert_tiny(tmp_path_factory.mktemp("damaged"), "eight-heads").model_dir
    for path in (damaged / "1" / "checkpoint").glob("weights-*"):
        path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="bytes, its manifest says"):
        LocalEngine(damaged, EngineConfig(tp=2, device="cpu"))
