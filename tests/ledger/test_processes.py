"""Several processes log to one model at once."""

import subprocess
import sys
from collections import Counter

from art_ray.ledger import read_trajectory_groups_parquet
from art_ray.ledger.parquet import file_metadata
from tests.ledger.made import group_of, ledger_at, lines_of, parquet_files

PROCESSES, CALLS = 4, 250

_LOG = """
import sys
from pathlib import Path
from tests.ledger.made import group_of, ledger_at
ledger = ledger_at(Path(sys.argv[1]))
for call in range(int(sys.argv[3])):
    ledger.log([group_of(0.0, 1.0)], split="val", step=call % 5, metrics={"caller": int(sys.argv[2]), "call": call},
               request_id=f"{sys.argv[2]}.{call}" if call % 2 else None)
"""


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
