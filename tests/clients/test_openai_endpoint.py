"""Clients of OpenAI's API against limpet-api: lm-eval and AIPerf."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from limpet.benchmarks.child_command import endpoint
from limpet.client import Client
from tests.aids.live_server import LiveServer
from tests.aids.repositories import SMOLLM2_GGUF
from tests.clients.lm_eval_tasks import CHAT, ITEMS, LIKELIHOOD, NUM_CHATS, write_tasks

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(1200)]
Run = Callable[..., str]


@pytest.fixture(scope="module")
def url(server: LiveServer) -> Iterator[str]:
    with endpoint(server.target) as url:
        yield url


def _evaluate(run: Run, tmp_path: Path, task: str, *arguments: str) -> list[dict[str, Any]]:
    """The samples of one task that lm-eval logged, in the items' order."""
    write_tasks(tmp_path / "tasks")
    run(
        *("lm-eval", "lm_eval", "--tasks", task, "--include_path", "tasks", "--output_path", "out", "--log_samples"),
        *arguments,
    )
    [samples] = (tmp_path / "out").rglob(f"samples_{task}_*.jsonl")
    return sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: int(sample["doc_id"]))


def test_lm_evals_loglikelihoods_are_transformers(url: str, run: Run, tokenizer_folder: Path, tmp_path: Path) -> None:
    arguments = f"model=smollm2,base_url={url}/v1/completions,tokenizer={tokenizer_folder},num_concurrent=2"
    samples = _evaluate(run, tmp_path, LIKELIHOOD, "--model", "local-completions", "--model_args", arguments)
    measured = [(float(value), greedy == "True") for [[(value, greedy)]] in (each["resps"] for each in samples)]
    expected = _loglikelihoods(tokenizer_folder / "tokenizer.json")
    assert len(measured) == len(expected) == 50
    assert [value for value, _ in measured] == pytest.approx([value for value, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in measured] == [greedy for _, greedy in expected]


def _loglikelihoods(tokenizer_path: Path) -> list[tuple[float, bool]]:
    """Of each item's answer after its prompt, and whether it is the greedy one: transformers in float32."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2_GGUF.parent, gguf_file=SMOLLM2_GGUF.name, dtype=torch.float32)
    scored = []
    for prompt, answer in ITEMS:
        start = len(tokenizer.encode(prompt).ids)
        ids = torch.tensor(tokenizer.encode(prompt + answer).ids)
        with torch.inference_mode():
            logits = model(ids[None]).logits[0, start - 1 : -1]  # [num_answer, vocab]
        chosen = logits.log_softmax(-1).gather(1, ids[start:, None])
        scored.append((float(chosen.sum()), bool((logits.argmax(-1) == ids[start:]).all())))
    return scored


def test_lm_evals_chats_get_the_models_answers(
    server: LiveServer, url: str, run: Run, tokenizer_folder: Path, tmp_path: Path
) -> None:
    arguments = f"model=smollm2,base_url={url}/v1/chat/completions"
    samples = _evaluate(
        *(run, tmp_path, CHAT, "--model", "local-chat-completions", "--model_args", arguments, "--apply_chat_template")
    )
    with Client(server.target, model="smollm2") as client:
        expected = [
            client.chat([{"role": "user", "content": prompt}], temperature=0, max_tokens=8, stop="\n").text
            for prompt, _ in ITEMS[:NUM_CHATS]
        ]
    assert [each["resps"][0][0] for each in samples] == expected


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf(url: str, run: Run, tokenizer_folder: Path, tmp_path: Path, kind: str) -> None:
    run(
        *("aiperf", "aiperf", "profile", "--model", "smollm2", "--url", url, "--endpoint-type", kind, "--streaming"),
        *("--tokenizer", str(tokenizer_folder), "--concurrency", "2", "--request-count", "8", "--ui", "simple"),
        *("--isl", "40", "--osl", "10", "--extra-inputs", "ignore_eos:true", "--artifact-dir", "artifacts"),
    )
    measured = json.loads((tmp_path / "artifacts" / "profile_export_aiperf.json").read_text())
    assert measured["request_count"]["avg"] == 8
    # Counted from the text: tokens of a word are not always those that the model wrote.
    assert 8 <= measured["output_sequence_length"]["avg"] <= 12
    assert measured["time_to_first_token"]["avg"] < measured["request_latency"]["avg"]
