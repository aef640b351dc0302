import copy
import inspect
import pickle
import re

import pytest

from art_ray import errors

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]


def drawn() -> dict[str, tuple[str, str | None]]:
    """Returns the tree in the module's docstring: for each name its parent, and the standard type in brackets."""
    tree, ancestors = {}, []
    for line in errors.__doc__.partition("::")[2].splitlines():
        if match := re.match(r"    ([│├└─ ]*)(\w+Error)(?: \((\w+)\))?", line):
            depth = len(match[1]) // 4
            del ancestors[depth:]
            tree[match[2]] = (ancestors[-1] if ancestors else "Exception", match[3])
            ancestors.append(match[2])
    return tree


def test_the_tree_in_the_docstring_is_the_real_one():
    real = {}
    for kind in ALL:
        own, *standard = [base.__name__ for base in kind.__bases__]
        real[kind.__name__] = (own, standard[0] if standard else None)
    assert drawn() == real


def test_every_error_is_public():
    assert sorted(errors.__all__) == sorted(kind.__name__ for kind in ALL)


@pytest.mark.parametrize("kind", ALL)
def test_each_error_crosses_a_process_boundary_unchanged(kind):
    error = kind("what was tried, what was found")
    error.__cause__ = ValueError("not carried")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == again.message == "what was tried, what was found"
    assert again.args == error.args


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize("kind", ALL)
def test_what_an_error_carries_beside_its_message_crosses_too(kind, copied):
    error = kind("the disk is full")
    error.add_note("in step 3")
    carried = {"node": "a"}
    if issubclass(kind, OSError):
        carried |= {"errno": 28, "strerror": "No space left", "filename": "/data/a", "filename2": "/data/b"}
    for name, value in carried.items():
        setattr(error, name, value)
    again = copied(error)
    assert {name: getattr(again, name) for name in carried} == carried
    assert again.__notes__ == ["in step 3"]
    assert str(again) == "the disk is full"


@pytest.mark.parametrize("kind", ALL)
def test_each_error_is_caught_by_the_root(kind):
    assert issubclass(kind, errors.ArtRayError)
    assert kind.__doc__


def test_an_error_of_the_disk_takes_one_text():
    """OSError makes another type of itself from (errno, text); ours takes one text."""
    error = errors.LedgerWriteError("disk full: /data")
    assert isinstance(error, OSError)
    assert str(error) == "disk full: /data"
