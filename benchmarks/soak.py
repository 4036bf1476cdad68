"""Random traffic against a running server: lengths, cancels, sessions, preemption. Nothing may fail, nor memory grow.

    python -m benchmarks.soak 127.0.0.1:33337 --model llama-2-7b --rounds 3 --seconds 300

After each round the server must become idle; then its counters and its memory are printed. Exit code 1: an error, a
wrong answer, or growth.
"""

import argparse
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import psutil

from limpet.client import Client, LimpetError

FIRST_ID, NUM_IDS = 300, 20000  # of prompts
MAX_PROMPT, MAX_ANSWER = 3000, 600
WORDS = ("limpet", "rock", "tide", "sea", "shell", "sand", "wave", "moss")
IDLE_S = 120.0
ALLOWED_GROWTH, ALLOWED_GROWTH_BYTES = 0.02, 100 << 20  # from the end of the first round on


@dataclass(frozen=True)
class Usage:
    """Memory while the server is idle."""

    engine_rss_bytes: int  # of all its ranks
    server_rss_bytes: int  # of tritonserver and its stubs
    gpu_bytes: int

    def grew_since(self, first: "Usage") -> list[str]:
        """What is larger than it may be."""
        pairs = {name: (getattr(first, name), getattr(self, name)) for name in self.__dataclass_fields__}
        return [
            f"{name} grew from {before:,} to {after:,}"
            for name, (before, after) in pairs.items()
            if after - before > max(ALLOWED_GROWTH * before, ALLOWED_GROWTH_BYTES)
        ]


def run_round(address: str, model: str, seconds: float, num_processes: int, streams: int, seed: int) -> Counter[str]:
    """What happened how often; keys that begin with "fault" are what must not happen."""
    until = time.time() + seconds
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as processes:
        parts = [
            processes.submit(_one_process, address, model, until, streams // num_processes, seed * 1000 + number)
            for number in range(num_processes)
        ]
        return sum((part.result() for part in parts), Counter[str]())


def _one_process(address: str, model: str, until: float, streams: int, seed: int) -> Counter[str]:
    with Client(address, model=model) as client, ThreadPoolExecutor(streams) as threads:
        counts = threads.map(
            lambda number: _one_stream(client, until, random.Random(seed * 1000 + number)), range(streams)
        )
        return sum(counts, Counter[str]())


def _one_stream(client: Client, until: float, generator: random.Random) -> Counter[str]:
    seen: Counter[str] = Counter()
    while time.time() < until:
        action = generator.choices((_whole, _broken_off, _conversation), (5, 2, 3))[0]
        try:
            action(client, generator, seen)
        except LimpetError as error:
            seen[f"fault: {type(error).__name__}: {error}"[:200]] += 1
    return seen


def _length(generator: random.Random, longest: int) -> int:
    """Short ones are common, the longest possible."""
    return max(1, int(longest * generator.random() ** 3))


def _prompt(generator: random.Random) -> list[int]:
    start = [FIRST_ID] * generator.choice((0, 0, 200))  # a beginning that many share
    return start + [FIRST_ID + generator.randrange(NUM_IDS) for _ in range(_length(generator, MAX_PROMPT))]


def _options(generator: random.Random) -> dict[str, Any]:
    greedy = generator.random() < 0.5
    sampling = {} if greedy else {"top_p": 0.9, "top_k": 50, "seed": generator.randrange(1000)}
    return {
        "max_tokens": _length(generator, MAX_ANSWER),
        "ignore_eos": True,
        "temperature": 0.0 if greedy else 1.0,
        **sampling,
    }


def _whole(client: Client, generator: random.Random, seen: Counter[str]) -> None:
    options = _options(generator)
    answer = client.generate(input_ids=_prompt(generator), **options)
    seen["whole"] += 1
    seen["tokens"] += answer.num_output_tokens
    if answer.num_output_tokens != options["max_tokens"]:
        seen[f"fault: {answer.num_output_tokens} tokens instead of {options['max_tokens']}"] += 1


def _broken_off(client: Client, generator: random.Random, seen: Counter[str]) -> None:
    patience = generator.randrange(20)
    with client.generate(input_ids=_prompt(generator), stream=True, **_options(generator)) as stream:
        for count, _ in enumerate(stream):
            if count >= patience:
                break
    seen["broken off"] += 1


def _conversation(client: Client, generator: random.Random, seen: Counter[str]) -> None:
    session = client.session()
    for _ in range(generator.randrange(1, 6)):
        question = " ".join(generator.choice(WORDS) for _ in range(_length(generator, 60)))
        with session.ask(question, stream=True, **_options(generator)) as stream:
            for count, chunk in enumerate(stream):
                seen["cached"] += chunk.num_cached_tokens if count == 0 else 0
                if generator.random() < 0.002:  # the user stops the answer
                    seen["stopped"] += 1
                    break
        seen["turns"] += 1
    if generator.random() < 0.7:
        session.end()
    seen["conversations"] += 1


def await_idle(client: Client) -> None:
    """Wait until nothing runs; raises TimeoutError."""
    deadline = time.monotonic() + IDLE_S
    while sum(values(client).get(f"limpet_requests_{state}", 0) for state in ("running", "waiting")):
        if time.monotonic() > deadline:
            raise TimeoutError("requests do not end")
        time.sleep(0.2)


def values(client: Client) -> dict[str, float]:
    """The engine's counters and gauges."""
    found: dict[str, float] = client.admin("metrics", model=client.model)["values"]
    return found


def usage(client: Client) -> Usage:
    engine = psutil.Process(client.admin("metrics", model=client.model)["engine_pid"])
    server = next(each for each in engine.parents() if each.name() == "tritonserver")
    engines = {engine, *engine.children(recursive=True)}
    others = {server, *server.children(recursive=True)} - engines
    return Usage(_rss(engines), _rss(others), _gpu_bytes({each.pid for each in engines}))


def _rss(processes: set[psutil.Process]) -> int:
    return sum(each.memory_info().rss for each in processes)


def _gpu_bytes(pids: set[int]) -> int:
    """Of these processes, on all GPUs."""
    if shutil.which("nvidia-smi") is None:
        return 0
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    used = ([int(field) for field in line.split(",")] for line in lines)
    return sum(mebibytes << 20 for pid, mebibytes in used if pid in pids)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.soak")
    parser.add_argument("address")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--streams", type=int, default=96)
    parser.add_argument("--load-processes", type=int, default=6)
    arguments = parser.parse_args()
    faults: list[str] = []
    used: list[Usage] = []
    with Client(arguments.address, model=arguments.model) as client:
        for number in range(arguments.rounds):
            seen = run_round(
                client.address, arguments.model, arguments.seconds, arguments.load_processes, arguments.streams, number
            )
            await_idle(client)
            used.append(usage(client))
            counted = values(client)
            print(f"round {number + 1}: {dict(sorted(seen.items()))}")
            print(f"  {used[-1]}; {counted.get('limpet_preemptions_total', 0):.0f} preemptions", flush=True)
            faults += [f"{name} ({count} times)" for name, count in seen.items() if name.startswith("fault")]
    faults += used[-1].grew_since(used[0])
    print("\n".join(faults) if faults else "No error, no growth.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
