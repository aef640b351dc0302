import json
import logging
import random

import pytest

from art_ray.errors import LedgerWriteError
from art_ray.ledger import History


@pytest.fixture
def history(tmp_path):
    return History(tmp_path / "history.jsonl")


def write(history, *rows):
    with history.path.open("a") as file:
        for row in rows:
            file.write((row if isinstance(row, str) else json.dumps(row)) + "\n")


def test_an_absent_and_an_empty_history_are_empty(history):
    for _ in range(2):
        assert list(history.rows()) == []
        assert history.best_step("val/reward") is None
        assert history.frame().height == 0
        assert history.metrics() == []
        history.path.touch()


def test_the_best_step_has_the_highest_mean_of_its_lines(history):
    write(history, {"val/reward": 0.9, "step": 1}, {"val/reward": 0.1, "step": 1}, {"val/reward": 0.6, "step": 2})
    assert history.best_step("val/reward") == 2
    assert history.best_step("val/reward", mode="min") == 1


def test_a_late_evaluation_of_an_early_step_counts_for_that_step(history):
    write(history, {"val/reward": 0.5, "step": 3}, {"val/reward": 0.7, "step": 1}, {"val/reward": 0.9, "step": 3})
    assert list(history.column("val/reward")) == [(3, 0.5), (1, 0.7), (3, 0.9)]
    assert history.best_step("val/reward") == 1 or history.step_means("val/reward").means.tolist() == [0.7, 0.7]
    assert history.best_step("val/reward") == 3, "a tie goes to the higher step"


@pytest.mark.parametrize("merged_at_once", [1, 7, 10**6])
def test_means_are_the_same_however_the_lines_come(history, monkeypatch, merged_at_once):
    monkeypatch.setattr("art_ray.ledger.history.CHUNK_BYTES", 200)
    monkeypatch.setattr("art_ray.ledger.history._Sums.MERGED_AT_ONCE", merged_at_once)
    rng = random.Random(0)
    pairs = [(rng.randrange(40), rng.choice([rng.random(), 1, 10**30])) for _ in range(500)]
    write(
        history,
        *[{"m": value, "step": step} for step, value in pairs],
        {"m": 10**400, "step": 1},
        {"m": 1, "step": 10**30},
    )
    found = history.step_means("m")
    assert found.steps.tolist() == sorted({step for step, _ in pairs})
    for step, mean in zip(found.steps, found.means, strict=True):
        values = [value for at, value in pairs if at == step]
        assert mean == pytest.approx(sum(values) / len(values))


def test_a_tie_is_not_decided_by_the_rounding_of_a_sum(history):
    write(history, *[{"val/reward": 0.1, "step": 1}] * 3, {"val/reward": 0.1, "step": 2})
    assert history.best_step("val/reward") == 2
    assert history.best_step("val/reward", mode="min") == 2


def test_nulls_and_what_is_not_finite_are_ignored(history):
    write(
        history,
        {"val/reward": None, "step": 9},
        '{"val/reward": NaN, "step": 8}',
        '{"val/reward": Infinity, "step": 7}',
        '{"val/reward": 1' + "0" * 400 + ', "step": 6}',
        {"val/reward": "high", "step": 5},
        {"val/reward": 0.2, "step": None},
        {"val/reward": 0.1, "step": 4},
    )
    assert history.best_step("val/reward") == 4


def test_integers_floats_and_bools_mix_in_one_column(history):
    write(history, {"m": 1, "step": 0}, {"m": 0.5, "step": 1}, {"m": True, "step": 2.0}, {"m": 3, "step": 3})
    assert history.best_step("m") == 3
    assert history.frame()["m"].to_list() == [1.0, 0.5, 1.0, 3.0]
    assert history.frame()["step"].to_list() == [0, 1, 2, 3]


def test_a_column_first_seen_after_many_rows_is_found(history):
    write(history, *[{"a": i, "step": i} for i in range(300)], {"late": 1.0, "step": 300})
    frame = history.frame()
    assert frame["late"].to_list() == [None] * 300 + [1.0]
    assert frame["a"].to_list() == [*map(float, range(300)), None]
    assert history.best_step("late") == 300


def test_a_torn_last_line_is_skipped_counted_and_reported(history, caplog):
    write(history, {"m": 1.0, "step": 0})
    with history.path.open("a") as file:
        file.write('{"m": 2.0, "st')
    with caplog.at_level(logging.WARNING):
        assert list(history.column("m")) == [(0, 1.0)]
    assert history.num_skipped == 1
    assert "skipped 1 line" in caplog.text


