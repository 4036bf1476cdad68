"""How a channel to the server is set up, the same for the blocking and the asyncio client."""

from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from limpet.client.errors import InvalidRequest, NotFound
from limpet.client.wire import ADMIN_MODEL

ADMIN_TIMEOUT_S = 5.0
READY_TIMEOUT_S = 1.0  # ready means: answered within a second
PROBE_AFTER_S = 10.0  # a stream silent for so long makes the client ask whether the server is still there
PROBE_TIMEOUT_S = 5.0

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # After a restart of the server the next request shall find it at once, not after a long back-off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
]


def check_address(address: str) -> str:
    """The address if it is HOST:PORT, else InvalidRequest."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise InvalidRequest(f"{address!r} is no server address: it must be HOST:PORT, such as 127.0.0.1:8001.")
    return address


def loaded_models(index: pb.RepositoryIndexResponse) -> list[str]:
    """Names of the models that are loaded, limpet_admin left out."""
    return sorted({model.name for model in index.models if model.state == "READY"} - {ADMIN_MODEL})


def speaks_contract(config: pb.ModelConfigResponse) -> bool:
    """Whether a model takes this client's tensors and streams: aliases may have a batch dimension, or one response."""
    names = {each.name for each in config.config.input}
    is_plain = config.config.max_batch_size == 0 and config.config.model_transaction_policy.decoupled
    return bool(is_plain) and {"text_input", "messages"} <= names


def only_model(names: list[str], address: str) -> str:
    """The one name in the list; raises NotFound if there is none, InvalidRequest if there are several."""
    if not names:
        raise NotFound(f"{address} serves no Limpet model.")
    if len(names) > 1:
        raise InvalidRequest(f"{address} serves several models, so name one: {', '.join(names)}.")
    return names[0]


def reason_not_ready(status: Mapping[str, Any]) -> str | None:
    """None if limpet_admin's `status` says that requests are answered now, else why not."""
    return None if status.get("ready") else str(status.get("reason") or "the engine is not ready.")
