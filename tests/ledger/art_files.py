"""Under a python with openpipe-art==0.5.18 (also numpy, duckdb, pyarrow): writes ART's files, or reads ours with ART.

python tests/ledger/art_files.py write tests/ledger/art_0_5_18    # made the stored files once
python tests/ledger/art_files.py read FILE.parquet                # prints what ART's own reader found
python tests/ledger/art_files.py continue FOLDER                  # logs to a run of ours; prints the steps it read
"""

import asyncio
import json
import sys
from pathlib import Path

import art
from art.utils.trajectory_logging import read_trajectory_groups_parquet
from openai.types.chat.chat_completion import Choice

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def choice(content, **message):
    return Choice.model_validate(
        {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": content, **message}}
    )


def written_groups():
    def trajectory(reward, *items, **values):
        return art.Trajectory(messages_and_choices=list(items), reward=reward, **values)

    user = {"role": "user", "content": "yes, no or maybe? – größer"}
    return [
        art.TrajectoryGroup(
            [
                trajectory(
                    0.5, user, choice("yes"), metrics={"turns": 1, "won": True}, metadata={"seed": 3}, logs=["a"]
                ),
                trajectory(1, user, {"role": "assistant", "content": "maybe"}),
            ],
            metadata={"scenario": "s1"},
            metrics={"difficulty": 0.25},
            logs=["group line"],
            exceptions=[ValueError("a rollout that failed")],
        ),
        art.TrajectoryGroup(
            [
                trajectory(
                    0.0,
                    {"role": "system", "content": "be brief"},
                    user,
                    choice(None, tool_calls=[CALL]),
                    {"role": "tool", "tool_call_id": "c1", "content": "2"},
                    tools=[{"type": "function", "function": {"name": "add"}}],
                )
            ]
        ),
        art.TrajectoryGroup([]),
    ]


async def write(folder):
    model = art.TrainableModel(name="agent", project="demo", base_model="m", base_path=folder, report_metrics=[])
    await model.log(written_groups(), split="train", step=0)
    await model.log(written_groups()[:1], split="val", step=0)
    await model.log(metrics={"loss": 0.25, "grad_norm": 1}, split="train", step=1)
    await model.log([], split="empty", step=2)


def read(path):
    groups = [
        {
            "metadata": group.metadata,
            "metrics": group.metrics,
            "logs": group.logs,
            "trajectories": [
                {
                    "messages": trajectory.messages_and_choices,
                    "reward": trajectory.reward,
                    "metrics": trajectory.metrics,
                    "metadata": trajectory.metadata,
                    "logs": trajectory.logs,
                }
                for trajectory in group.trajectories
            ],
        }
        for group in read_trajectory_groups_parquet(path)
    ]
    json.dump(groups, sys.stdout)


async def go_on(folder):
    model = art.TrainableModel(name="agent", project="demo", base_model="m", base_path=folder, report_metrics=[])
    await model.log(written_groups(), split="train", step=9)
    import polars

    print(json.dumps(polars.read_ndjson(f"{folder}/demo/models/agent/history.jsonl")["step"].to_list()))


if __name__ == "__main__":
    if sys.argv[1] == "continue":
        asyncio.run(go_on(sys.argv[2]))
    elif sys.argv[1] == "write":
        asyncio.run(write(str(Path(sys.argv[2]))))
    else:
        read(sys.argv[2])