@pytest.mark.parametrize("torn", ['{"m": 2.0, "st', '{"other": 2.0, "st', '{"', "\x00\x00"])
def test_every_pass_counts_a_torn_line_whatever_it_looks_for(history, torn):
    write(history, {"m": 1.0, "step": 0}, torn, {"other": 3.0, "step": 2})
    for looked in (lambda: list(history.rows()), lambda: history.step_means("m"), lambda: history.best_step("other")):
        history.num_skipped = 0
        looked()
        assert history.num_skipped == 1


@pytest.mark.parametrize("damage", ['{"m": 2.0, "st', "[1, 2]", "7", '{"m": 1}, {"m": 2}', "\x00\x00", "{" * 5000, "é"])
def test_a_damaged_line_spoils_no_other(history, damage):
    write(history, {"m": 1.0, "step": 0}, damage, {"m": 3.0, "step": 2})
    assert [row["step"] for row in history.rows()] == [0, 2]
    assert history.best_step("m") == 2
    assert history.frame().height == 2


def test_the_next_line_after_a_torn_one_starts_on_a_line_of_its_own(history):
    history.append({"m": 1.0, "step": 0})
    with history.path.open("a") as file:
        file.write('{"m": 2.0, "st')
    history.append({"m": 3.0, "step": 2})
    assert [row["step"] for row in history.rows()] == [0, 2]


def test_keys_that_json_escapes_are_found(history):
    for name in ['val/"quoted"', "val/größe", "val/back\\slash", "val/\ud800"]:
        history.append({name: 1.0, "step": 4})
        write(history, json.dumps({name: 2.0, "step": 5}, ensure_ascii=name == "val/\ud800"))
        assert history.best_step(name) == 5


def test_not_a_number_is_never_written(history):
    with pytest.raises(ValueError, match="JSON"):
        history.append({"m": float("nan")})
    assert not history.path.exists()


def test_a_folder_in_place_of_the_file_is_a_clear_error(history):
    history.path.mkdir()
    with pytest.raises(LedgerWriteError, match=r"history.jsonl failed.*directory"):
        history.append({"m": 1.0})


def test_lines_larger_than_a_chunk_and_many_small_ones_are_read_alike(history, monkeypatch):
    monkeypatch.setattr("art_ray.ledger.history.CHUNK_BYTES", 64)
    rows = [{f"m{i % 5}": random.random(), "step": i, "recorded_at": "x" * (i % 90)} for i in range(500)]
    write(history, *rows)
    assert list(history.rows()) == rows
    ends = [end for _, end in history.lines()]
    assert ends[-1] == history.size_bytes()
    assert [json.loads(line)["step"] for line, _ in history.lines(ends[99])] == list(range(100, 500))


def test_a_tailing_reader_never_sees_half_a_line(history):
    write(history, {"step": 0})
    with history.path.open("a") as file:
        file.write('{"step": 1')
    [(line, end)] = history.lines()
    assert json.loads(line) == {"step": 0}
    with history.path.open("a") as file:
        file.write("}\n")
    assert [json.loads(line) for line, _ in history.lines(end)] == [{"step": 1}]


def test_columns_that_hold_no_numbers_become_text(history):
    write(history, {"step": 0, "note": "x", "recorded_at": "then"}, {"step": 1, "note": {"a": 1}})
    assert history.frame()["note"].to_list() == ["x", '{"a": 1}']


def test_a_summary_has_the_range_of_each_metric_and_its_value_at_the_newest_step(history, monkeypatch):
    monkeypatch.setattr("art_ray.ledger.history.CHUNK_BYTES", 64)
    rows = [{"a": 3, "step": 5}, {"a": -1.5, "step": 7}, {"a": 2.0, "step": 7}, {"a": 9.0, "step": 6}]
    write(history, *rows, {"a": None, "b": None, "step": 8}, '{"a": 1e999, "step": 9}', {"a": 4}, '{"a": 99, "st')
    found = history.summaries()
    assert sorted(found) == ["a", "b"]
    a, b = found["a"], found["b"]
    assert (a.count, a.last_step, a.last, a.low, a.high) == (4, 7, 2.0, -1.5, 9.0)
    assert (b.count, b.last_step, b.last) == (0, None, None)
    assert history.num_skipped == 1
