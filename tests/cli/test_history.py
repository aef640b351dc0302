"""`art-ray history`, and what draws its curves."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from art_ray.cli.plots import Curve, draw, write_png
from art_ray.ledger.history import StepMeans
from tests.cli.made import json_of, refused, succeed
from tests.ledger.made import ledger_at


def test_the_overview_has_each_metric_with_its_last_lowest_and_highest_value(base):
    found = json_of("history", "demo/agent", "--base-path", base)
    assert found["metrics"]["val/reward"] == {"lines": 3, "last_step": 2, "last": 1.0, "low": 0.25, "high": 1.0}
    assert (found["run"], found["skipped_lines"]) == ("demo/agent", 0)
    assert "train/reward_std_dev" in succeed("history", "demo/agent", "--base-path", base)


def test_a_metric_that_is_always_null_is_null_and_not_nan(tmp_path):
    ledger_at(tmp_path).log(None, split="train", step=0, metrics={"loss": float("nan")})
    found = json_of("history", "demo/agent", "--base-path", tmp_path)["metrics"]["train/loss"]
    assert found == {"lines": 0, "last_step": None, "last": None, "low": None, "high": None}
    assert json_of("history", "demo/agent", "--base-path", tmp_path, "--metric", "train/loss")["metrics"] == {
        "train/loss": {"steps": [], "values": []}
    }
    assert "–" in succeed("history", "demo/agent", "--base-path", tmp_path)
    succeed("history", "demo/agent", "--base-path", tmp_path, "--metric", "train/loss", "--plot")


def test_metrics_are_shown_step_by_step_as_means_over_the_lines_of_a_step(base):
    ledger_at(base).log(None, split="val", step=2, metrics={"reward": 0.0})
    options = ("history", "demo/agent", "--base-path", base, "--metric", "val/reward", "--metric", "train/reward")
    assert json_of(*options)["metrics"]["val/reward"] == {"steps": [0, 1, 2], "values": [0.25, 0.5, 0.5]}
    rows = [line.split() for line in succeed(*options).splitlines()]
    assert rows[0] == ["step", "val/reward", "train/reward"]
    assert rows[2:] == [["0", "0.25", "0.25"], ["1", "0.5", "0.5"], ["2", "0.5", "1"]]


def test_the_table_ends_with_the_newest_steps_and_says_that_there_are_more(base):
    options = ("history", "demo/agent", "--base-path", base, "--metric", "val/reward")
    lines = succeed(*options, "--last", 1).splitlines()
    assert lines[2].split() == ["2", "1"]
    assert lines[3] == "2 earlier steps: --last 0 shows all"
    assert len(succeed(*options, "--last", 0).splitlines()) == 5


def test_an_unknown_metric_is_bad_usage_with_the_nearest_one(base):
    message = refused("history", "demo/agent", "--base-path", base, "--metric", "val/rewrd")
    assert "no metric 'val/rewrd' (nearest: 'val/reward')" in message
    assert "train/exception_rate" in message


def test_a_run_without_a_history_has_no_metrics_yet(tmp_path):
    ledger_at(tmp_path).write_model()
    assert succeed("history", "demo/agent", "--base-path", tmp_path) == "demo/agent has no history yet\n"
    message = refused("history", "demo/agent", "--base-path", tmp_path, "--metric", "val/reward")
    assert "There are: none yet." in message


def test_a_curve_is_drawn_in_the_terminal_without_colours_where_it_is_none(base):
    printed = succeed("history", "demo/agent", "--base-path", base, "--metric", "val/reward", "--plot")
    assert "┌──" in printed
    assert "\x1b" not in printed


def test_a_curve_is_drawn_into_a_png_file(base, tmp_path):
    path = tmp_path / "curve.png"
    found = json_of("history", "demo/agent", "--base-path", base, "--metric", "val/reward", "--png", path)
    assert found["metrics"]["val/reward"]["steps"] == [0, 1, 2]
    with Image.open(path) as image:
        image.load()
        assert (image.format, image.size) == ("PNG", (1080, 600))


def test_drawings_do_not_mix_with_json_and_need_a_metric_and_a_folder(base, tmp_path):
    options = ("history", "demo/agent", "--base-path", base)
    assert "leave one out" in refused(*options, "--metric", "val/reward", "--plot", "--json")
    assert "name them" in refused(*options, "--plot")
    message = refused(*options, "--metric", "val/reward", "--png", tmp_path / "no/curve.png")
    assert f"there is no folder {tmp_path / 'no'}" in message


@pytest.mark.parametrize(("package", "option"), [("matplotlib", ["--png", "x.png"]), ("plotext", ["--plot"])])
def test_without_its_package_a_drawing_is_refused_with_the_extra_that_has_it(base, monkeypatch, package, option):
    real = importlib.import_module

    def without(name):
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=package)
        return real(name)

    monkeypatch.setattr("importlib.import_module", without)
    message = refused("history", "demo/agent", "--base-path", base, "--metric", "val/reward", *option)
    assert f"needs {package}, which is not installed: pip install 'art-ray[plot]'" in message


ODD_LABELS = ["_private", "$a_{", "$\\frac{$", "日本", "a/b"]


def test_labels_are_texts_whatever_they_look_like(tmp_path):
    curves = [Curve(label, StepMeans(np.arange(3), np.arange(3.0) + i)) for i, label in enumerate(ODD_LABELS)]
    write_png(tmp_path / "curves.png", "$\\odd{$", curves)
    drawn = draw("title", curves)
    assert all(label in drawn for label in ODD_LABELS)


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5], [1e300, -1e300], [1e300, 1e300], [0.0, 5e-324]])
def test_a_curve_of_odd_numbers_is_drawn(tmp_path, capsys, values):
    curves = [Curve("a", StepMeans(np.arange(len(values)), np.array(values)))]
    assert "┌" in draw("a", curves)
    write_png(tmp_path / "a.png", "a", curves)
    assert capsys.readouterr() == ("", "")


def test_a_curve_of_a_million_steps_is_drawn_by_averages_of_neighbours():
    steps = np.arange(1_000_000)
    drawn = draw("a", [Curve("a", StepMeans(steps, steps % 2.0))])
    averages = draw("a", [Curve("a", StepMeans(steps[250:-249:500], np.full(2000, 0.5)))])
    assert drawn.splitlines()[:-2] == averages.splitlines()[:-2]  # below are the ticks


MEASURED = """
import re, sys
from art_ray.cli import main
try:
    main()
finally:  # not ru_maxrss, which a process inherits from the one that started it
    print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1], file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["history"], ["history", "--metric", "val/reward"], ["runs"]])
def test_a_million_lines_take_no_more_memory_than_a_hundred_thousand(tmp_path, arguments):
    peaks = []
    for number in (100_000, 1_000_000):
        folder = ledger_at(tmp_path / str(number)).folder
        folder.mkdir(parents=True)
        row = {"train/loss": 0.5, "recorded_at": "2026-01-01T00:00:00"}
        lines = [json.dumps({"val/reward": step / 7, "step": step, **row}) for step in range(1000)]
        (folder / "history.jsonl").write_text("\n".join(lines * (number // 1000)) + "\n")
        command, *options = arguments
        where = tmp_path / str(number) if command == "runs" else folder
        process = subprocess.run(
            [sys.executable, "-c", MEASURED, command, str(where), *options, "--json"],
            capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        json.loads(process.stdout)
        peaks.append(int(process.stderr.split()[-1]) // 1024)
    assert peaks[1] - peaks[0] < 25, f"{peaks} MB"
