"""Runs benchmarks, prints a table of each, and updates `bench.json` in the working directory."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import itertools
import json
import os
import pkgutil
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tests.bench
from tests.bench import BENCHMARKS, Benchmark, CannotMeasureError, Measured

RESULTS = Path("bench.json")


def machine() -> str:
    """Returns processor and number of cores, as far as this process may use them."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return f"{models[0] if models else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def runs_of(benchmark: Benchmark) -> list[Measured]:
    """Runs `benchmark` as often as it asks, after one run that does not count unless it wants none."""
    num_runs = benchmark.runs + benchmark.is_warmed_up
    if inspect.isgeneratorfunction(benchmark.measure):
        with contextlib.closing(benchmark.measure()) as runs:
            found = list(itertools.islice(runs, num_runs))
    else:
        found = [benchmark.measure() for _ in range(num_runs)]
    return found[benchmark.is_warmed_up :]


def measured(benchmark: Benchmark) -> dict[str, Any]:
    """Returns the entry of `benchmark`.

    `ours`, `theirs` and `ratio` are averages over the runs, medians unless the benchmark says otherwise; the ratio of a
    run is ours / theirs unless it says otherwise; `spread` is the distance between the largest and the smallest of our
    figures.
    """
    runs = runs_of(benchmark)
    ours = [run.ours for run in runs]
    theirs = [run.theirs for run in runs if run.theirs is not None]
    ratios = [benchmark.compare(run.ours, run.theirs) for run in runs if run.theirs is not None]
    versions = {name: version(name) for name in benchmark.packages}
    for run in runs:
        versions |= run.versions
    return {
        "ours": benchmark.average(ours),
        "theirs": benchmark.average(theirs) if theirs else None,
        "ratio": benchmark.average(ratios) if ratios else None,
        "unit": benchmark.unit,
        "runs": len(runs),
        "spread": max(ours) - min(ours),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **versions},
    }


def main(only: str | None) -> None:
    """Runs all benchmarks, or one."""
    for module in pkgutil.iter_modules(tests.bench.__path__):
        if module.name.startswith("bench_"):
            importlib.import_module(f"tests.bench.{module.name}")
    if only is not None and only not in BENCHMARKS:
        raise SystemExit(f"there is no benchmark {only!r}; there are: {', '.join(sorted(BENCHMARKS))}")
    for name in sorted(BENCHMARKS) if only is None else [only]:
        print(f"\n{name}", flush=True)
        try:
            entry = measured(BENCHMARKS[name])
        except CannotMeasureError as reason:
            print(f"  skipped    {reason}")
            continue
        for key, value in entry.items():
            print(f"  {key:10} {f'{value:.4g}' if isinstance(value, float) else value}")
        entries = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        unfinished = RESULTS.with_suffix(".tmp")
        unfinished.write_text(json.dumps({**entries, name: entry}, indent=2, sort_keys=True) + "\n")
        unfinished.rename(RESULTS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", help="the benchmark to run; all, if there is none")
    main(parser.parse_args().name)
