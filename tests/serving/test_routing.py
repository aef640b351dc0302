from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from art_ray.serving.routing import Rotation


def rotation(*replicas: str, capacity: int = 8, tolerance: int = 2) -> Rotation:
    made = Rotation(capacity, tolerance)
    for replica in replicas:
        made.add(replica)
    return made


def ask(made: Rotation, trajectory: str | None = None) -> str | None:
    replica = made.choose(trajectory)
    if replica is not None:
        made.begin(replica, trajectory)
    return replica


def test_the_least_loaded_replica_is_asked_and_equals_take_turns():
    made = rotation("a", "b", "c")
    assert Counter(ask(made) for _ in range(9)) == {"a": 3, "b": 3, "c": 3}
    made.end("b")
    assert ask(made) == "b"


def test_a_trajectory_stays_where_its_prefix_is_cached():
    made = rotation("a", "b")
    first = ask(made, "t")
    assert first is not None
    made.end(first)
    assert [ask(made, "t") for _ in range(3)] == [first] * 3


def test_a_trajectory_is_moved_when_its_replica_has_clearly_more_to_do():
    made = rotation("a", "b", tolerance=2)
    first = ask(made, "t")
    assert [ask(made, "t") for _ in range(2)] == [first] * 2
    assert ask(made, "t") != first


def test_a_trajectory_whose_replica_left_is_answered_by_another():
    made = rotation("a", "b")
    first = ask(made, "t")
    assert first is not None
    made.remove(first)
    assert ask(made, "t") not in (first, None)


def test_requests_of_a_replica_that_left_and_came_back_still_count():
    made = rotation("a", capacity=2)
    ask(made)
    made.remove("a")
    assert made.choose() is None
    made.add("a")
    assert made.replicas == {"a": 1}
    made.end("a")
    assert made.replicas == {"a": 0}


@given(st.lists(st.tuples(st.sampled_from(["ask", "end", "leave", "come"]), st.integers(0, 4)), max_size=60))
def test_no_replica_ever_has_more_than_it_can_take_and_counts_return_to_zero(events: list[tuple[str, int]]):
    names = [f"r{i}" for i in range(3)]
    made, asked = rotation(*names, capacity=2), []
    for kind, number in events:
        name = names[number % 3]
        if kind == "ask":
            replica = ask(made, f"t{number}")
            if replica is None:
                assert all(load >= 2 for load in made.replicas.values())
            else:
                asked.append(replica)
        elif kind == "end" and asked:
            made.end(asked.pop(number % len(asked)))
        elif kind == "leave":
            made.remove(name)
        elif kind == "come" and name not in made:
            made.add(name)
        assert all(load <= 2 for load in made.replicas.values())
    for replica in asked:
        made.end(replica)
    for name in names:
        made.add(name)
    assert set(made.replicas.values()) == {0}
