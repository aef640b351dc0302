"""Benchmarks: `python -m tests.bench [name]`, or `make bench ONLY=name`.

A benchmark is a function of a module `bench_*.py` here, registered under the name of its figure. It measures once and
says what it found; the runner repeats it, prints the table and keeps the entry of `bench.json` up to date.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BENCHMARKS: dict[str, Benchmark] = {}


class CannotMeasureError(Exception):
    """The benchmark needs what this machine lacks; the message says what and how to get it."""


@dataclass(frozen=True)
class Measured:
    """One run: our figure, and that of whatever it is compared with in the same run, if anything."""

    ours: float
    theirs: float | None = None


@dataclass(frozen=True)
class Benchmark:
    """A figure that can be measured again and again."""

    name: str
    unit: str
    runs: int
    packages: tuple[str, ...]
    """Distributions whose versions belong to the figure."""
    measure: Callable[[], Measured]


def benchmark(
    name: str, *, unit: str, runs: int = 5, packages: tuple[str, ...] = ()
) -> Callable[[Callable[[], Measured]], Callable[[], Measured]]:
    """Registers the decorated function as the benchmark `name`."""

    def register(measure: Callable[[], Measured]) -> Callable[[], Measured]:
        BENCHMARKS[name] = Benchmark(name, unit, runs, packages, measure)
        return measure

    return register
