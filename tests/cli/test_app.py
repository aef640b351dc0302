"""What all commands have in common, some of it with real processes."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from art_ray.cli.app import app
from tests.cli.made import HOSTILE, OBEYED, call, commit, json_of, made_run, odd_group, refused, succeed
from tests.ledger.made import ledger_at

ROOT = Path(__file__).resolve().parents[2]
ART_RAY = [sys.executable, "-m", "art_ray.cli"]
ART_FILES = ROOT / "tests/ledger/art_0_5_18"
COMMANDS = [command.callback.__name__.replace("_", "-") for command in app.registered_commands]
HEAVY = ("ray", "torch", "vllm", "transformers", "matplotlib", "plotext", "polars", "pyarrow", "openai")


def process(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    command = [*ART_RAY, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)


def test_the_installed_script_is_this_program():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"] == {"art-ray": "art_ray.cli:main"}
    assert process("--help").stdout.startswith("Usage: art-ray ")


def test_help_comes_at_once_and_loads_nothing_heavy():
    program = (
        "import sys\nfrom art_ray.cli import main\n"
        "try:\n    main()\nfinally:\n"
        f"    print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        found = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True)
        seconds.append(time.monotonic() - started)
    assert found.stderr.strip() == "[]"
    assert min(seconds) < 1


@pytest.mark.parametrize("command", ["runs", "history", "show", "replay", "delete-checkpoints"])
def test_a_command_loads_no_ray_torch_or_engine(base, command):
    commit(base / "demo/models/agent", 1)
    program = (
        "import sys\nfrom art_ray.cli import main\n"
        "try:\n    main()\nfinally:\n"
        "    print([name for name in ('ray', 'torch', 'vllm', 'transformers') if name in sys.modules], file=sys.stderr)"
    )
    arguments = [command, base] if command == "runs" else [command, "demo/agent", "--base-path", base]
    found = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert found.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_has_an_example_and_json(command):
    text = succeed(command, "--help")
    assert f"Example: art-ray {command}" in text
    assert "--json" in text


def test_a_run_is_named_by_its_folder_or_by_project_and_name_below_the_base_path(base, monkeypatch):
    by_folder = json_of("history", base / "demo/models/agent")
    assert json_of("history", "demo/agent", "--base-path", base) == by_folder
    monkeypatch.setenv("ART_RAY_BASE_PATH", str(base))
    assert json_of("history", "demo/agent") == by_folder
    assert json_of("runs")["runs"][0]["run"] == "demo/agent"
    monkeypatch.delenv("ART_RAY_BASE_PATH")
    (base / "elsewhere").mkdir()
    (base / "demo").rename(base / "elsewhere/.art")
    monkeypatch.chdir(base / "elsewhere")
    assert refused("history", "demo/agent").startswith("error: no run 'demo/agent'")


@pytest.mark.parametrize("name", ["demo/agnt", "agent", "../agent", "a/b/c", "", "."])
def test_an_unknown_run_is_bad_usage_and_the_known_ones_are_named(base, name):
    message = refused("history", name, "--base-path", base)
    assert f"no run {name!r}" in message
    assert "There are: demo/agent." in message


def test_the_nearest_run_is_proposed(base):
    assert "(nearest: 'demo/agent')" in refused("show", "demo/agnt", "--base-path", base)


def test_where_there_is_no_run_at_all_the_base_path_is_doubted(tmp_path):
    assert "is --base-path right?" in refused("history", "demo/agent", "--base-path", tmp_path)


def test_an_unknown_option_is_bad_usage(base):
    assert call("runs", base, "--jsn").exit_code == 2


def test_a_file_that_cannot_be_read_is_a_failure(base):
    path = base / "demo/models/agent/trajectories/train/0002.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    assert f"{path} is no parquet file" in refused("show", "demo/agent", "--base-path", base, status=1)


def test_a_parquet_file_with_damaged_pages_is_a_failure_that_names_it(base):
    path = base / "demo/models/agent/trajectories/train/0002.parquet"
    content = bytearray(path.read_bytes())
    content[4 : len(content) // 3] = bytes(len(content) // 3 - 4)
    path.write_bytes(content)
    assert f"{path} cannot be read" in refused("show", "demo/agent", "--base-path", base, "--json", status=1)


def test_results_go_to_one_stream_and_errors_and_warnings_to_the_other(base):
    with (base / "demo/models/agent/history.jsonl").open("ab") as file:
        file.write(b'{"train/reward": 0.5, "st')
    found = process("history", "demo/agent", "--base-path", base, "--json")
    assert json.loads(found.stdout)["skipped_lines"] == 1
    assert "skipped 1 line(s)" in found.stderr
    assert found.returncode == 0
    found = process("history", "demo/agent", "--base-path", base, "--json", "--metric", "no/such")
    assert (found.returncode, found.stdout) == (2, "")
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("options", ["show", "show --json", "history --json", "history --metric val/reward --plot"])
def test_a_reader_that_goes_away_ends_the_command_without_a_word(base, options):
    command = f"{' '.join(ART_RAY)} {options} {base}/demo/models/agent | head -n 0"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert found.stderr == ""


def test_a_terminal_with_few_characters_gets_their_numbers(base):
    found = process("runs", base, env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert found.returncode == 0, found.stderr
    assert "demo/agent" in found.stdout


@pytest.fixture
def hostile(tmp_path):
    """A run that wants to be obeyed, wherever a ledger lets it write."""
    ledger = ledger_at(tmp_path)
    for step in (0, 1):
        ledger.log([odd_group(HOSTILE)], split="train", step=step, metrics={HOSTILE: 1.0, "reward": 1.0})
    commit(ledger.folder, 1)
    return ledger.folder


COMMANDS_THAT_SHOW = [
    ("history",),
    ("history", "--metric", f"train/{HOSTILE}", "--plot"),
    ("history", "--metric", "train/none"),
    ("show", "--full"),
    ("show",),
    ("replay",),
    ("delete-checkpoints",),
]


@pytest.mark.parametrize("arguments", COMMANDS_THAT_SHOW, ids=lambda arguments: "-".join(arguments[:2])[:12])
def test_nothing_that_a_run_holds_is_obeyed_by_the_terminal(hostile, arguments):
    command, *options = arguments
    for more in ([], ["--json"]) if "--plot" not in options else ([],):
        result = call(command, hostile, *options, *more)
        assert result.exit_code == (2 if "train/none" in options else 0), result.output
        assert not OBEYED & set(result.stdout + result.stderr)
    if command in ("show", "replay"):
        assert r"a\x1b]0;owned\x07b" in call(command, hostile).stdout


def test_nor_by_a_real_terminal(hostile):
    ours, theirs = pty.openpty()
    with subprocess.Popen([*ART_RAY, "show", str(hostile), "--full"], stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        printed = b""
        while piece := _read(ours):
            printed += piece
    os.close(ours)
    assert child.returncode == 0
    assert b"\x1b[" in printed, "no colours: not taken for a terminal"
    for obeyed in (b"\x1b]", b"\x1b[2J", b"\x9b31m", b"\x07", "\u202e".encode()):
        assert obeyed not in printed


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the child closed its end
        return b""


@pytest.mark.parametrize(
    "arguments",
    [
        ("history",),
        ("history", "--metric", "train/reward"),
        ("show", "--step", "0"),
        ("show", "--split", "val"),
        ("replay", "--step", "0"),
    ],
)
def test_files_of_art_are_shown_too(arguments):
    command, *options = arguments
    assert json_of(command, "demo/agent", "--base-path", ART_FILES, *options)["run"] == "demo/agent"
    assert succeed(command, "demo/agent", "--base-path", ART_FILES, *options)


def test_runs_whose_names_begin_alike_are_told_apart(tmp_path):
    made_run(tmp_path, "agent")
    made_run(tmp_path, "agent-2", rewards=(0.1,))
    assert json_of("history", "demo/agent-2", "--base-path", tmp_path)["metrics"]["val/reward"]["last"] == 0.1


def test_the_commands_that_the_readme_shows_exist_and_print_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = made_run(tmp_path / ".art", "seed-0", rewards=(0.1, 0.2, 0.3, 0.4), project="yes-no-maybe")
    commit(folder, 4)
    [block] = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    shown = dict(re.findall(r"^\$ art-ray (.*)\n((?:(?!\$ ).*\n)*)", block, flags=re.MULTILINE))
    assert len(shown) >= 4
    for line, output in shown.items():
        printed = succeed(*shlex.split(line))
        assert _without_values(printed)[0] == _without_values(output)[0], line


def _without_values(text: str) -> list[str]:
    return [re.sub(r"[\d.,\s]+", " ", line).strip() for line in text.splitlines()]


def test_the_readme_names_every_command():
    text = (ROOT / "README.md").read_text()
    missing = [name for name in COMMANDS if not re.search(rf"`(?:art-ray )?{name}\b", text)]
    assert missing == []
