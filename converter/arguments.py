"""The command line of limpet-convert."""

import argparse
from pathlib import Path

from limpet.backend.config import ConfigError, EngineConfig, parse_parameters
from limpet.converter.aliases import KINDS
from limpet.converter.built_in_templates import NAMES
from limpet.converter.engine_settings import describe
from limpet.converter.plan import Options

_DESCRIPTION = """\
Turn a checkpoint into a model that tritonserver serves with Limpet.

SOURCE is one of
  a GGUF file               of any quantisation; weights are dequantised (or a folder with one such file)
  a Hugging Face folder     config.json, *.safetensors or *.bin, tokenizer.json or tokenizer.model
  a Meta folder             params.json, consolidated.*.pth, tokenizer.model (here or one folder up)
of the Llama, Mistral, Qwen2, Qwen3, InternLM2 or DeepSeek-V2 architecture. It is only read; nothing in it is executed.

The result is WORKSPACE/model_repository/NAME: configuration, weights, tokenizer, chat template, and a manifest with
checksums. It appears there complete or not at all."""

_EXAMPLES = """\
examples:
  limpet-convert SmolLM2-135M-Instruct.Q4_1.gguf --name smollm2
  limpet-convert /models/Llama-2-7b-chat-hf --dst /data/workspace --dtype bfloat16 --session-len 4096
  limpet-convert llama-2-7b-chat --chat-template llama2     # Meta's folders have no template of their own
  limpet-convert --check workspace

exit codes: 0 done, 1 the source or the target is unusable (one sentence says why), 2 wrong usage, 130 interrupted"""


def parse_arguments(argv: list[str] | None) -> Options | Path:
    """What to convert, or the path to check; ends the program for --help and for wrong usage (exit code 2)."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if (arguments.source is None) == (arguments.check is None):
        parser.error("give either SOURCE or --check DIR")
    if arguments.check is not None:
        return Path(arguments.check)
    return Options(
        source=arguments.source,
        workspace=arguments.dst,
        name=arguments.name,
        dtype=None if arguments.dtype == "auto" else arguments.dtype,
        chat_template=arguments.chat_template,
        engine=_engine(parser, arguments),
        force=arguments.force,
        link=arguments.link,
        dry_run=arguments.dry_run,
        aliases=tuple(arguments.alias),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="limpet-convert",
        usage="limpet-convert SOURCE [options]\n       limpet-convert --check DIR",
        allow_abbrev=False,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", type=Path, nargs="?", help="the checkpoint: a file or a folder")
    parser.add_argument("--dst", metavar="WORKSPACE", type=Path, default=Path("workspace"), help="default: workspace")
    parser.add_argument("--name", help="the model's name; default: the source's")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="type of the weights on disk; auto keeps the checkpoint's, and writes float32 for a GGUF file",
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE|NAME",
        help=f"a Jinja file, or one of {', '.join(NAMES)}; default: the checkpoint's own, else none (raw mode)",
    )
    parser.add_argument("--force", action="store_true", help="replace the model if it exists")
    parser.add_argument(
        "--link",
        action="store_true",
        help="hard-link the checkpoint's safetensors for the weights that need no change (do not edit them afterwards: "
        "--check would notice); the others are written",
    )
    parser.add_argument(
        "--alias",
        metavar="KIND[=NAME]",
        action="append",
        default=[],
        help=f"add another Triton model in front of the same engine, for other clients: {', '.join(KINDS)}; may be "
        "given several times",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be written, and write nothing")
    parser.add_argument("--check", metavar="DIR", help="verify a converted model (or all of a workspace) instead")
    group = parser.add_argument_group(
        "engine settings", "Written to the model's config.pbtxt, where they can be changed later."
    )
    for name in EngineConfig.__struct_fields__:
        group.add_argument(_flag(name), dest=f"engine_{name}", metavar="VALUE", help=describe(name))
    return parser


def _engine(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> EngineConfig:
    names = EngineConfig.__struct_fields__
    given = {name: value for name in names if (value := getattr(arguments, f"engine_{name}")) is not None}
    try:
        return parse_parameters(given)
    except ConfigError as error:
        parser.error(str(error))


def _flag(name: str) -> str:
    # --dtype is the type on disk.
    return "--compute-dtype" if name == "dtype" else f"--{name.replace('_', '-')}"
