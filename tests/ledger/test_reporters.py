import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from art_ray.errors import ConfigError, LedgerError
from art_ray.ledger import LedgerConfig, replay, reporters
from art_ray.ledger.reporters import checked_reporters, feed
from tests.ledger.made import group_of, ledger_at, lines_of
from tests.ledger.wandb_files import OfflineRun, values_of
from tests.processes import wait_until


@pytest.fixture(autouse=True)
def _without_a_key(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setattr(feed, "POLL_S", 0.05)


def children() -> list[str]:
    pids = {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}
    commands = [(Path("/proc") / pid / "cmdline") for pid in pids]
    return [command.read_bytes().decode() for command in commands if command.exists()]


def log_a_run(ledger, steps):
    for step in steps:
        ledger.log([group_of(0.0, 1.0)], split="train", step=step)
        ledger.log(None, split="train", step=step + 1, metrics={"loss": 1 / (step + 1), "odd": math.nan})
        if step >= 3:
            ledger.log([group_of(step / 10)], split="val", step=step - 3)  # late: an evaluation of an earlier step


# --- which reporters


def test_by_default_wandb_reports_if_its_key_is_in_the_environment(monkeypatch):
    assert checked_reporters(None) == []
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert checked_reporters(None) == ["wandb"]
    assert checked_reporters([]) == []


def test_an_unknown_reporter_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="Known reporters: tensorboard, wandb"):
        checked_reporters(["mlflow"])


def test_a_reporter_whose_package_is_absent_is_an_error_at_once(monkeypatch):
    monkeypatch.setitem(reporters._REPORTERS, "wandb", (None, ("wandb", "no_such_package")))
    with pytest.raises(ConfigError, match="needs no_such_package"):
        checked_reporters(["wandb"])


def test_without_reporters_no_thread_is_started(tmp_path):
    before = threading.active_count()
    ledger_at(tmp_path).log(None, split="val", step=0, metrics={"x": 1})
    assert threading.active_count() == before


# --- wandb, the real package


def test_an_offline_wandb_run_has_every_metric_of_every_step(tmp_path, caplog):
    ledger = ledger_at(tmp_path, ["wandb"], model_json={"base_model": "m", "inference_api_key": "sk-1"})
    assert not ledger.folder.exists(), "no run before the first log"
    with caplog.at_level(logging.WARNING):
        log_a_run(ledger, range(12))
        ledger.close(60)
    run = OfflineRun(ledger.folder)
    lines = lines_of(ledger)
    assert run.values() == values_of(lines)
    assert [row["training_step"] for row in run.rows] == [line["step"] for line in lines], "in order, each once"
    assert run.step_metrics == {"training_step": "", "train/*": "training_step", "val/*": "training_step"}
    assert run.config["base_model"] == "m"
    assert "inference_api_key" not in run.config
    state = json.loads((ledger.folder / "state.json").read_text())["reporters"]["wandb"]
    assert run.ids == {state["run_id"]}
    assert state["sent_bytes"] == ledger._history.size_bytes()
    assert f"in {run.files[0].parent}: upload it with `wandb sync`" in caplog.text
    assert not [command for command in children() if "wandb" in command], "its service process is gone"

    ledger.log(None, split="val", step=20, metrics={"reward": 1.0})  # the same ledger goes on in the same run
    ledger.close(60)
    run = OfflineRun(ledger.folder)
    assert run.ids == {state["run_id"]}
    assert run.values() == values_of(lines_of(ledger))
    assert len(run.rows) == len(lines_of(ledger)), "nothing was sent twice"


_LOG_UNTIL_KILLED = """
import sys, time
from pathlib import Path
from tests.ledger.made import ledger_at
ledger = ledger_at(Path(sys.argv[1]), ["wandb"])
for step in range(10**6):
    ledger.log(None, split="train", step=step, metrics={"loss": step / 7})
    print(step, flush=True)
    time.sleep(0.002)
"""


