"""The GPU section of docs/benchmarks.md: this engine beside its peers on one kind of GPU."""

from collections.abc import Iterable

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

`limpet-bench engine --model … --tp N`, the rest as above; {date}, commit {commit}. Efficiency: what one GPU takes over
what so many take, divided by their number. NVLink multicast is off. The reference pull request's own figure for
DeepSeek-V2 is 3.627 requests/s on eight A100s.
"""

PLAN_HEAD = f"""\
## DeepSeek-V2 (236 B) on four and eight GPUs: planned, and what four took

`python -m benchmarks.memory_plan`: each rank's part is built of meta tensors by the engine's own code and added up by
the loader's; {GPU_GIB:g} GiB a GPU, {TAKEN_GIB:g} of them for steps, CUDA graphs and CUDA itself. On four GPUs the
loader then had the planned weights, and room for 20.8 GiB of cache, since steps and graphs took less.
"""
V2_LAYERS, V2_RANKS = 26, 2  # the largest part of V2 that two GPUs hold
STEPS_HEAD = f"""\
Decode steps: predicted as the bytes that a GPU reads at {RATE_GB_S:g} GB/s, and for each layer what the {V2_LAYERS}
layers on {V2_RANKS} GPUs took beyond their reading. What four GPUs took was measured before the sum over the ranks and
the norm after it became one kernel.
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

`python -m benchmarks.served`: limpet-serve and gRPC streaming, load from several processes of the same machine;
{date}, commit {commit}.
"""


def gpu_sections() -> list[str]:
    """A section for each model that was measured on one GPU, then one for several GPUs, from the newest lines."""
    found = [each for path in sorted(RESULTS.glob("*-engine.jsonl")) for each in result.read(path) if each.gpu]
    peers = [msgspec.json.decode(line, type=PeerFigures) for line in PEERS.read_bytes().splitlines()]
    alone, alone_peers = [each for each in found if each.tp == 1], [peer for peer in peers if peer.tp == 1]
    models = sorted({each.model for each in alone})
    sections = [_section([each for each in alone if each.model == model], alone_peers) for model in models]
    served = [each for path in sorted(RESULTS.glob("*-served.jsonl")) for each in result.read(path) if each.gpu]
    return [*sections, *_several(found, peers), *_served(served), *_plan(found)]


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
        commit=_commits((*newest.values(), *fixed.values())),
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
    return "\n".join((head, render(table), *_latencies(newest.values()), render(sizes)))


def _latencies(measured: Iterable[Result]) -> list[str]:
    """What users of the field's serving benchmark look at, of the parts with many requests."""
    loads = [each for each in measured if each.part in ("sharegpt", "rate", "fixed") and each.block_size == 64]
    if not loads:
        return []
    columns = ("requests/s", "output tokens/s", "TTFT p50, ms", "TTFT p99, ms", "TPOT mean, ms", "ITL p99, ms")
    table = Table("load", *columns, box=MARKDOWN)
    for each in loads:
        latencies = (each.ttft_ms_p50, each.ttft_ms_p99, each.tpot_ms_mean, each.itl_ms_p99)
        figures = [f"{figure or 0:,.1f}" for figure in (each.req_s, each.out_tok_s, *latencies)]
        table.add_row(_load(each), *figures)
    return [render(table)]


def _load(each: Result) -> str:
    if each.rate is not None:
        return f"rate: {each.req} requests of sharegpt, {each.rate:g} a second (Poisson)"
    if each.part == "fixed":
        return f"fixed: {each.req} of 2048 in, 2048 out, {each.concurrency} in flight"
    return f"{each.part}: {each.req}, {each.concurrency} in flight"


def _served(found: list[Result]) -> list[str]:
    """The same requests through tritonserver and gRPC."""
    served = {(each.model, each.part, each.concurrency): each for each in found if each.via == "grpc"}
    if not served:
        return []
    columns = ("requests/s", "output tokens/s", "TTFT p50, ms", "ITL p99, ms", "runs")
    table = Table("model", "part", "streams", "front ends", *columns, box=MARKDOWN)
    for (model, part, concurrency), each in sorted(served.items()):
        rates = [f"{figure or 0:,.1f}" for figure in (each.req_s, each.out_tok_s, each.ttft_ms_p50, each.itl_ms_p99)]
        table.add_row(model, part, str(concurrency), str(each.front_ends), *rates, str(each.runs))
    first = next(iter(served.values()))
    head = SERVED_HEAD.format(gpu=first.gpu, date=first.date, commit=_commits(served.values()))
    return [head + "\n" + render(table)]


def _several(found: list[Result], peers: list[PeerFigures]) -> list[str]:
    """Models on several GPUs beside one, and how much of the best that so many could give they do."""
    usual = [each for each in found if each.block_size == 64 and not each.deterministic]
    newest = {(each.model, each.part, each.concurrency, each.tp): each for each in usual}
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
    head = SEVERAL_HEAD.format(gpu=shared[0].gpu, date=shared[0].date, commit=_commits(shared))
    return [head + "\n" + render(table)]


def _plan(found: list[Result]) -> list[str]:
    """The largest model, from a run of some of its layers."""
    some, whole = f"deepseek-v2, {V2_LAYERS} layers", "deepseek-v2"
    steps = {(each.model, each.tp, each.concurrency or 0): each.step_ms for each in found if each.step_ms is not None}
    run = {batch: ms for (model, tp, batch), ms in steps.items() if (model, tp) == (some, V2_RANKS)}
    if not run:
        return []
    config = msgspec.structs.replace(SHAPES[whole], num_layers=V2_LAYERS)
    measured = MeasuredRun(RankPlan.of(config, 0, V2_RANKS), f"{V2_LAYERS} layers on {V2_RANKS} GPUs", run)
    taken = {batch: ms for (model, tp, batch), ms in steps.items() if (model, tp) == (whole, 4)}
    degrees = (4, 8)
    predicted = step_table(whole, degrees, measured, found={4: taken} if taken else None)
    return ["\n".join((PLAN_HEAD, render(memory_table(whole, degrees)), STEPS_HEAD, render(predicted)))]


def _commits(measured: Iterable[Result]) -> str:
    return ", ".join(dict.fromkeys(each.commit for each in measured))


def _unit(part: str) -> str:
    return {"decode": "ms a step", "prefill": "input tokens/s"}.get(part, "requests/s")


def _figure(each: Result | None) -> float:
    if each is None:
        return 0.0
    return {"decode": each.step_ms, "prefill": each.in_tok_s}.get(each.part, each.req_s) or 0.0
