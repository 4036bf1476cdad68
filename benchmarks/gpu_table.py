"""The GPU section of docs/benchmarks.md: this engine beside its peers on one kind of GPU."""

import msgspec
from rich.box import MARKDOWN
from rich.table import Table

from limpet.benchmarks import result
from limpet.benchmarks.markdown_table import render
from limpet.benchmarks.memory_plan import (
    GPU_GIB,
    RATE_GB_S,
    TAKEN_GIB,
    MeasuredRun,
    RankPlan,
    memory_table,
    step_table,
)
from limpet.benchmarks.model_shapes import SHAPES
from limpet.benchmarks.result import RESULTS, Result

PEERS = RESULTS / "peers-nvidia-h200.jsonl"
HEAD = """\
## {model} on one {gpu}

`limpet-bench engine --model {model}`: {dtype}, random weights, greedy, 256 slots, session length 4096, 8192
prompt tokens a step, CUDA graphs; {date}, commit {commit}, torch {torch}, Triton {triton}, blocks of 64 tokens. decode:
128 tokens in, 256 out, steady step while all decode; prefill: 16 × 2048 tokens in, 1 out; sharegpt: 1000 requests, 256
in flight. The peers were measured on the same kind of machine with the same requests ({peers}).
"""

SEVERAL_HEAD = """\
## Several {gpu}s of one host

`limpet-bench engine --model … --tp 2`, the rest as above; {date}, commit {commit}. Efficiency: what one GPU takes over
what so many take, divided by their number. NVLink multicast is off. A first look: each row is one run after a warm-up.
"""

PLAN_HEAD = f"""\
## Memory of DeepSeek-V2 (236 B) on four and eight GPUs

`python -m benchmarks.memory_plan`: planned, not measured. Each rank's part is built of meta tensors by the engine's own
code and added up by the loader's; {GPU_GIB:g} GiB a GPU, {TAKEN_GIB:g} of them for steps, CUDA graphs and CUDA itself.
"""
ADDED_US = 10.0  # two sums a layer; Llama-2-13B on two GPUs takes about 4 µs for each
STEPS_HEAD = f"""\
Decode steps, predicted and not measured: the bytes that a GPU reads at {RATE_GB_S:g} GB/s, and for each layer what
V2-Lite's layers took beyond their reading on one GPU, with {ADDED_US:g} µs for its two sums over the GPUs.
"""


class PeerFigures(msgspec.Struct, frozen=True):
    """A peer's row: milliseconds a step for decode, input tokens/s for prefill, requests/s for sharegpt."""

    engine: str
    model: str
    part: str
    concurrency: int
    figure: float
    ttft_ms_p50: float | None = None
    tp: int = 1


SERVED_HEAD = """\
## Through tritonserver on one {gpu}

`python -m benchmarks.served`: limpet-serve and gRPC streaming, load from several processes of the same machine, each
figure the median of {runs} runs; {date}, commit {commit}.
"""


def gpu_sections() -> list[str]:
    """A section for each model that was measured on one GPU, then one for several GPUs, from the newest lines."""
    found = [each for path in sorted(RESULTS.glob("*-engine.jsonl")) for each in result.read(path) if each.gpu]
    peers = [msgspec.json.decode(line, type=PeerFigures) for line in PEERS.read_bytes().splitlines()]
    alone, alone_peers = [each for each in found if each.tp == 1], [peer for peer in peers if peer.tp == 1]
    models = sorted({each.model for each in alone})
    sections = [_section([each for each in alone if each.model == model], alone_peers) for model in models]
    served = [each for path in sorted(RESULTS.glob("*-served.jsonl")) for each in result.read(path) if each.gpu]
    return [*sections, *_several(found, peers), *_served(served), _plan(alone)]


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
        commit=", ".join(dict.fromkeys(each.commit for each in (*newest.values(), *fixed.values()))),
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
        table.add_row(label, _unit(part), *shown, *figures, f"{each.ttft_ms_p50:.0f}" if each.ttft_ms_p50 else "")
    sizes = Table("block size", "decode 256, ms a step", "prefill, input tokens/s", box=MARKDOWN)
    for size in sorted({size or 0 for _, _, size in newest}):
        both = [_figure(newest.get(case)) for case in (("decode", 256, size), ("prefill", 16, size))]
        sizes.add_row(str(size), *(f"{figure:,.2f}" if figure else "" for figure in both))
    return "\n".join((head, render(table), render(sizes)))


