"""Runs benchmarks, prints a table of each, and updates `bench.json` in the working directory."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import platform
import statistics
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tests.bench
from tests.bench import BENCHMARKS, Benchmark, CannotMeasureError

RESULTS = Path("bench.json")


def machine() -> str:
    """Returns processor and number of cores, as far as this process may use them."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return f"{models[0] if models else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def measured(benchmark: Benchmark) -> dict[str, Any]:
    """Runs `benchmark` as often as it asks, after one run that does not count, and returns its entry.

    `ours` and `theirs` are medians; `ratio` is the median of ours / theirs within a run, and `spread` the distance
    between the largest and the smallest of our figures.
    """
    benchmark.measure()
    runs = [benchmark.measure() for _ in range(benchmark.runs)]
    ours = [run.ours for run in runs]
    theirs = [run.theirs for run in runs if run.theirs is not None]
    ratios = [run.ours / run.theirs for run in runs if run.theirs]
    return {
        "ours": statistics.median(ours),
        "theirs": statistics.median(theirs) if theirs else None,
        "ratio": statistics.median(ratios) if ratios else None,
        "unit": benchmark.unit,
        "runs": len(runs),
        "spread": max(ours) - min(ours),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in benchmark.packages}},
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
