"""What the disk refuses is a clear error; what was there stays; the next log works once there is room."""

import errno
import os
import subprocess
import sys

import pytest

from art_ray.errors import LedgerWriteError
from art_ray.ledger import read_trajectory_groups_parquet
from art_ray.trajectories import Trajectory, TrajectoryGroup
from tests.ledger.made import group_of, ledger_at, lines_of, parquet_files


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs takes root and CAP_SYS_ADMIN: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder, leave_bytes=0):
    """Leaves `leave_bytes` on the disk, and returns the file that takes the rest."""
    path = folder / "filler"
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    with path.open("wb") as file:
        file.write(b"x" * max(0, free - leave_bytes))
    return path


@pytest.mark.parametrize("leave_bytes", [0, 4096, 8192, 16384, 32768])
@pytest.mark.parametrize("kind", ["groups", "metrics"])
def test_a_full_disk_is_a_clear_error_and_harms_nothing(small_disk, leave_bytes, kind):
    ledger = ledger_at(small_disk)
    ledger.log([group_of(0.0, 1.0)], split="val", step=0, request_id="first")
    before = {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()}
    large = TrajectoryGroup(
        [Trajectory([{"role": "user", "content": os.urandom(8192).hex()}], reward=i) for i in range(8)]
    )
    call = {"split": "val", "step": 1, "request_id": "second", "metrics": {"x" * 9000: 1.0}}
    groups = [large] if kind == "groups" else None
    filler = fill(small_disk, leave_bytes)
    refused = None
    try:
        ledger.log(groups, **call)
    except LedgerWriteError as error:
        refused = error
    if refused is not None:  # else what was left sufficed
        assert refused.errno == errno.ENOSPC
        assert "The disk is full: free some space and log again" in str(refused)
        after = {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file() and path != filler}
        changed = {path.name for path in {**before, **after} if before.get(path) != after.get(path)}
        assert changed <= {"state.json", ".state.lock"}, "beside the request that is remembered"
    filler.unlink()
    ledger.log(groups, **call)
    assert [line["step"] for line in lines_of(ledger)] == [0, 1]
    assert read_trajectory_groups_parquet(parquet_files(ledger)[0]) == [group_of(0.0, 1.0)]
    if kind == "groups":
        assert read_trajectory_groups_parquet(parquet_files(ledger)[1]) == [large]
    assert not list(small_disk.rglob("*.tmp"))


def test_without_any_room_logging_is_refused(small_disk):
    ledger = ledger_at(small_disk)
    ledger.log(None, split="val", step=0, metrics={"x": 1})
    fill(small_disk)
    with pytest.raises(LedgerWriteError, match="disk is full"):
        ledger.log([group_of(0.0, 1.0)], split="val", step=1)
    with pytest.raises(OSError, match="disk is full"):
        ledger.log(None, split="val", step=1, metrics={"x" * 9000: 1})
    assert len(lines_of(ledger)) == 1
    assert parquet_files(ledger) == []


def test_a_read_only_file_system_is_a_clear_error(small_disk):
    ledger = ledger_at(small_disk)
    ledger.log([group_of(0.0, 1.0)], split="val", step=0)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for groups in ([group_of(1.0)], None):
        with pytest.raises(LedgerWriteError, match="read-only: choose another base_path"):
            ledger_at(small_disk).log(groups, split="val", step=1, metrics={"x": 1}, request_id="a")
    assert len(lines_of(ledger)) == len(parquet_files(ledger)) == 1
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    ledger.log([group_of(1.0)], split="val", step=1)
    assert len(lines_of(ledger)) == len(parquet_files(ledger)) == 2


def test_where_the_history_refuses_its_line_the_parquet_file_goes_too(tmp_path):
    ledger = ledger_at(tmp_path)
    (ledger.folder / "history.jsonl").mkdir(parents=True)
    for request_id in (None, "a"):
        with pytest.raises(LedgerWriteError, match="directory"):
            ledger.log([group_of(0.0, 1.0)], split="val", step=0, request_id=request_id)
        assert parquet_files(ledger) == []
    (ledger.folder / "history.jsonl").rmdir()
    ledger.log([group_of(0.0, 1.0)], split="val", step=0, request_id="a")
    assert len(parquet_files(ledger)) == len(lines_of(ledger)) == 1


def test_a_file_where_a_folder_is_needed_is_a_clear_error(tmp_path):
    (tmp_path / "demo").write_text("in the way")
    with pytest.raises(LedgerWriteError, match="file stands where a folder is needed"):
        ledger_at(tmp_path).log([group_of(1.0)], split="val", step=0)
    (tmp_path / "demo").unlink()
    ledger_at(tmp_path).log([group_of(1.0)], split="val", step=0)


_AS_NOBODY = """
import os, sys
from pathlib import Path
from tests.ledger.made import group_of, ledger_at
from art_ray.errors import LedgerWriteError
if os.geteuid() == 0:
    os.setuid(65534)
try:
    ledger_at(Path(sys.argv[1])).log([group_of(1.0)], split="val", step=0)
except LedgerWriteError as error:
    print(error)
"""


def test_a_missing_permission_is_a_clear_error(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    for parent in [tmp_path, *list(tmp_path.parents)[:2]]:
        parent.chmod(0o755)
    answered = subprocess.run([sys.executable, "-c", _AS_NOBODY, str(folder)], capture_output=True, text=True)
    if "Permission denied" in answered.stderr:
        pytest.skip("another user cannot read this installation")
    assert "No permission: choose another base_path, or change the owner of the folder" in answered.stdout
    assert list(folder.iterdir()) == []