def _served(found: list[Result]) -> list[str]:
    """The same requests through tritonserver and gRPC."""
    served = {(each.model, each.part, each.concurrency): each for each in found if each.via == "grpc"}
    if not served:
        return []
    columns = ("model", "part", "streams", "front ends", "requests/s", "output tokens/s", "TTFT p50, ms", "ITL p99, ms")
    table = Table(*columns, box=MARKDOWN)
    for (model, part, concurrency), each in sorted(served.items()):
        rates = [f"{figure or 0:,.1f}" for figure in (each.req_s, each.out_tok_s, each.ttft_ms_p50, each.itl_ms_p99)]
        table.add_row(model, part, str(concurrency), str(each.front_ends), *rates)
    first = next(iter(served.values()))
    head = SERVED_HEAD.format(gpu=first.gpu, date=first.date, commit=first.commit, runs=first.runs)
    return [head + "\n" + render(table)]


def _several(found: list[Result], peers: list[PeerFigures]) -> list[str]:
    """Models on several GPUs beside one, and how much of the best that so many could give they do."""
    newest = {(each.model, each.part, each.concurrency, each.tp): each for each in found if not each.deterministic}
    shared = [each for each in newest.values() if each.tp > 1]
    if not shared:
        return []
    theirs = {(peer.engine, peer.model, peer.part, peer.concurrency, peer.tp): peer.figure for peer in peers}
    names = sorted({peer.engine for peer in peers if peer.tp > 1})
    columns = ("model", "GPUs", "part", "figure", "limpet", "on one", "efficiency", *names, "GB a GPU")
    table = Table(*columns, box=MARKDOWN)
    for each in sorted(shared, key=lambda one: (one.model, one.tp)):
        case = each.model, each.part, each.concurrency
        alone = _figure(newest.get((*case, 1)))
        gain = (alone / _figure(each) if each.part == "decode" else _figure(each) / alone) if alone else 0.0
        table.add_row(
            each.model,
            str(each.tp),
            f"{each.part} {each.concurrency}" if each.part == "decode" else each.part,
            _unit(each.part),
            f"{_figure(each):,.2f}",
            f"{alone:,.2f}" if alone else "",
            f"{gain / each.tp:.0%}" if alone else "",
            *(f"{theirs[key]:g}" if (key := (name, *case, each.tp)) in theirs else "" for name in names),
            f"{each.mem_gb or 0:.0f}",
        )
    return [SEVERAL_HEAD.format(gpu=shared[0].gpu, date=shared[0].date, commit=shared[0].commit) + "\n" + render(table)]


def _plan(alone: list[Result]) -> str:
    """What nobody could measure yet."""
    lite = {
        each.concurrency or 0: each.step_ms
        for each in alone
        if (each.model, each.part, each.block_size, each.deterministic) == ("deepseek-v2-lite", "decode", 64, False)
        and each.step_ms is not None
    }
    run = MeasuredRun(RankPlan.of(SHAPES["deepseek-v2-lite"], 0, 1), "V2-Lite on one GPU", lite, ADDED_US)
    tables = [render(memory_table("deepseek-v2", (4, 8))), STEPS_HEAD, render(step_table("deepseek-v2", (4, 8), run))]
    return "\n".join((PLAN_HEAD, *tables))


def _unit(part: str) -> str:
    return {"decode": "ms a step", "prefill": "input tokens/s"}.get(part, "requests/s")


def _figure(each: Result | None) -> float:
    if each is None:
        return 0.0
    return {"decode": each.step_ms, "prefill": each.in_tok_s}.get(each.part, each.req_s) or 0.0
