"""The requests of benchmarks.engine through tritonserver and gRPC streaming, on a converted model.

    python -m benchmarks.served workspace/model_repository llama-2-7b --parts sharegpt --front-ends 4

Starts limpet-serve with that many front ends. Writes benchmarks/results/<date>-<device>-served.jsonl (or --output).
"""

import argparse
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import torch

from limpet.backend.checkpoint import CheckpointDir
from limpet.benchmarks import result
from limpet.benchmarks.child_command import free_ports, serve
from limpet.benchmarks.engine import WORKLOADS, run_all, template
from limpet.benchmarks.load_generator import LoadGenerator
from limpet.benchmarks.targets import Target
from limpet.benchmarks.timing import Run
from limpet.benchmarks.workload import Request, arrival_times

ADMIN = "limpet_admin"


@contextmanager
def with_front_ends(repository: Path, model: str, count: int) -> Iterator[Path]:
    """A repository of that model and limpet_admin whose `count` front ends share the engine; the weights are links."""
    with tempfile.TemporaryDirectory(prefix="limpet-bench-") as scratch:
        copy = Path(scratch)
        (copy / model).mkdir()
        config = (repository / model / "config.pbtxt").read_text("utf-8")
        config, found = re.subn(r"instance_group \[ \{ kind: KIND_CPU count: \d+ \} \]", _instances(count), config)
        if found != 1:
            raise SystemExit(f"{model}'s config.pbtxt has no instance_group of its usual form.")
        (copy / model / "config.pbtxt").write_text(config, "utf-8")
        (copy / model / "1").symlink_to((repository / model / "1").resolve())
        shutil.copytree(repository / ADMIN, copy / ADMIN)
        yield copy


def _instances(count: int) -> str:
    return f"instance_group [ {{ kind: KIND_CPU count: {count} }} ]"


def _answer(load: LoadGenerator, requests: list[Request], concurrency: int, rate: float | None) -> Run:
    if rate is None:
        return load.run(requests, concurrency)
    return load.run_at(requests, arrival_times(len(requests), rate))


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.served")
    parser.add_argument("repository", type=Path)
    parser.add_argument("model")
    parser.add_argument("--parts", nargs="+", choices=WORKLOADS, default=["sharegpt"])
    parser.add_argument("--front-ends", type=int, default=4)
    parser.add_argument("--load-processes", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    config = CheckpointDir(arguments.repository / arguments.model).model_config()
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    output = arguments.output or result.result_path(gpu or "cpu", "served")
    base = msgspec.structs.replace(
        template(arguments.model, gpu, config.dtype, arguments.commit), via="grpc", front_ends=arguments.front_ends
    )
    with (
        with_front_ends(arguments.repository, arguments.model, arguments.front_ends) as repository,
        serve(repository, free_ports(), torch.get_num_threads()) as server,
        closing(LoadGenerator(Target(server.address, arguments.model), arguments.load_processes)) as load,
    ):
        print(f"ready after {server.start_s:.1f} s", flush=True)
        for part in arguments.parts:
            measured, _ = run_all(partial(_answer, load), WORKLOADS[part], config.vocab_size, arguments.runs, base)
            result.append(output, [measured])
            print(msgspec.json.encode(measured).decode(), flush=True)


if __name__ == "__main__":
    main()
