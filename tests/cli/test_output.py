"""What commands print."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from art_ray.cli import output

ROOM = Path(output.__file__).parent


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("\x1b[31m", r"\x1b[31m"),
        ("a\x00b\x07\x08\x7f\r", r"a\x00b\x07\x08\x7f\r"),
        ("\x9b0m\x85", r"\x9b0m\x85"),
        ("\u202etxt.exe\u2069\u200f", r"\u202etxt.exe\u2069\u200f"),
        ("\u2028\u2029", r"\u2028\u2029"),
        ("\ud800", r"\ud800"),
        ("größer\n\tthan 👩‍👧 – 日本 \u05d0", "größer\n\tthan 👩‍👧 – 日本 \u05d0"),
    ],
)
def test_what_a_terminal_would_obey_is_shown_as_its_escape_and_all_else_stays(text, cleaned):
    assert output.clean(text) == cleaned


def test_no_other_module_of_the_room_prints_so_that_nothing_is_printed_unclean():
    others = [path for path in ROOM.glob("*.py") if path.name not in ("output.py", "doctor.py", "status.py")]
    assert len(others) > 8
    for path in others:
        text = path.read_text()
        for way in ("print(", "sys.stdout.write", "typer.echo", "typer.secho", "import rich", "from rich", "input("):
            assert way not in text.replace("_print_", "").replace("print_turn(", "").replace("print_json(", ""), path


def test_json_has_null_where_a_number_is_not_finite(capsys):
    output.print_json({"a": float("nan"), "b": [float("inf"), 1.5, {"c": -float("inf")}], 3: (1, "\x1b\ud800")})
    assert capsys.readouterr().out == (
        '{\n "a": null,\n "b": [\n  null,\n  1.5,\n  {\n   "c": null\n  }\n ],\n'
        ' "3": [\n  1,\n  "\\u001b\\ud800"\n ]\n}\n'
    )


def test_markup_in_a_text_stays_text(capsys):
    output.say("[red]a[/red] [link=https://example.org]b[/link] :smile:")
    output.table(["[b]x"], [["[bold]y"]])
    printed = capsys.readouterr().out
    assert printed.startswith("[red]a[/red] [link=https://example.org]b[/link] :smile:\n")
    assert "[b]x" in printed
    assert "[bold]y" in printed


def test_a_pipe_gets_long_lines_whole(capsys):
    output.say("x" * 500, indent=2)
    assert capsys.readouterr().out == "  " + "x" * 500 + "\n"


def test_each_line_of_a_text_is_indented(capsys):
    output.say("a\nb", indent=2)
    assert capsys.readouterr().out == "  a\n  b\n"


def test_a_terminal_gets_lines_that_fit(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stdout", Terminal())
    output.say("word " * 30, "bold", indent=4)
    lines = sys.stdout.getvalue().splitlines()
    assert len(lines) > 3
    assert all(line.startswith("    ") for line in lines)


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (float("nan"), "–"), (0.123456, "0.1235"), (3.0, "3")])
def test_numbers_have_four_digits(value, text):
    assert output.number(value) == text
