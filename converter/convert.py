"""One conversion: open the source, plan it, write it, put it in place."""

import hashlib
import shutil
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import prod
from pathlib import Path

import msgspec
import torch

from limpet.backend.checkpoint import (
    FORMAT_VERSION,
    CheckpointDir,
    DType,
    FileEntry,
    Manifest,
    ModelConfig,
    TokenizerConfig,
)
from limpet.backend.config import EngineConfig
from limpet.converter.chat_template import is_append_only
from limpet.converter.errors import ConversionError
from limpet.converter.gguf_source import open_gguf
from limpet.converter.hf_source import open_hf_folder
from limpet.converter.rules import Layout, Step, plan_steps
from limpet.converter.source import Source
from limpet.converter.weights import Progress, plan_shards, torch_dtype, weight_bytes, write_weights
from limpet.converter.workspace import (
    add_admin_model,
    model_name,
    published,
    repository_of,
    require_free,
    write_model_files,
)


@dataclass(frozen=True)
class Plan:
    """Everything a conversion will do, known before a byte is written."""

    source: Source
    config: ModelConfig
    tokenizer_config: TokenizerConfig
    engine: EngineConfig
    shards: list[list[Step]]
    workspace: Path
    name: str
    warnings: tuple[str, ...]

    @property
    def target(self) -> Path:
        return repository_of(self.workspace) / self.name

    @property
    def num_parameters(self) -> int:
        return sum(prod(step.shape) for shard in self.shards for step in shard)

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.shards, torch_dtype(self.config))


def open_source(path: Path) -> Source:
    """A GGUF file or a Hugging Face folder; raises ConversionError for anything else."""
    if path.is_dir():
        return open_hf_folder(path)
    if path.suffix == ".gguf" and path.is_file():
        return open_gguf(path)
    if not path.exists():
        raise ConversionError(f"{path} does not exist.")
    raise ConversionError(f"{path} is neither a GGUF file nor a folder with a checkpoint.")


def make_plan(
    path: Path, workspace: Path, name: str | None, dtype: DType | None, engine: EngineConfig, force: bool = False
) -> Plan:
    """Check the source against the rules and say what will be written; `dtype` None keeps the source's.

    Raises ConversionError for everything that is wrong with the source or the target before writing.
    """
    source = _settle_tied_head(open_source(path))
    config = msgspec.structs.replace(source.config, dtype=dtype or source.config.dtype)
    steps = plan_steps(source.layout, config, source.store.tensors)
    _require_vocabulary(source, config)
    tokenizer_config, warnings = _settle_template(source)
    shards = plan_shards(steps, torch_dtype(config))
    chosen = model_name(name or source.name)
    plan = Plan(source, config, tokenizer_config, engine, shards, workspace, chosen, (*source.warnings, *warnings))
    require_free(plan.target, force)
    return plan


def convert(plan: Plan, progress: Progress) -> Manifest:
    """Write the planned model; returns its manifest. After any failure the target is as it was before."""
    _require_space(plan)
    with published(plan.target) as folder:
        write_model_files(folder, plan.name, plan.engine)
        checkpoint = CheckpointDir(folder)
        checkpoint.folder.mkdir()
        entries = _write_small_files(plan, checkpoint)
        entries |= write_weights(checkpoint.folder, plan.shards, plan.source.store, plan.config, progress)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            limpet_version=version("limpet"),
            source=f"{plan.source.kind}: {plan.source.name}",
            num_parameters=plan.num_parameters,
            files=entries,
        )
        checkpoint.manifest_path.write_bytes(_pretty(manifest))
    add_admin_model(plan.target.parent)
    return manifest


def _settle_tied_head(source: Source) -> Source:
    """Decide for a tied checkpoint that also ships a head: the same one is left out, another one is kept.

    transformers decides so too: a head that differs from the embedding is no tied one, whatever the configuration says.
    """
    heads = {rule.target: rule.parts[0].source for rule in source.layout.rules}
    head, embedding = heads["lm_head.weight"], heads["embed_tokens.weight"]
    tensors = source.store.tensors
    if not source.config.tie_word_embeddings or head not in tensors or embedding not in tensors:
        return source
    if torch.equal(source.store.read(head), source.store.read(embedding)):
        layout = Layout(source.layout.rules, (*source.layout.ignored, head.replace(".", r"\.")))
        return replace(source, layout=layout)
    warning = f"The configuration ties the output head to the embedding, but {head} differs from it: kept as its own."
    config = msgspec.structs.replace(source.config, tie_word_embeddings=False)
    return replace(source, config=config, warnings=(*source.warnings, warning))


def _require_vocabulary(source: Source, config: ModelConfig) -> None:
    highest = max(source.tokenizer.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= config.vocab_size:
        raise ConversionError(
            f"The tokenizer has ids up to {highest}, but the model's vocabulary has {config.vocab_size} entries."
        )


def _settle_template(source: Source) -> tuple[TokenizerConfig, list[str]]:
    config = source.tokenizer.config
    if source.tokenizer.chat_template is None:
        return config, ["The checkpoint has no chat template: sessions append raw text (see --chat-template)."]
    append_only = is_append_only(source.tokenizer.chat_template, config)
    warnings = (
        []
        if append_only
        else ["The chat template rewrites earlier turns: a session's next turn recomputes what changed."]
    )
    return msgspec.structs.replace(config, append_only_template=append_only), warnings


def _require_space(plan: Plan) -> None:
    existing = next(folder for folder in (plan.workspace, *plan.workspace.resolve().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < plan.weight_bytes:
        raise ConversionError(
            f"{existing} has {free / 1e9:.1f} GB free, the weights need {plan.weight_bytes / 1e9:.1f} GB."
        )


def _write_small_files(plan: Plan, checkpoint: CheckpointDir) -> dict[str, FileEntry]:
    contents = {
        checkpoint.model_path: _pretty(plan.config),
        checkpoint.tokenizer_path: plan.source.tokenizer.tokenizer.to_str().encode(),
        checkpoint.tokenizer_config_path: _pretty(plan.tokenizer_config),
    }
    if plan.source.tokenizer.chat_template is not None:
        contents[checkpoint.chat_template_path] = plan.source.tokenizer.chat_template.encode()
    for path, content in contents.items():
        path.write_bytes(content)
    return {path.name: FileEntry(len(data), hashlib.sha256(data).hexdigest()) for path, data in contents.items()}


def _pretty(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value)) + b"\n"
