"""The operations of limpet_admin that the engine answers: JSON in, JSON out."""

import hmac
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from limpet.backend.build import EngineSummary
from limpet.backend.config import EngineConfig
from limpet.backend.core import RequestError
from limpet.backend.link.messages import ERROR_CODES
from limpet.backend.metrics import MetricsSnapshot
from limpet.backend.service import EngineService
from limpet.backend.session_ops import SessionOps

logger = logging.getLogger(__name__)

OPEN_OPS = ("status", "metrics")  # need no key: they tell of no request and change nothing
STALLED_AFTER_S = 60.0  # work but no completed step for so long: not ready


class AdminOps:
    """Dispatches operations by name; `config.admin_key`, if set, must come along with each but OPEN_OPS."""

    def __init__(self, service: EngineService, config: EngineConfig, summary: EngineSummary) -> None:
        self._service = service
        self._config = config
        self._summary = summary
        self._started = time.monotonic()
        self._last_progress = time.monotonic()
        self._last_num_steps = 0
        self._operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "status": self._status,
            "cancel": self._cancel,
            "sessions": SessionOps(service).run,
            "drain": self._drain,
            "metrics": self._metrics,
        }

    def run(self, op: str, arguments: str) -> str:
        """Raises RequestError for an unknown operation, wrong arguments or a wrong key."""
        operation = self._operations.get(op)
        if operation is None:
            raise RequestError("INVALID_ARG", f"Unknown op {op!r}; known are {', '.join(self._operations)}.")
        try:
            decoded = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise RequestError("INVALID_ARG", f"The arguments of op {op} are no valid JSON object: {error}.") from None
        key = str(decoded.pop("admin_key", "") or "")
        if op not in OPEN_OPS and not hmac.compare_digest(key.encode(), self._config.admin_key.encode()):
            raise RequestError("INVALID_ARG", f"op {op} needs the right admin_key.")
        try:
            return msgspec.json.encode(operation(decoded)).decode()
        except RequestError:
            raise
        except Exception:  # a question about the engine must not be its end
            logger.exception("op %s failed.", op)
            raise RequestError("INTERNAL", "The operation failed; the server's log says why.") from None

    def note_progress(self) -> None:
        """Remember whether the step loop moves; call it regularly."""
        engine = self._service.engine
        if engine.num_steps != self._last_num_steps or not engine.has_work:
            self._last_num_steps = engine.num_steps
            self._last_progress = time.monotonic()

    def _status(self, arguments: dict[str, Any]) -> dict[str, Any]:
        engine, scheduler = self._service.engine, self._service.engine.scheduler
        pool, host = engine.cache.pool, engine.cache.host
        is_stalled = time.monotonic() - self._last_progress > STALLED_AFTER_S
        return {
            "ready": not is_stalled and not self._service.is_draining,
            "stalled": is_stalled,
            "draining": self._service.is_draining,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._started, 3),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "requests": len(self._service.requests),
            "sessions": len(self._service.sessions.sessions),
            "steps": engine.num_steps,
            "tokens_out": self._service.metrics.num_tokens_out,
            "preemptions": scheduler.num_preemptions,
            "blocks_free": pool.num_free,
            "blocks_cached": pool.num_cached,
            "blocks_evicted": engine.cache.num_evicted,
            "host_blocks_used": host.num_used if host is not None else 0,
            "blocks_offloaded": engine.cache.num_offloaded,
            "blocks_loaded": engine.cache.num_loaded,
            "engine": msgspec.to_builtins(self._summary),
        }

    def _cancel(self, arguments: dict[str, Any]) -> dict[str, Any]:
        names = {name: str(arguments[name]) for name in ("request_id", "session_id") if arguments.get(name)}
        if len(names) != 1:
            raise RequestError("INVALID_ARG", "op cancel needs either request_id or session_id.")
        return {"cancelled": self._service.cancel(**names)}

    def _drain(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self._service.is_draining = True
        return {"requests": len(self._service.requests)}

    def _metrics(self, arguments: dict[str, Any]) -> dict[str, Any]:
        engine, scheduler, counted = self._service.engine, self._service.engine.scheduler, self._service.metrics
        pool, host = engine.cache.pool, engine.cache.host
        values: dict[str, float] = {
            "limpet_requests_running": len(scheduler.running),
            "limpet_requests_waiting": len(scheduler.waiting),
            "limpet_slots": scheduler.max_rows,
            "limpet_cache_blocks{used}": pool.num_blocks - pool.num_free,
            "limpet_cache_blocks{cached}": pool.num_cached,
            "limpet_cache_blocks{empty}": pool.num_free - pool.num_cached,
            "limpet_host_cache_blocks{used}": host.num_used if host is not None else 0,
            "limpet_host_cache_blocks{empty}": host.num_blocks - host.num_used if host is not None else 0,
            "limpet_sessions": len(self._service.sessions.sessions),
            "limpet_requests_total": counted.num_requests,
            "limpet_tokens_in_total": counted.num_tokens_in,
            "limpet_cached_tokens_total": counted.num_cached_tokens,
            "limpet_tokens_out_total": counted.num_tokens_out,
            "limpet_evictions_total": engine.cache.num_evicted,
            "limpet_blocks_offloaded_total": engine.cache.num_offloaded,
            "limpet_blocks_loaded_total": engine.cache.num_loaded,
            "limpet_preemptions_total": scheduler.num_preemptions,
            "limpet_steps_total": engine.num_steps,
        }
        values |= {f"limpet_errors_total{{{code}}}": counted.errors[code] for code in ERROR_CODES}
        histograms = {
            "limpet_time_to_first_token_seconds": counted.time_to_first_token.state(),
            "limpet_inter_token_latency_seconds": counted.inter_token_latency.state(),
            "limpet_step_seconds": counted.step_time.state(),
        }
        snapshot: dict[str, Any] = msgspec.to_builtins(MetricsSnapshot(os.getpid(), values, histograms))
        return snapshot
