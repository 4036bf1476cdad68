"""limpet-bench's figures beside AIPerf's: both measure the same endpoint with the same load, in turns.

    python -m limpet.benchmarks.beside_aiperf http://127.0.0.1:23333 --aiperf PATH/TO/aiperf --tokenizer FOLDER

AIPerf lives in an environment of its own (make test-clients makes one below .cache/clients). FOLDER holds the model's
tokenizer.json and tokenizer_config.json. Writes benchmarks/results/<date>-<machine>-aiperf.jsonl.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from limpet.benchmarks import result
from limpet.benchmarks.load_generator import LoadGenerator
from limpet.benchmarks.result import Result
from limpet.benchmarks.targets import Target
from limpet.benchmarks.timing import with_figures
from limpet.benchmarks.workload import digest, uniform


def main() -> None:
    options = _parse()
    target = Target(options.url)
    with closing(target.connect()) as connection:
        served = connection.model()
    target = Target(options.url, served.name)
    requests = uniform(served.vocab_size, options.num_requests, options.input_len, options.output_len)
    base = Result(
        date=result.today(),
        commit=result.commit(),
        machine=result.cpu_machine(),
        torch="",
        engine="limpet-bench",
        model=served.name,
        part="fixed",
        concurrency=options.concurrency,
        via="http",
    )
    runs, reports = [], []
    with closing(LoadGenerator(target)) as generator:
        generator.run(requests, options.concurrency)  # the warm-up
        for _ in range(options.runs):
            runs.append(generator.run(requests, options.concurrency))
            reports.append(_aiperf(options, served.name))
    ours = with_figures(msgspec.structs.replace(base, digest=digest(requests)), runs)
    theirs = _result(msgspec.structs.replace(base, engine="AIPerf", runs=options.runs), reports)
    result.append(result.result_path(base.machine, "aiperf"), [ours, theirs])
    print(msgspec.json.encode(ours).decode(), msgspec.json.encode(theirs).decode(), sep="\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--aiperf", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    return parser.parse_args()


def _aiperf(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """AIPerf's report of one run."""
    with tempfile.TemporaryDirectory(prefix="limpet-bench-") as folder:
        command = [
            *(options.aiperf, "profile", "--model", model, "--url", options.url, "--endpoint-type", "completions"),
            *("--streaming", "--tokenizer", options.tokenizer.resolve(), "--ui", "none", "--artifact-dir", folder),
            *("--isl", str(options.input_len), "--osl", str(options.output_len), "--extra-inputs", "ignore_eos:true"),
            *("--concurrency", str(options.concurrency), "--request-count", str(options.num_requests)),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
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
