"""The GPU section of docs/benchmarks.md: this engine beside its peers on one kind of GPU."""

import msgspec
from rich.box import MARKDOWN
from rich.table import Table

from limpet.benchmarks import result
from limpet.benchmarks.markdown_table import render
from limpet.benchmarks.result import RESULTS, Result

PEERS = RESULTS / "peers-nvidia-h200.jsonl"
HEAD = """\
## {model} on one {gpu}

`python -m benchmarks.engine --model {model}`: {dtype}, random weights, greedy, 256 slots, session length 4096, 8192
prompt tokens a step, CUDA graphs; {date}, commit {commit}, torch {torch}, Triton {triton}, blocks of 64 tokens. decode:
128 tokens in, 256 out, steady step while all decode; prefill: 16 × 2048 tokens in, 1 out; sharegpt: 1000 requests, 256
in flight. The peers were measured on the same kind of machine with the same requests ({peers}).
"""


class PeerFigures(msgspec.Struct, frozen=True):
    """A peer's row: milliseconds a step for decode, input tokens/s for prefill, requests/s for sharegpt."""

    engine: str
    model: str
    part: str
    concurrency: int
    figure: float
    ttft_ms_p50: float | None = None


def gpu_sections() -> list[str]:
    """A section for each model that was measured on a GPU, from the newest lines."""
    found = [each for path in sorted(RESULTS.glob("*-engine.jsonl")) for each in result.read(path) if each.gpu]
    peers = [msgspec.json.decode(line, type=PeerFigures) for line in PEERS.read_bytes().splitlines()]
    models = sorted({each.model for each in found})
    return [_section([each for each in found if each.model == model], peers) for model in models]


def _section(measured: list[Result], peers: list[PeerFigures]) -> str:
    newest = {(each.part, each.concurrency, each.block_size): each for each in measured if not each.deterministic}
    fixed = {(each.part, each.concurrency, each.block_size): each for each in measured if each.deterministic}
    first = next(iter(newest.values()))
    peers = [peer for peer in peers if peer.model == first.model]
    names = sorted({peer.engine for peer in peers})
    head = HEAD.format(
        model=first.model,
        gpu=first.gpu,
        dtype=first.dtype,
        date=first.date,
        commit=first.commit,
        torch=first.torch,
        triton=first.triton,
        peers=", ".join(names) or "none yet",
    )
    own = ["limpet", "limpet, deterministic"] if fixed else ["limpet"]
    table = Table("part", "figure", *own, *names, "TTFT p50, ms (limpet)", box=MARKDOWN)
    for (part, concurrency, block_size), each in newest.items():
        if block_size != 64:
            continue
        theirs = {p.engine: p for p in peers if (p.part, p.concurrency) == (part, concurrency)}
        figures = [f"{theirs[name].figure:g}" if name in theirs else "" for name in names]
        label = f"{part} {concurrency}" if part == "decode" else part
        ours = [_figure(each), *([_figure(fixed.get((part, concurrency, block_size)))] if fixed else [])]
        shown = [f"{figure:,.2f}" if figure else "" for figure in ours]
        table.add_row(label, _unit(part), *shown, *figures, f"{each.ttft_ms_p50 or 0:.0f}")
    sizes = Table("block size", "decode 256, ms a step", "prefill, input tokens/s", box=MARKDOWN)
    for size in sorted({size or 0 for _, _, size in newest}):
        both = [_figure(newest.get(case)) for case in (("decode", 256, size), ("prefill", 16, size))]
        sizes.add_row(str(size), *(f"{figure:,.2f}" if figure else "" for figure in both))
    return "\n".join((head, render(table), render(sizes)))


def _unit(part: str) -> str:
    return {"decode": "ms a step", "prefill": "input tokens/s"}.get(part, "requests/s")


def _figure(each: Result | None) -> float:
    if each is None:
        return 0.0
    return {"decode": each.step_ms, "prefill": each.in_tok_s}.get(each.part, each.req_s) or 0.0
