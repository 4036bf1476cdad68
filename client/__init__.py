"""gRPC client library for Limpet."""
