"""kill -9 at random moments: what had returned is on disk, readable, once."""

import os
import random
import signal
import subprocess
import sys
import threading

from art_ray.ledger import read_trajectory_groups_parquet
from art_ray.ledger.parquet import file_metadata
from tests.ledger.logging_child import group_of
from tests.ledger.made import ledger_at, parquet_files

KILLS = 200


class Server:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.ledger.logging_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self.process.stdout.readline() == "ready\n"

    def log_until_killed(self, base, first, after_s):
        """Runs a child, kills it `after_s` seconds after its first call returned; returns the calls that returned."""
        print(base, first, file=self.process.stdin, flush=True)
        kind, child = self.process.stdout.readline().split()
        assert kind == "child"
        returned, timer = [], None
        for line in self.process.stdout:
            if line == "gone\n":
                return returned
            returned.append(int(line.removeprefix("returned ")))
            if timer is None:
                timer = threading.Timer(after_s, os.kill, (int(child), signal.SIGKILL))
                timer.start()
        raise AssertionError("the server ended")

    def close(self):
        self.process.stdin.close()
        self.process.wait(70)


def test_every_call_that_had_returned_before_a_kill_is_on_disk_once(tmp_path):
    server, rng = Server(), random.Random(0)
    returned, first = [], 0
    try:
        for _ in range(KILLS):
            calls = server.log_until_killed(tmp_path, first, rng.uniform(0, 0.03))
            assert calls == list(range(first, first + len(calls)))
            returned += calls
            first += len(calls) + 1  # the call that was under way may or may not be there
    finally:
        server.close()
    ledger = ledger_at(tmp_path)
    rows = list(ledger._history.rows())
    found = [row.get("train/call", row.get("val/call")) for row in rows]
    assert set(returned) <= set(found), "a call that had returned is missing"
    assert len(found) == len(set(found)), "a call is there twice"
    assert len(found) <= len(returned) + KILLS
    expected = [group_of(0.0, 1.0), group_of(0.5)]
    files_of = set()
    for path in parquet_files(ledger):
        record = file_metadata(path)["art_ray.log_record"]
        call = int(record.partition('call\\": ')[2].partition(",")[0])
        assert read_trajectory_groups_parquet(path) == expected
        assert call not in files_of, "a call has two files"
        files_of.add(call)
    assert {call for call in returned if call % 4 != 3} <= files_of
    assert (ledger.folder / "model.json").exists()


def test_a_call_killed_under_way_and_repeated_is_there_once(tmp_path):
    """The request that a kill interrupted is made again, as the model does it: one file, one line."""
    server, rng = Server(), random.Random(1)
    repeated, first = [], 1
    try:
        for _ in range(30):
            calls = server.log_until_killed(tmp_path, first, rng.uniform(0, 0.02))
            interrupted = first + len(calls)
            ledger = ledger_at(tmp_path)
            if interrupted % 3:
                ledger.log(
                    None if interrupted % 4 == 3 else [group_of(0.0, 1.0), group_of(0.5)],
                    split="train" if interrupted % 4 == 3 else ("train", "val")[interrupted % 2],
                    step=interrupted % 7,
                    metrics={"call": interrupted},
                    request_id=f"r{interrupted}",
                )
                repeated.append(interrupted)
            first = interrupted + 1
    finally:
        server.close()
    found = [row.get("train/call", row.get("val/call")) for row in ledger_at(tmp_path)._history.rows()]
    assert all(found.count(call) == 1 for call in repeated)
    requests = [file_metadata(path).get("art_ray.request_id") for path in parquet_files(ledger_at(tmp_path))]
    assert all(requests.count(f"r{call}") == (0 if call % 4 == 3 else 1) for call in repeated)
