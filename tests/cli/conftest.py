"""A run that most tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.made import made_run


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base path with the run `demo/agent`: three steps."""
    made_run(tmp_path)
    return tmp_path
