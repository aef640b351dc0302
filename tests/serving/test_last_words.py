from __future__ import annotations

import os
import subprocess
import sys

import pytest

from art_ray.serving.last_words import LastWords

ENGINE = """
import sys
print("(EngineCore pid=7) ERROR 12-01 06:23:38 [core.py:7] Worker proc VllmWorker-0 died unexpectedly.", flush=True)
for line in ("Traceback (most recent call last):", '  File "core.py", line 1', "    run()", "ValueError: no memory"):
    print("(EngineCore pid=7) ERROR 12-01 06:23:38 [core.py:1496]", line, flush=True)
print("Loading weights: 10%|# | 3/24 [00:00<00:00, 5it/s]", file=sys.stderr)
print("Traceback (most recent call last):\\n  File 'api.py'\\nRuntimeError: the engine is dead", file=sys.stderr)
"""


def run(words: LastWords, code: str) -> None:
    with words.redirected():
        child = subprocess.Popen([sys.executable, "-c", code])
    child.wait()


def test_the_last_words_are_the_first_cause_without_what_vllm_writes_around_it():
    words = LastWords()
    run(words, ENGINE)
    assert words.text().splitlines() == [
        "Worker proc VllmWorker-0 died unexpectedly.",
        "Traceback (most recent call last):",
        '  File "core.py", line 1',
        "    run()",
        "ValueError: no memory",
    ]


def test_a_process_that_dies_without_a_traceback_is_quoted_by_its_last_lines():
    words = LastWords()
    run(words, "import os; os.write(2, b'terminate called after throwing std::bad_alloc\\n'); os.abort()")
    assert words.text() == "terminate called after throwing std::bad_alloc"


def test_output_comes_back_to_where_it_went_before(capfd: pytest.CaptureFixture[str]):
    words = LastWords()
    with words.redirected():
        os.write(1, b"from inside\n")
    os.write(1, b"from outside\n")
    assert words.text() == "from inside"
    assert capfd.readouterr() == ("from outside\n", "")


def test_what_is_passed_on_is_seen_and_kept(capfd: pytest.CaptureFixture[str]):
    words = LastWords(passed_on=True)
    run(words, "print('loading')")
    assert words.text() == "loading"
    assert capfd.readouterr().err == "loading\n"


def test_a_long_traceback_keeps_its_beginning_and_its_end():
    words = LastWords(lines=500)
    run(
        words,
        "print('Traceback (most recent call last):'); [print(f'  {i}') for i in range(99)]; print('ValueError: x')",
    )
    lines = words.text().splitlines()
    assert len(lines) < 25
    assert lines[1] == "  0"
    assert lines[-1] == "ValueError: x"
