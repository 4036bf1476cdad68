"""limpet-bench serving against a real server, over gRPC and through limpet-api."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from limpet.benchmarks import engine, turns
from limpet.benchmarks.conversations import WorkloadError, sharegpt_file
from limpet.benchmarks.result import read
from limpet.benchmarks.serving import main
from limpet.benchmarks.timing import Answer, Latencies
from limpet.benchmarks.workload import arrival_times, digest, uniform
from limpet.client import Client
from tests.aids.live_server import LiveServer
from tests.api.endpoint import endpoint


@pytest.fixture(scope="module")
def url(chain: LiveServer) -> Iterator[str]:
    with endpoint(chain.target) as url:
        yield url


@pytest.mark.server
@pytest.mark.parametrize("via", ["grpc", "http"])
def test_counts_are_those_of_the_requests(chain: LiveServer, url: str, via: str, tmp_path: Path) -> None:
    output, picture = tmp_path / "lines.jsonl", tmp_path / "rates.png"
    options = ["--num-requests=12", "--input-len=70", "--output-len=5", "--processes=2", f"--output={output}"]
    target = chain.target if via == "grpc" else url
    assert main([target, *options, "--concurrency=3"]) == 0
    assert main([target, *options, "--rate", "200", "400", f"--plot={picture}"]) == 0
    with Client(chain.target) as client:
        vocab_size = client.status()["models"]["chain"]["engine"]["vocab_size"]
    in_flight, *rates = read(output)
    assert [line.rate for line in rates] == [200, 400]
    for line in (in_flight, *rates):
        assert (line.req, line.in_tok, line.out_tok, line.via) == (12, 840, 60, via)
        assert line.cached_tokens == 0, "found from an earlier measurement"
        assert line.digest == digest(uniform(vocab_size, 12, 70, 5))
        assert line.distinct_last is not None
        assert line.distinct_last > 1
    assert in_flight.concurrency == 3
    assert Image.open(picture).format == "PNG"


@pytest.mark.server
def test_failed_requests_are_counted_and_named(
    chain: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "lines.jsonl"
    options = ["--num-requests=2", "--input-len=20", "--output-len=5", "--processes=1", "--vocab-size=1000000000"]
    assert main([chain.target, *options, f"--output={output}"]) == 1
    printed = capsys.readouterr()
    assert "2 requests failed, the first one: input_ids has the id" in printed.err
    assert not output.exists()


@pytest.mark.server
def test_a_sharegpt_file_gives_prompts_and_lengths(chain: LiveServer, url: str, tmp_path: Path) -> None:
    texts = [
        ("Say hello to the chain.", "a b c d e"),
        ("Too short", ""),
        ("Tell me about the limpet on its rock", "w " * 9),
    ]
    path = tmp_path / "sharegpt.json"
    conversations = [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in texts]
    path.write_text(json.dumps([*conversations, {"conversations": []}]))
    with Client(chain.target) as client:
        found = sharegpt_file(path, 2, client.tokenize)
        expected = [(client.tokenize(q), len(client.tokenize(a))) for q, a in texts if a]
    assert sorted((each.prompt, each.num_output_tokens) for each in found) == sorted(expected)
    options = ["--num-requests=2", "--processes=1", f"--output={tmp_path / 'lines.jsonl'}"]
    assert main([url, f"--sharegpt={path}", *options]) == 0
    with pytest.raises(WorkloadError, match="has 2 conversations of a fitting length; 3 are wanted"):
        sharegpt_file(path, 3, lambda text: list(range(len(text))))


@pytest.mark.server
def test_turns_on_a_server_reuse_their_session_and_whole_conversations_nothing(
    chain: LiveServer, tmp_path: Path
) -> None:
    output = tmp_path / "lines.jsonl"
    sizes = ["--histories", "40", "--turns=2", "--turn-tokens=10"]
    assert turns.main([chain.target, *sizes, f"--output={output}"]) == 0
    session, whole = read(output)
    history = 40 + turns.ANSWER_TOKENS + 2 * (10 + turns.ANSWER_TOKENS)  # before the last of three turns
    assert (session.cached_tokens, whole.cached_tokens) == (history - 1, 0)
    assert session.digest == whole.digest


@pytest.mark.parametrize(
    "wrong", ["--rate=0", "--num-requests=0", "--concurrency=-1", "--processes=x", "--plot=/no/such/folder/a.png"]
)
def test_wrong_usage_is_told_before_anything_is_measured(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["127.0.0.1:1", wrong])
    assert ended.value.code == 2
    assert wrong.split("=")[0] in capsys.readouterr().err


def test_turns_of_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no converted model"):
        turns.main([str(tmp_path)])


@pytest.mark.parametrize(
    ("wrong", "sentence"), [("--device=cuda", "no CUDA GPU"), ("--session-len=10", "has 128 tokens")]
)
def test_an_engine_that_cannot_serve_the_requests_is_one_sentence(
    wrong: str, sentence: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    tiny = ["--model=tiny", "--dtype=float32", "--parts=decode-1", "--slots=1", f"--output={tmp_path / 'lines.jsonl'}"]
    assert engine.main([*tiny, wrong]) == 1
    assert sentence in capfd.readouterr().err.splitlines()[-1]


def test_arrivals_are_poissons_of_the_given_rate() -> None:
    gaps = np.diff(arrival_times(20_000, 8.0))
    assert np.mean(gaps) == pytest.approx(1 / 8, rel=0.03)
    assert np.std(gaps) == pytest.approx(1 / 8, rel=0.03)
    assert arrival_times(5, 8.0) == arrival_times(5, 8.0)


def test_latencies_of_an_answer() -> None:
    answer = Answer(10.0, [(10.5, 1), (10.7, 1), (11.1, 2)])
    each = Latencies.of([answer, Answer(1.0, [(2.0, 1)])])
    assert each.ttft == pytest.approx([0.5, 1.0])
    assert each.tpot == pytest.approx([0.2])  # 0.6 s for the 3 tokens after the first
    assert each.itl == pytest.approx([0.2, 0.4])
