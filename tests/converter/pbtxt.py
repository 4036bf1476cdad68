"""The parameters of a config.pbtxt, parsed with the message type that Triton parses it with."""

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2


def read_parameters(text: str) -> dict[str, str]:
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    return {key: value.string_value for key, value in config.parameters.items()}
