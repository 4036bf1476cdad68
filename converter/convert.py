"""Writing a planned model and putting it in place."""

import hashlib
import shutil
from importlib.metadata import version

import msgspec
from rich.filesize import decimal

from limpet.backend.checkpoint import FORMAT_VERSION, CheckpointDir, FileEntry, Manifest
from limpet.converter.aliases import write_alias
from limpet.converter.engine_settings import render_parameters
from limpet.converter.errors import ConversionError
from limpet.converter.links import link_files, link_name
from limpet.converter.plan import Plan
from limpet.converter.rules import Step
from limpet.converter.weights import Progress, write_weights
from limpet.converter.workspace import ADMIN, Face, add_admin_model, published, write_model_files


def convert(plan: Plan, progress: Progress) -> Manifest:
    """Write the planned model; returns its manifest. After any failure the target is as it was before."""
    _require_space(plan)
    aliases = [alias.name for alias in plan.aliases]
    with published(plan.workspace, [plan.name, *aliases, ADMIN]) as building:  # a polling server finds the model first
        write_model_files(building / plan.name, Face(), render_parameters(plan.engine))
        manifest = _write_checkpoint(plan, CheckpointDir(building / plan.name), progress)
        for alias in plan.aliases:
            write_alias(building, alias, plan.name)
        add_admin_model(building, plan.target.parent)
    return manifest


def _write_checkpoint(plan: Plan, checkpoint: CheckpointDir, progress: Progress) -> Manifest:
    checkpoint.folder.mkdir()
    entries = _write_small_files(plan, checkpoint)
    entries |= write_weights(checkpoint.folder, plan.shards, plan.source.store, plan.config, progress)
    entries |= link_files(checkpoint.folder, plan.linked, plan.source.store, plan.config, progress)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        limpet_version=version("limpet"),
        source=f"{plan.source.kind}: {plan.source.name}",
        num_parameters=plan.num_parameters,
        files=entries,
        linked={link_name(path): _link_names(steps) for path, steps in plan.linked.items()},
    )
    checkpoint.manifest_path.write_bytes(_pretty(manifest))
    return manifest


def _link_names(steps: list[Step]) -> dict[str, str]:
    return {step.parts[0].source: step.target for step in steps}


def _require_space(plan: Plan) -> None:
    existing = next(folder for folder in (plan.workspace, *plan.workspace.resolve().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < plan.written_bytes:
        raise ConversionError(f"{existing} has {decimal(free)} free, the weights need {decimal(plan.written_bytes)}.")


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
