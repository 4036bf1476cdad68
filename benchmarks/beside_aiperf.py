"""limpet-bench's figures beside AIPerf's: both measure the same limpet-api with the same load, in turns.

    python -m limpet.benchmarks.beside_aiperf .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf --aiperf PATH/TO/aiperf

Converts the GGUF file, serves it with prefix caching off and stands limpet-api before it. AIPerf lives in an
environment of its own, which `make bench-aiperf` finds or makes.
Writes benchmarks/results/<date>-<machine>-aiperf.jsonl.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import track

from limpet.backend.checkpoint import CheckpointDir
from limpet.benchmarks import result
from limpet.benchmarks.child_command import endpoint, free_ports, run_command, serve
from limpet.benchmarks.load_generator import LoadGenerator
from limpet.benchmarks.result import Result
from limpet.benchmarks.targets import Target
from limpet.benchmarks.timing import with_figures
from limpet.benchmarks.workload import digest, uniform

NAME = "smollm2"


def main() -> None:
    options = _parse()
    base = Result(
        date=result.today(),
        commit=result.commit(),
        machine=result.cpu_machine(),
        torch=version("torch"),
        engine="limpet-bench",
        model="SmolLM2-135M-Instruct",
        part="fixed",
        dtype="float32",
        threads=options.threads,
        concurrency=options.concurrency,
        via="http",
    )
    with tempfile.TemporaryDirectory(prefix="limpet-bench-") as scratch:
        workspace = Path(scratch)
        run_command(
            *("limpet-convert", str(options.gguf), f"--dst={workspace}"),
            *(f"--name={NAME}", "--enable-prefix-caching=false"),
        )
        repository = workspace / "model_repository"
        checkpoint = CheckpointDir(repository / NAME)
        tokenizer = _tokenizer_folder(checkpoint, workspace)
        with serve(repository, free_ports(), options.threads) as server, endpoint(server.address) as url:
            lines = _measure(base, options, url, tokenizer, checkpoint.model_config().vocab_size)
    result.append(result.result_path(base.machine, "aiperf"), lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--aiperf", type=Path, required=True, metavar="COMMAND")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="of the engine; AIPerf keeps a core busy of its own")
    parser.add_argument("--runs", type=int, default=3)
    return parser.parse_args()


def _tokenizer_folder(checkpoint: CheckpointDir, workspace: Path) -> Path:
    """The model's tokenizer as Hugging Face's library loads it."""
    folder = workspace / "tokenizer"
    folder.mkdir()
    shutil.copyfile(checkpoint.tokenizer_path, folder / "tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder


def _measure(base: Result, options: argparse.Namespace, url: str, tokenizer: Path, vocab_size: int) -> list[Result]:
    """Both in turns, after a run of each that nobody counts."""
    requests = uniform(vocab_size, options.num_requests, options.input_len, options.output_len)
    runs, reports = [], []
    with closing(LoadGenerator(Target(url, NAME))) as generator:
        for _ in track(range(options.runs + 1), description="Measuring"):
            runs.append(generator.run(requests, options.concurrency))
            reports.append(_aiperf(options, url, tokenizer))
    ours = with_figures(msgspec.structs.replace(base, digest=digest(requests)), runs[1:])
    theirs = _result(msgspec.structs.replace(base, engine="AIPerf", runs=options.runs), reports[1:])
    return [ours, theirs]


def _aiperf(options: argparse.Namespace, url: str, tokenizer: Path) -> dict[str, Any]:
    """AIPerf's report of one run."""
    with tempfile.TemporaryDirectory(prefix="limpet-bench-") as folder:
        command = [
            *(options.aiperf.absolute(), "profile", "--model", NAME, "--url", url, "--endpoint-type", "completions"),
            *("--streaming", "--tokenizer", tokenizer, "--ui", "none", "--artifact-dir", folder),
            *("--isl", str(options.input_len), "--osl", str(options.output_len), "--extra-inputs", "ignore_eos:true"),
            *("--concurrency", str(options.concurrency), "--request-count", str(options.num_requests)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode != 0:
            raise SystemExit(f"AIPerf failed: {(done.stdout + done.stderr)[-2000:]}")
        report: dict[str, Any] = json.loads((Path(folder) / "profile_export_aiperf.json").read_text("utf-8"))
        return report


def _result(base: Result, reports: list[dict[str, Any]]) -> Result:
    """The medians of AIPerf's figures. Its inter-token latency is the field's time per output token."""

    def median(name: str, statistic: str) -> float:
        return float(round(statistics.median(report[name][statistic] for report in reports), 2))

    return msgspec.structs.replace(
        base,
        req=int(median("request_count", "avg")),
        wall_s=median("benchmark_duration", "avg"),
        req_s=median("request_throughput", "avg"),
        out_tok_s=median("output_token_throughput", "avg"),
        ttft_ms_p50=median("time_to_first_token", "p50"),
        ttft_ms_p99=median("time_to_first_token", "p99"),
        tpot_ms_mean=median("inter_token_latency", "avg"),
    )


if __name__ == "__main__":
    main()
