"""What limpet-serve reads of the model repositories that it serves."""

from collections.abc import Iterable
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from limpet.backend.checkpoint import CheckpointDir
from limpet.backend.serve.errors import RefusedError


def admin_keys(repositories: Iterable[Path]) -> dict[str, str]:
    """The parameter `admin_key` of each converted model, by the model's name, "" where none is set; or RefusedError."""
    folders = [folder for repository in repositories for folder in sorted(repository.iterdir())]
    models = [folder for folder in folders if CheckpointDir(folder).manifest_path.is_file()]
    return {model.name: _parameter(model / "config.pbtxt", "admin_key") for model in models}


def _parameter(config: Path, name: str) -> str:
    try:
        parsed = text_format.Parse(config.read_text("utf-8"), model_config_pb2.ModelConfig(), allow_unknown_field=True)
    except (OSError, text_format.ParseError) as error:
        raise RefusedError(f"{config} is no configuration of a Triton model: {error}.") from None
    return str(parsed.parameters[name].string_value) if name in parsed.parameters else ""
