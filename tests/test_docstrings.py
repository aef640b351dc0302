"""Runs the examples in docstrings."""

import doctest
import importlib
from pathlib import Path

import pytest

import art_ray

ROOT = Path(art_ray.__file__).parent
WITH_EXAMPLES = sorted(
    ".".join(["art_ray", *path.relative_to(ROOT).with_suffix("").parts])
    for path in ROOT.rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_do_what_they_show(module):
    failures, num_examples = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert num_examples
    assert not failures