def test_after_a_kill_the_same_run_goes_on_without_a_gap(tmp_path):
    ledger = ledger_at(tmp_path, ["wandb"])
    child = subprocess.Popen([sys.executable, "-c", _LOG_UNTIL_KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        wait_until(lambda: bool(OfflineRun(ledger.folder).rows), 60, "rows in the offline run")
    finally:
        child.kill()
        child.wait()
    killed_at = len(lines_of(ledger))
    log_a_run(ledger, range(5))
    ledger.close(60)
    run = OfflineRun(ledger.folder)
    assert len(run.files) == 2
    assert len(run.ids) == 1
    assert killed_at > 5
    assert run.values() == values_of(lines_of(ledger))


def test_a_replay_rebuilds_a_run_from_the_history_alone(tmp_path):
    ledger = ledger_at(tmp_path)
    log_a_run(ledger, range(6))
    where = replay(ledger.config, "wandb")
    run = OfflineRun(ledger.folder)
    assert where == str(run.files[0].parent)
    assert run.values() == values_of(lines_of(ledger))
    [first_id] = run.ids
    replay(ledger.config, "wandb")
    again = OfflineRun(ledger.folder)
    assert len(again.ids) == 2, "a new run"
    state = json.loads((ledger.folder / "state.json").read_text())["reporters"]["wandb"]
    assert state["run_id"] in again.ids - {first_id}
    with pytest.raises(ConfigError, match="Known reporters"):
        replay(ledger.config, "mlflow")


def test_a_replay_beside_a_process_that_reports_is_refused(tmp_path):
    ledger = ledger_at(tmp_path, ["tensorboard"])
    ledger.log(None, split="val", step=0, metrics={"x": 1})
    wait_until(lambda: ledger._reporting._feeds[0].where is not None, 60, "the reporter to start")
    with pytest.raises(LedgerError, match="close its model first"):
        replay(ledger.config, "tensorboard", timeout_s=0.1)
    ledger.close(30)
    replay(ledger.config, "tensorboard")


# --- TensorBoard, the real package


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {(e.step, tag, round(e.value, 5)) for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}


def test_tensorboard_has_every_metric_of_every_step_over_restarts(tmp_path):
    for steps in (range(5), range(5, 8)):
        ledger = ledger_at(tmp_path, ["tensorboard"])
        log_a_run(ledger, steps)
        ledger.close(60)
    expected = {(step, key, round(value, 5)) for step, key, value in values_of(lines_of(ledger))}
    assert scalars(ledger.folder) == expected
    assert len(list((ledger.folder / "tensorboard").iterdir())) == 2
    replay(ledger.config, "tensorboard")
    assert scalars(ledger.folder) == expected
    assert len(list((ledger.folder / "tensorboard").iterdir())) == 1, "nothing is shown twice"


# --- reporters that are slow or fail: the feed with a reporter of our own


class Recording:
    """A reporter that keeps what it is given, and can be told to wait or to fail."""

    def __init__(self):
        self.steps, self.starts, self.finishes = [], 0, 0
        self.may_send = threading.Event()
        self.may_send.set()
        self.fail_start = self.fail_send = None

    def begin(self):
        return {"run": "a"}

    def start(self, memory):
        assert memory["run"] == "a"
        self.starts += 1
        if self.fail_start:
            raise self.fail_start
        return "here"

    def send(self, rows):
        assert self.may_send.wait(60)
        if self.fail_send:
            raise self.fail_send
        self.steps += [row["step"] for row in rows]

    def finish(self):
        self.finishes += 1


@pytest.fixture
def recording(monkeypatch):
    reporter = Recording()
    monkeypatch.setitem(reporters._REPORTERS, "recording", (lambda subject: reporter, ()))
    return reporter


def log_steps(ledger, steps):
    for step in steps:
        ledger.log(None, split="val", step=step, metrics={"x": step})


def test_a_reporter_that_hangs_delays_neither_log_nor_close_and_loses_nothing(tmp_path, recording, caplog):
    recording.may_send.clear()
    ledger = ledger_at(tmp_path, ["recording"])
    started = time.monotonic()
    log_steps(ledger, range(200))
    assert time.monotonic() - started < 20, "log() did not wait for the reporter"
    ledger.close(0.1)
    assert "what is missing is sent at the next start" in caplog.text
    assert len(lines_of(ledger)) == 200
    recording.may_send.set()
    wait_until(lambda: recording.steps == list(range(200)), 30, "the backlog to be sent")


def test_what_was_not_sent_is_sent_on_the_next_start(tmp_path, recording):
    ledger = ledger_at(tmp_path, ["recording"])
    log_steps(ledger, range(3))
    ledger.close(30)
    log_steps(ledger_at(tmp_path), range(3, 6))  # a process that reports to nobody
    ledger = ledger_at(tmp_path, ["recording"])
    log_steps(ledger, range(6, 8))
    ledger.close(30)
    assert recording.steps == list(range(8))
    assert (recording.starts, recording.finishes) == (2, 2)


def test_a_reporter_that_cannot_start_is_an_error_and_training_goes_on(tmp_path, recording, caplog):
    recording.fail_start = OSError("no network")
    ledger = ledger_at(tmp_path, ["recording"])
    with caplog.at_level(logging.WARNING):
        log_steps(ledger, range(3))
        wait_until(lambda: "could not start" in caplog.text, 30, "the report of the failure")
        ledger.close(30)
    assert next(record.levelname for record in caplog.records if "recording" in record.getMessage()) == "ERROR"
    assert "OSError: no network" in caplog.text
    assert len(lines_of(ledger)) == 3
    state = json.loads((ledger.folder / "state.json").read_text())
    assert state["reporters"]["recording"] == {"run": "a"}, "the run's name is on disk before it is opened"
    recording.fail_start = None
    ledger = ledger_at(tmp_path, ["recording"])
    log_steps(ledger, range(3, 4))
    ledger.close(30)
    assert recording.steps == [0, 1, 2, 3]


def test_a_reporter_that_fails_later_is_a_warning_and_is_tried_again(tmp_path, recording, caplog, monkeypatch):
    monkeypatch.setattr(feed, "RETRY_S", 0.01)
    ledger = ledger_at(tmp_path, ["recording"])
    with caplog.at_level(logging.WARNING):
        log_steps(ledger, range(2))
        wait_until(lambda: recording.steps == [0, 1], 30, "the first rows")
        recording.fail_send = RuntimeError("disk quota of the service")
        log_steps(ledger, range(2, 5))
        wait_until(lambda: "recording failed: RuntimeError" in caplog.text, 30, "the warning")
        recording.fail_send = None
        wait_until(lambda: recording.steps[2:] == [0, 1, 2, 3, 4], 30, "all rows, the doubtful ones again")
        ledger.close(30)
    assert {record.levelname for record in caplog.records if "recording" in record.getMessage()} == {"WARNING"}
    assert recording.starts == 2, "it was started anew"


def test_what_may_still_be_in_a_reporters_buffers_is_not_remembered_as_sent(tmp_path, recording, monkeypatch):
    monkeypatch.setattr(feed, "REMEMBER_S", 0.0)
    ledger = ledger_at(tmp_path, ["recording"])

    def remembered():
        return json.loads((ledger.folder / "state.json").read_text())["reporters"]["recording"].get("sent_bytes", 0)

    for step in range(30):
        ledger.log(None, split="val", step=step, metrics={"x" * 9000: step})
        wait_until(lambda step=step: recording.steps == list(range(step + 1)), 30, "the row")
    wait_until(lambda: remembered() > 0, 30, "the first rows to be remembered as sent")
    size = ledger._history.size_bytes()
    assert size - 64 * 1024 - 2 * 9100 < remembered() <= size - 64 * 1024 + 9100
    assert remembered() in [end for _, end in ledger._history.lines()]
    ledger.close(30)
    assert remembered() == size


def test_of_several_ledgers_one_reports_for_all(tmp_path, recording):
    first, second = ledger_at(tmp_path, ["recording"]), ledger_at(tmp_path, ["recording"])
    log_steps(first, range(3))
    wait_until(lambda: len(recording.steps) == 3, 30, "the first ledger to report")
    log_steps(second, range(3, 6))
    wait_until(lambda: len(recording.steps) == 6, 30, "the first ledger to report for the second")
    first.close(30)
    log_steps(second, range(6, 9))
    second.close(30)
    assert recording.steps == list(range(9))
    assert recording.starts == 2, "the second took over only when the first had closed"


def test_torn_and_foreign_lines_are_passed_over(tmp_path, recording):
    ledger = ledger_at(tmp_path, ["recording"])
    log_steps(ledger_at(tmp_path), range(1))
    with (ledger.folder / "history.jsonl").open("a") as file:
        file.write('[1]\n{"val/x": 2, "st')
    log_steps(ledger, range(2, 3))
    ledger.close(30)
    assert recording.steps == [0, 2]


def test_unreadable_last_lines_are_passed_over_once_and_delay_no_close(tmp_path, recording):
    ledger = ledger_at(tmp_path, ["recording"])
    log_steps(ledger, range(2))
    wait_until(lambda: recording.steps == [0, 1], 30, "the rows")
    with (ledger.folder / "history.jsonl").open("a") as file:
        file.write('[1]\n{"val/x": 2, "st\n')
    started = time.monotonic()
    ledger.close(30)
    assert time.monotonic() - started < 10
    assert (recording.steps, recording.starts, recording.finishes) == ([0, 1], 1, 1)
    state = json.loads((ledger.folder / "state.json").read_text())
    assert state["reporters"]["recording"]["sent_bytes"] == ledger._history.size_bytes()


def test_no_run_is_opened_for_lines_that_cannot_be_read(tmp_path, recording):
    ledger = ledger_at(tmp_path, ["recording"])
    ledger.folder.mkdir(parents=True)
    (ledger.folder / "history.jsonl").write_text('{"val/x": 2, "st\n')
    ledger._reporting.history_grew()
    ledger.close(30)
    assert (recording.starts, recording.steps) == (0, [])


def test_a_history_that_was_replaced_by_a_shorter_one_is_sent_from_its_start(tmp_path, recording):
    ledger = ledger_at(tmp_path, ["recording"])
    log_steps(ledger, range(5))
    ledger.close(30)
    (ledger.folder / "history.jsonl").unlink()
    log_steps(ledger, range(7, 8))
    ledger.close(30)
    assert recording.steps == [0, 1, 2, 3, 4, 7]


_EXIT_WITHOUT_CLOSE = """
import sys
from pathlib import Path
from tests.ledger.made import ledger_at
ledger = ledger_at(Path(sys.argv[1]), ["wandb"])
for step in range(20):
    ledger.log(None, split="train", step=step, metrics={"loss": step / 7})
"""


def test_a_script_that_ends_without_closing_still_sends_its_lines(tmp_path):
    subprocess.run([sys.executable, "-c", _EXIT_WITHOUT_CLOSE, str(tmp_path)], check=True, timeout=90)
    ledger = ledger_at(tmp_path)
    assert OfflineRun(ledger.folder).values() == values_of(lines_of(ledger))
    state = json.loads((ledger.folder / "state.json").read_text())["reporters"]["wandb"]
    assert state["sent_bytes"] == ledger._history.size_bytes()


def test_the_configuration_takes_reporters_by_name():
    assert LedgerConfig(base_path="x", project="p", name="n", report_metrics=["wandb"]).report_metrics == ["wandb"]
