"""Everything in the README was run: here it is run again."""

import re
from pathlib import Path

import polars
import pytest

import art_ray
from tests.processes import Marked, python

ROOT = Path(__file__).resolve().parents[2]


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.mark.timeout(600)
def test_the_python_of_the_readme_runs_in_order(tmp_path, small_model):
    (tmp_path / ".cache" / "models").mkdir(parents=True)
    (tmp_path / ".cache" / "models" / small_model.name).symlink_to(small_model)
    definitions = blocks()[0].partition("async def main")[0]
    outputs = []
    for number, block in enumerate(blocks()):
        script = tmp_path / f"block{number}.py"
        script.write_text(block if "import art_ray" in block else definitions + block)
        process = Marked(python(str(script)), tmp_path / f"block{number}.log", cwd=tmp_path)
        try:
            outputs.append(process.succeed(400))
            process.wait_until_gone(30)
        finally:
            process.end_all()
    assert re.findall(r"^step=(\d)", outputs[0], flags=re.MULTILINE) == ["1", "2", "3"]
    assert re.findall(r"^step (\d): (\S+) versions", outputs[2], flags=re.MULTILINE) == [
        ("4", "0.0"), ("5", "1.0"), ("6", "1.0")
    ]  # fmt: skip
    history = art_ray.Model(name="first", project="readme", base_path=str(tmp_path / ".art")).history()
    assert history.filter(polars.col("val/reward").is_not_null())["step"].to_list() == [3, 6]
    assert len(outputs) == 3


def test_what_the_readme_names_exists():
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make (\w+)", text):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (ROOT / link).exists(), link
