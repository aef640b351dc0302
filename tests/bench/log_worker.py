"""Logs 64 groups x 16 trajectories x 10 messages whenever a line comes in, and answers with the seconds it took.

Runs under two interpreters: ours, and one that has ART (`python log_worker.py art`).
"""

import asyncio
import sys
import tempfile
import time

GROUPS, TRAJECTORIES, MESSAGES = 64, 16, 10


def groups(trajectory_type, group_type):
    def trajectory(g, t):
        messages = [
            {"role": "assistant" if i % 2 else "user", "content": f"message {i} of {g}.{t}: " + "some words " * 8}
            for i in range(MESSAGES)
        ]
        return trajectory_type(
            messages_and_choices=messages,
            reward=(g * 7 + t) % 16 / 16,
            metrics={"accuracy": t / 16},
            metadata={"scenario": g},
        )

    return [group_type([trajectory(g, t) for t in range(TRAJECTORIES)]) for g in range(GROUPS)]


def ours(folder):
    from art_ray.ledger import Ledger, LedgerConfig
    from art_ray.trajectories import Trajectory, TrajectoryGroup

    ledger = Ledger(LedgerConfig(base_path=folder, project="bench", name="ours", report_metrics=[]))
    data = groups(Trajectory, TrajectoryGroup)
    return lambda step: ledger.log(data, split="train", step=step)


def art(folder):
    from art import TrainableModel, Trajectory, TrajectoryGroup

    model = TrainableModel(name="art", project="bench", base_model="x", base_path=folder, report_metrics=[])
    data = groups(Trajectory, TrajectoryGroup)
    loop = asyncio.new_event_loop()
    return lambda step: loop.run_until_complete(model.log(data, split="train", step=step))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        log = {"ours": ours, "art": art}[sys.argv[1]](folder)
        print("ready", flush=True)
        for step, _ in enumerate(sys.stdin):
            started = time.perf_counter()
            log(step)
            print(time.perf_counter() - started, flush=True)
