"""The example, unchanged, as a job on a cluster that `ray start` made, with token authentication."""

import json
import secrets
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from tests.processes import Marked, wait_until

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).with_name("ray"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _takes_jobs(address: str, token: str) -> bool:
    """Whether an agent is there that runs jobs: `ray start` returns some seconds before."""
    url, headers = f"{address}/api/jobs/", {"Authorization": f"Bearer {token}"}
    try:
        return httpx.post(url, headers=headers, json={"entrypoint": "true"}).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def head():
    """A head node of our own, by `ray start`: its address for jobs, and the environment that reaches it."""
    folder = Path(tempfile.mkdtemp(prefix="artray-", dir="/tmp"))  # Ray's sockets need a short path
    port, dashboard_port, agent_port = free_port(), free_port(), free_port()
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "RAY_ADDRESS": "",
    }
    command = [
        RAY, "start", "--head", "--block", f"--port={port}", f"--dashboard-port={dashboard_port}",
        f"--dashboard-agent-listen-port={agent_port}",
        "--node-ip-address=127.0.0.1", "--num-cpus=2", f"--temp-dir={folder}", "--disable-usage-stats",
    ]  # fmt: skip
    node = Marked(command, folder / "head.log", env=environment)
    try:
        node.wait_for_output("Ray runtime started", 90)
        yield f"http://127.0.0.1:{dashboard_port}", environment
    finally:
        node.end_all()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(600)
def test_the_example_runs_as_a_job_and_its_files_are_where_it_was_told(head, small_model, tmp_path):
    address, environment = head
    command = [
        RAY, "job", "submit", f"--address={address}", f"--working-dir={ROOT}",
        f"--runtime-env={ROOT}/cluster/runtime_env.yaml", "--", "python", "examples/yes_no_maybe.py",
        f"--base-path={tmp_path}/art", f"--base-model={small_model}",
        "--steps=3", "--groups=2", "--group-size=4",
    ]  # fmt: skip
    wait_until(lambda: _takes_jobs(address, environment["RAY_AUTH_TOKEN"]), 90, "the head to take jobs")
    job = Marked(command, tmp_path / "job.log", env=environment)
    try:
        output = job.succeed(420)
    finally:
        job.end_all()
    assert "succeeded" in output
    assert "step   3  reward" in output
    folder = tmp_path / "art" / "yes-no-maybe" / "models" / "seed-0"
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert sorted({line["step"] for line in lines if "train/reward" in line}) == [0, 1, 2]
    assert sorted(p.name for p in (folder / "trajectories" / "train").iterdir()) == [
        "0000.parquet",
        "0001.parquet",
        "0002.parquet",
    ]
    assert (folder / "checkpoints" / "0003" / "manifest.json").exists()
    assert (folder / "reward.png").stat().st_size > 1000
    assert environment["RAY_AUTH_TOKEN"] not in output
