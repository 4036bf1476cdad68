"""What limpet-serve prints once the server answers."""

from limpet.backend.serve.options import Options


def summary(options: Options, models: list[str], took_s: float) -> str:
    """Where everything is and how to talk to it."""
    rows = [("models", ", ".join(models)), ("gRPC", options.grpc.target)]
    if options.http is not None:
        rows.append(("HTTP", f"http://{options.http.target}/v2/models/{models[0] if models else 'MODEL'}/generate"))
    if options.metrics is not None:
        rows.append(("metrics", f"http://{options.metrics.target}/metrics"))
    rows += [("chat", f"limpet-chat {options.grpc.target}"), ("stop", "Ctrl-C")]
    table = "\n".join(f"  {name:<8} {value}" for name, value in rows)
    return f"limpet-serve: ready after {took_s:.1f} s\n{table}"
