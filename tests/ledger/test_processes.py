"""Several processes log to one model at once."""

import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from art_ray.errors import LedgerWriteError
from art_ray.ledger import read_trajectory_groups_parquet
from art_ray.ledger.files import locked
from art_ray.ledger.parquet import file_metadata
from art_ray.ledger.state import State
from tests.ledger.made import group_of, ledger_at, lines_of, parquet_files

PROCESSES, CALLS = 4, 250

_LOG = """
import sys
from pathlib import Path
from art_ray.ledger.state import State
from tests.ledger.made import group_of, ledger_at
ledger = ledger_at(Path(sys.argv[1]))
for call in range(int(sys.argv[3])):
    ledger.log([group_of(0.0, 1.0)], split="val", step=call % 5, metrics={"caller": int(sys.argv[2]), "call": call},
               request_id=f"{sys.argv[2]}.{call}" if call % 2 else None)
"""


def test_a_lock_that_another_holds_for_too_long_is_a_clear_error(tmp_path):
    with locked(tmp_path), ThreadPoolExecutor(1) as pool:

        def take():
            with locked(tmp_path, timeout_s=0.1):
                pass

        with pytest.raises(LedgerWriteError, match=r"another process has held .*/\.lock for over 0\.1 s"):
            pool.submit(take).result()
    take()


def test_changes_of_the_state_by_several_processes_all_arrive(tmp_path):
    def count(name):
        for _ in range(25):
            with State(tmp_path).changed() as state:
                state[name] = state.get(name, 0) + 1
                state["all"] = state.get("all", 0) + 1

    with State(tmp_path).changed() as state:
        state["all"] = 0
    with ThreadPoolExecutor(5) as pool:
        counting = [pool.submit(count, name) for name in "abcd"]
        while wait(counting, timeout=0.001).not_done:
            json.loads((tmp_path / "state.json").read_text())  # whole at any moment
        assert [future.result() for future in counting] == [None] * 4
    assert State(tmp_path).read() == {"all": 100, **dict.fromkeys("abcd", 25)}


def test_a_line_waits_for_its_turn(tmp_path):
    ledger = ledger_at(tmp_path)
    ledger.log(None, split="val", step=0, metrics={"x": 1})
    with ThreadPoolExecutor(2) as pool:
        with locked(ledger.folder):
            waiting = [
                pool.submit(ledger.log, None, split="val", step=1, metrics={"x": 1}),
                pool.submit(ledger_at(tmp_path).log, [group_of(1.0)], split="val", step=2, metrics={"x": 2}),
            ]
            assert not wait(waiting, timeout=0.3).done
            assert len(lines_of(ledger)) == 1
        assert [future.result(30).metrics["val/x"] for future in waiting] == [1, 2]
    assert len(lines_of(ledger)) == 3


def test_four_processes_lose_nothing_and_never_share_a_name(tmp_path):
    children = [
        subprocess.Popen([sys.executable, "-c", _LOG, str(tmp_path), str(i), str(CALLS)]) for i in range(PROCESSES)
    ]
    assert [child.wait(120) for child in children] == [0] * PROCESSES
    ledger = ledger_at(tmp_path)
    rows = lines_of(ledger)  # every line is JSON
    expected = Counter((i, call) for i in range(PROCESSES) for call in range(CALLS))
    assert Counter((row["val/caller"], row["val/call"]) for row in rows) == expected
    files = parquet_files(ledger)
    assert len(files) == PROCESSES * CALLS
    lines_in_files = Counter(file_metadata(path)["art_ray.log_record"] for path in files)
    assert set(lines_in_files.values()) == {1}
    assert {path.name for path in files} == {
        f"{step:04d}{f'.{copy:03d}' if copy else ''}.parquet" for step in range(5) for copy in range(200)
    }
    for path in files[::20]:
        assert read_trajectory_groups_parquet(path) == [group_of(0.0, 1.0)]
    assert ledger.history().height == PROCESSES * CALLS
