"""limpet-convert: a checkpoint in, a model for tritonserver out."""

import argparse
import errno
import signal
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

from limpet.backend.config import ConfigError, EngineConfig
from limpet.converter.convert import convert, make_plan
from limpet.converter.errors import ConversionError
from limpet.converter.report import print_next_steps, print_plan, print_warnings, progress_bar

_DESCRIPTION = """\
Turn a checkpoint into a model that tritonserver serves with Limpet.

SOURCE is a GGUF file of any quantisation, or a folder as Hugging Face publishes it (config.json, safetensors,
tokenizer.json). The result is WORKSPACE/model_repository/NAME: configuration, weights, tokenizer, chat template
and a manifest with checksums. The source is only read; nothing in it is executed."""

_EXAMPLES = """\
examples:
  limpet-convert SmolLM2-135M-Instruct.Q4_1.gguf --name smollm2
  limpet-convert /models/Llama-2-7b-chat-hf --dst /data/workspace --dtype bfloat16
exit codes: 0 done, 1 the source or the target is unusable (one sentence says why), 2 wrong usage, 130 interrupted"""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminated)
    console = Console(stderr=True)
    try:
        return _run(options, console)
    except (ConversionError, ConfigError) as error:
        return _fail(console, str(error))
    except OSError as error:
        return _fail(console, _sentence(error))
    except KeyboardInterrupt:
        console.print("Interrupted: nothing was changed.")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="limpet-convert",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", type=Path, help="GGUF file or Hugging Face folder")
    parser.add_argument("--dst", metavar="WORKSPACE", type=Path, default=Path("workspace"), help="default: workspace")
    parser.add_argument("--name", help="the model's name; default: the source's")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="type of the weights on disk; auto keeps the checkpoint's, and writes float32 for a GGUF file",
    )
    parser.add_argument("--force", action="store_true", help="replace the model if it exists")
    return parser


def _run(options: argparse.Namespace, console: Console) -> int:
    dtype = None if options.dtype == "auto" else options.dtype
    plan = make_plan(options.source, options.dst, options.name, dtype, EngineConfig(), options.force)
    print_warnings(console, plan)
    print_plan(console, plan)
    with progress_bar(console, plan) as progress:
        manifest = convert(plan, progress)
    print_next_steps(Console(), plan, manifest)
    return 0


def _fail(console: Console, sentence: str) -> int:
    console.print(f"[red]limpet-convert:[/] {escape(sentence)}", highlight=False, soft_wrap=True)
    return 1


def _sentence(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"The disk is full ({error.strerror}): nothing was changed."
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}."


def _terminated(signum: int, frame: object) -> NoReturn:
    # Ends like Ctrl-C, so that the temporary folder goes.
    raise KeyboardInterrupt
