"""Resources: an impossible wish is refused at once, with figures."""

import pytest

from art_ray.actors.placement import require
from art_ray.errors import ResourcesError

pytestmark = pytest.mark.usefixtures("ray_instance")


def test_what_the_cluster_has_is_granted():
    require({"trainer": {"CPU": 1}, "vllm": {"CPU": 1}})


def test_too_much_is_refused_with_what_was_asked_what_is_there_and_what_is_missing():
    with pytest.raises(ResourcesError) as caught:
        require({"trainer": {"CPU": 1, "GPU": 1}, "vllm": {"CPU": 1, "GPU": 4}})
    assert "GPU: asked 5, present 0, missing 5 (trainer 1, vllm 4)" in str(caught.value)
    assert "CPU" not in str(caught.value)
