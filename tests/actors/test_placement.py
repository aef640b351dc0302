"""Resources: an impossible wish is refused at once, with figures."""

import pytest
import ray

from art_ray.actors.placement import require
from art_ray.errors import ResourcesError

pytestmark = pytest.mark.usefixtures("ray_instance")


def test_what_the_cluster_has_is_granted_node_by_node():
    address = ray.util.get_node_ip_address()
    assert require({"trainer": {"CPU": 1}, "vllm": {"CPU": 1}}) == {"trainer": address, "vllm": address}


def test_a_wish_that_fits_the_sum_of_the_nodes_but_no_node_is_refused(monkeypatch):
    nodes = [{"NodeManagerAddress": f"node{i}", "Alive": True, "Resources": {"CPU": 8, "GPU": 2}} for i in (1, 2)]
    dead = {"NodeManagerAddress": "dead", "Alive": False, "Resources": {"CPU": 8, "GPU": 8}}
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, dead])
    with pytest.raises(ResourcesError, match="vllm asks for CPU 1, GPU 4 on one node"):
        require({"vllm": {"CPU": 1, "GPU": 4}})
    assert require({"trainer": {"GPU": 1}, "vllm": {"GPU": 2}}) == {"vllm": "node1", "trainer": "node2"}


def test_too_much_is_refused_with_what_was_asked_what_is_there_and_what_is_missing():
    with pytest.raises(ResourcesError) as caught:
        require({"trainer": {"CPU": 1, "GPU": 1}, "vllm": {"CPU": 1, "GPU": 4}})
    assert "GPU: asked 5, present 0, missing 5 (trainer 1, vllm 4)" in str(caught.value)
    assert "CPU" not in str(caught.value)
