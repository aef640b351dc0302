"""Benchmarks: `python -m tests.bench [name]`, or `make bench ONLY=name`.

A benchmark is a function of a module `bench_*.py` here, registered under the name of its figure. It measures once and
says what it found; the runner repeats it, prints the table and keeps the entry of `bench.json` up to date. One that has
to start something first is a generator: it yields one run after the other, and is closed after the last.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BENCHMARKS: dict[str, Benchmark] = {}


class CannotMeasureError(Exception):
    """The benchmark needs what this machine lacks; the message says what and how to get it."""


@dataclass(frozen=True)
class Measured:
    """One run: our figure, and that of whatever it is compared with in the same run, if anything."""

    ours: float
    theirs: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    """What `theirs` ran with, where that is an environment of its own."""


Measure = Callable[[], Measured] | Callable[[], Iterator[Measured]]


@dataclass(frozen=True)
class Benchmark:
    """A figure that can be measured again and again."""

    name: str
    unit: str
    runs: int
    packages: tuple[str, ...]
    """Distributions whose versions belong to the figure."""
    measure: Measure
    compare: Callable[[float, float], float] = operator.truediv
    """Of ours and theirs of one run: the `ratio`."""
    average: Callable[[Sequence[float]], float] = statistics.median
    """Over the runs."""
    is_warmed_up: bool = True
    """Whether one run that does not count comes first."""


def benchmark(
    name: str, *, unit: str, runs: int = 5, packages: tuple[str, ...] = (), **how: Any
) -> Callable[[Measure], Measure]:
    """Registers the decorated function as the benchmark `name`; `how` are further fields of `Benchmark`."""

    def register(measure: Measure) -> Measure:
        BENCHMARKS[name] = Benchmark(name, unit, runs, packages, measure, **how)
        return measure

    return register
