"""limpet-convert: a checkpoint in, a model for tritonserver out."""

import errno
import signal
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from limpet.backend.checkpoint import CheckpointDir, CheckpointError
from limpet.converter.arguments import parse_arguments
from limpet.converter.check import check_model, find_models
from limpet.converter.convert import convert
from limpet.converter.errors import ConversionError
from limpet.converter.plan import Options, make_plan
from limpet.converter.report import print_files, print_next_steps, print_plan, print_warnings, progress_bar
from limpet.converter.workspace import INTERRUPTIONS, uninterrupted


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    wanted = parse_arguments(argv)
    for number in INTERRUPTIONS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupted)
    console = Console(stderr=True)
    try:
        return _check(wanted, console) if isinstance(wanted, Path) else _convert(wanted, console)
    except (ConversionError, CheckpointError) as error:
        return _fail(console, str(error))
    except OSError as error:
        return _fail(console, _sentence(error))
    except KeyboardInterrupt:
        console.print("Interrupted: nothing was changed.")
        return 130


def _convert(options: Options, console: Console) -> int:
    plan = make_plan(options)
    print_warnings(console, plan)
    print_plan(console, plan)
    if options.dry_run:
        print_files(Console(), plan)
        return 0
    with progress_bar(console, f"Converting {plan.name}", plan.total_bytes) as progress:
        manifest = convert(plan, progress)
    with uninterrupted():  # it is done: nobody may read that nothing was changed
        print_next_steps(Console(), plan, manifest)
    return 0


def _check(path: Path, console: Console) -> int:
    for root in find_models(path):
        total = sum(entry.num_bytes for entry in CheckpointDir(root).manifest().files.values())
        with progress_bar(console, f"Checking {root.name}", total) as progress:
            manifest = check_model(root, progress)
        line = f"{root.name} is complete and unchanged: {len(manifest.files)} files, {decimal(total)}."
        Console().print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def _fail(console: Console, sentence: str) -> int:
    console.print(f"[red]limpet-convert:[/] {escape(sentence)}", highlight=False, soft_wrap=True)
    return 1


def _sentence(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"The disk is full ({error.strerror}): nothing was changed."
    if error.errno == errno.EXDEV:
        return "--link needs the source and the workspace on one file system."
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}."


def _interrupted(signum: int, frame: object) -> NoReturn:
    # Whatever it is ends like Ctrl-C, so that the temporary folder goes.
    raise KeyboardInterrupt
