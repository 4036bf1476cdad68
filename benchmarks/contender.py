"""What is measured, each in a child process of its own with its model loaded; the parent lets one run at a time."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Protocol

from limpet.benchmarks.timing import Run
from limpet.benchmarks.workload import Request


class Runner(Protocol):
    """Something that answers requests."""

    def run(self, requests: list[Request], concurrency: int) -> Run: ...


_runner: Runner  # of this child process


class Contender:
    """A child process with the runner that `load(*arguments)` gave there; leave the `with` block to end it."""

    def __init__(self, load: Callable[..., Runner], *arguments: object) -> None:
        self._process = ProcessPoolExecutor(1, get_context("spawn"), initializer=partial(_load, load, *arguments))

    def run(self, requests: list[Request], concurrency: int) -> Run:
        return self._process.submit(_run, requests, concurrency).result()

    def __enter__(self) -> "Contender":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.shutdown()


def _load(load: Callable[..., Runner], *arguments: object) -> None:
    global _runner
    _runner = load(*arguments)


def _run(requests: list[Request], concurrency: int) -> Run:
    return _runner.run(requests, concurrency)
