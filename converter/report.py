"""What the user sees of a conversion: a progress bar, warnings and the summary with the commands to go on with."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from limpet.backend.checkpoint import Manifest
from limpet.converter.check import find_models
from limpet.converter.links import link_name
from limpet.converter.plan import Plan
from limpet.converter.weights import Progress as Advance
from limpet.converter.weights import shard_name
from limpet.converter.workspace import repository_of

PORT = 33337


@contextmanager
def progress_bar(console: Console, title: str, total_bytes: int) -> Iterator[Advance]:
    """A bar over so many bytes; yields the function to call with the bytes just done."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(escape(title), total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def print_warnings(console: Console, plan: Plan) -> None:
    for warning in plan.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)


def print_plan(console: Console, plan: Plan) -> None:
    """The facts of the model, one a line."""
    table = Table.grid(padding=(0, 2))
    for label, value in _facts(plan):
        table.add_row(label, escape(value))
    console.print(table)


def print_files(console: Console, plan: Plan) -> None:
    """Every weight that would be written, with the tensors of the source that make it."""
    lines = []
    for number, shard in enumerate(plan.shards, start=1):
        lines.append(f"{shard_name(number, len(plan.shards))}:")
        for step in shard:
            sources = " + ".join(part.source for part in step.parts)
            lines.append(f"    {step.target} {list(step.shape)} = {sources}")
    for path, steps in plan.linked.items():
        lines.append(f"{link_name(path)} -> {path}:")
        lines += [f"    {step.target} {list(step.shape)} = {step.parts[0].source}" for step in steps]
    lines.append(f"\nNothing was written. Without --dry-run this would become {plan.target}.")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def print_next_steps(console: Console, plan: Plan, manifest: Manifest) -> None:
    """Where the model lies and the exact commands to serve it and to chat."""
    total = sum(entry.num_bytes for entry in manifest.files.values())
    which = f" --model {plan.name}" if len(find_models(plan.workspace)) > 1 else ""
    lines = (
        f"\nConverted to {plan.target} ({decimal(total)}). Serve it, then chat from another terminal:",
        f"    limpet-serve --model-repository={repository_of(plan.workspace)} --grpc-port={PORT}",
        f"    limpet-chat 127.0.0.1:{PORT}{which}",
        "or chat at once, with a private server for as long as you chat:",
        f"    limpet-chat {plan.workspace}{which}",
    )
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _facts(plan: Plan) -> list[tuple[str, str]]:
    config = plan.config
    template = "none: raw mode"
    if plan.source.tokenizer.chat_template is not None:
        template = "found" + (", append-only" if plan.tokenizer_config.append_only_template else ", rewrites history")
    return [
        ("Source", plan.source.kind),
        ("Model", f"{plan.name}, {plan.num_parameters / 1e6:,.1f} M parameters, {config.num_layers} layers"),
        ("Weights", f"{config.dtype}, {decimal(plan.total_bytes)}, {decimal(plan.written_bytes)} to write"),
        ("Context", f"{plan.session_len:,} tokens"),
        ("Vocabulary", f"{config.vocab_size:,} entries, end ids {', '.join(map(str, config.eos_token_ids)) or 'none'}"),
        ("Template", template),
    ]
