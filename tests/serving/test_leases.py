from __future__ import annotations

import pytest

from art_ray.errors import ServingError, VersionNotServedError
from art_ray.serving.leases import VersionTable


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> VersionTable:
    table = VersionTable("policy", clock)
    for step in (3, 4):
        table.add(step, f"hash{step}")
    table.make_current(4)
    return table


def test_nothing_is_served_before_a_version_is_current():
    table = VersionTable("policy")
    with pytest.raises(VersionNotServedError, match="no version yet"):
        table.resolve("policy")
    table.add(0, "hash")
    with pytest.raises(VersionNotServedError, match="no version yet"):
        table.resolve("policy")


def test_the_bare_name_means_the_current_version_and_a_step_pins_one(table: VersionTable):
    assert table.resolve("policy") == 4
    assert table.resolve("policy@3") == 3


@pytest.mark.parametrize(
    "model",
    [None, "", 4, ["policy"], "policy@5", "policy@04", "policy@", "policy@-1", "policy@4 ", "policy@4\n", "policy@٤",
     "other", "policy4", "policy@4@4", "Policy"],
)  # fmt: skip
def test_any_other_name_is_refused_with_the_names_that_are_held(table: VersionTable, model: object):
    with pytest.raises(VersionNotServedError, match="held: policy@3, policy@4"):
        table.resolve(model)


def test_a_version_in_use_or_current_is_never_unloaded(table: VersionTable):
    table.begin(3)
    assert table.removable() == []
    for step in (3, 4):
        with pytest.raises(ServingError, match="in use"):
            table.remove(step)
    table.end(3)
    assert table.removable() == [3]
    table.remove(3)
    assert table.steps == [4]


def test_a_lease_keeps_a_version_until_it_is_given_back(table: VersionTable):
    table.pin(3, "evaluation", ttl_s=10)
    assert table.removable() == []
    table.unpin("evaluation")
    assert table.removable() == [3]


def test_a_lease_ends_by_its_time_and_use_prolongs_it(table: VersionTable, clock: Clock):
    table.pin(3, "trajectory", ttl_s=10)
    clock.now = 9
    table.pin(3, "trajectory", ttl_s=10)
    clock.now = 18
    assert table.removable() == []
    clock.now = 19
    assert table.removable() == [3]


def test_a_holder_stays_on_the_version_it_began_with(table: VersionTable, clock: Clock):
    table.pin(table.resolve("policy", "trajectory"), "trajectory", ttl_s=10)
    table.add(5, "hash5")
    table.make_current(5)
    assert table.resolve("policy", "trajectory") == 4
    assert table.resolve("policy", "another") == 5
    clock.now = 11
    assert table.resolve("policy", "trajectory") == 5


def test_a_step_never_changes_its_contents(table: VersionTable):
    table.add(4, "hash4")
    with pytest.raises(ServingError, match="a version never changes"):
        table.add(4, "other")


def test_a_request_ends_once(table: VersionTable):
    table.begin(4)
    table.end(4)
    with pytest.raises(ValueError, match="no request"):
        table.end(4)


def test_the_table_is_cleared_only_when_nobody_is_being_answered(table: VersionTable):
    table.begin(4)
    with pytest.raises(ServingError, match="being answered"):
        table.clear()
    table.end(4)
    table.clear()
    assert table.current is None
    assert table.steps == []


def test_status_names_versions_requests_and_holders(table: VersionTable):
    table.begin(3)
    table.pin(4, "evaluation", ttl_s=10)
    assert table.status() == {
        "name": "policy",
        "current": 4,
        "versions": {
            3: {"sha256": "hash3", "requests": 1, "holders": []},
            4: {"sha256": "hash4", "requests": 0, "holders": ["evaluation"]},
        },
    }
