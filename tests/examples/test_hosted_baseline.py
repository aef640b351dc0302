"""The whole script, as a process, against a stub of a hosted model."""

import json

import polars

import art_ray
from tests.examples.conftest import EXAMPLES
from tests.processes import Marked, python
from tests.stub_openai import StubOpenAI


async def test_a_hosted_model_is_logged_beside_the_trained_one(tmp_path):
    trained = art_ray.Model(name="seed-0", project="yes-no-maybe", base_path=str(tmp_path), report_metrics=[])
    await trained.log(metrics={"reward": 0.5}, split="val", step=10)
    with StubOpenAI(lambda body: "Maybe." if body["messages"][0]["content"].startswith("Pick") else "No!") as stub:
        command = python(
            str(EXAMPLES / "hosted_baseline.py"), f"--base-url={stub.base_url}", "--model=big/one",
            f"--base-path={tmp_path}",
        )  # fmt: skip
        script = Marked(command, tmp_path / "log", env={"OPENAI_API_KEY": "of the host", "WANDB_API_KEY": ""})
        try:
            output = script.succeed(120)
        finally:
            script.end_all()
    assert len(stub.requests) == 8
    assert ({body["model"] for body in stub.requests}, stub.keys) == ({"big/one"}, {"of the host"})
    folder = tmp_path / "yes-no-maybe" / "models" / "big-one"
    [line] = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert (line["step"], line["val/reward"]) == (0, 0.875)
    rewards = polars.read_parquet(folder / "trajectories" / "val" / "0000.parquet")["reward"].to_list()
    assert sorted(rewards) == [0.75] * 4 + [1.0] * 4
    assert output.index("big-one") < output.index("seed-0")  # the better one first
    assert "of the host" not in output + (folder / "model.json").read_text()
