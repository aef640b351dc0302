"""The public surface is a list: a name that is added or lost has to be added or taken away here."""

import ast
import importlib
import json
import pkgutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import art_ray

PUBLIC = [
    "ArtRayError",
    "Backend",
    "History",
    "LocalBackend",
    "Message",
    "Messages",
    "MessagesAndChoices",
    "Model",
    "Outcome",
    "PipelineResult",
    "PolicyVersion",
    "RayBackend",
    "ServingConfig",
    "Tools",
    "TrainConfig",
    "TrainResult",
    "TrainableModel",
    "TrainerConfig",
    "Trajectory",
    "TrajectoryGroup",
    "gather_trajectories",
    "gather_trajectory_groups",
    "iterate_dataset",
    "limit_concurrency",
    "pipeline",
    "retry",
    "rollout",
    "sft",
]


def run_python(script: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_public_names_are_these():
    assert art_ray.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_is_there(name):
    assert getattr(art_ray, name) is not None
    assert name in dir(art_ray)


def test_each_public_name_says_where_it_comes_from():
    for name, module in art_ray._MODULE_OF.items():
        assert name in importlib.import_module(f"art_ray.{module}").__all__, (
            f"{name} is not in art_ray.{module}.__all__"
        )
    assert sorted(art_ray._MODULE_OF) == sorted(PUBLIC)


def test_type_checkers_see_the_same_names_from_the_same_modules():
    source = ast.parse(Path(art_ray.__file__).read_text())
    [block] = [node for node in source.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == {name: f"art_ray.{module}" for name, module in art_ray._MODULE_OF.items()}


def test_no_module_has_the_name_of_a_public_one():
    assert not {module.name for module in pkgutil.iter_modules(art_ray.__path__)} & set(PUBLIC)


def test_importing_the_package_loads_nothing_heavy():
    result = run_python("import art_ray, json, sys; print(json.dumps(sorted(sys.modules)))")
    loaded = {name.partition(".")[0] for name in json.loads(result.stdout)}
    assert not loaded & {
        "ray",
        "torch",
        "vllm",
        "transformers",
        "peft",
        "openai",
        "polars",
        "pyarrow",
        "wandb",
        "numpy",
    }


def test_rolling_out_and_logging_loads_no_engine():
    result = run_python(
        """
        import json, sys
        from art_ray import Model, Trajectory, TrajectoryGroup, gather_trajectory_groups, retry
        print(json.dumps(sorted(sys.modules)))
        """
    )
    assert not {name.partition(".")[0] for name in json.loads(result.stdout)} & {"ray", "torch", "vllm"}


def test_modules_of_the_users_reach_come_with_the_package():
    result = run_python(
        "import art_ray; print(art_ray.utils.iterate_dataset.__name__, art_ray.errors.ConfigError.__name__)"
    )
    assert result.stdout == "iterate_dataset ConfigError\n"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Modle'"):
        art_ray.Modle  # noqa: B018


def test_a_name_whose_extra_is_missing_says_which_to_install():
    result = run_python(
        """
        import sys
        sys.modules["ray"] = None  # what Python itself does with a package that is not to be found
        from art_ray import RayBackend
        """
    )
    assert result.stderr.splitlines()[-1] == (
        "ImportError: art_ray.RayBackend needs 'ray', which is not installed: "
        "pip install 'art-ray[gpu]', or 'art-ray[cpu]' on a machine without a GPU"
    )
