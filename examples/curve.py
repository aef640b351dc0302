"""Draws the mean reward of every step, as a picture and in the terminal."""

from __future__ import annotations

from pathlib import Path

import art_ray


def folder_of(model: art_ray.Model) -> Path:
    """Returns the folder in which everything about `model` lies."""
    return Path(model.base_path, model.project, "models", model.name).absolute()


def show(model: art_ray.Model) -> None:
    """Says where the files of `model` are, and draws its curve."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import plotext
    import polars

    folder = folder_of(model)
    figure, axes = plt.subplots(figsize=(7, 4))
    terminal = plotext.figure
    terminal.clear()  # of the curve that this process drew before
    history = model.history()
    for split, marker in (("train", "braille"), ("val", "o")):
        if f"{split}/reward" not in history.columns:
            continue
        by_step = history.drop_nulls(f"{split}/reward").group_by("step").agg(polars.mean(f"{split}/reward"))
        steps, rewards = (column.to_list() for column in by_step.sort("step"))
        axes.plot(steps, rewards, marker="o", label=split)
        terminal.draw(terminal.signal(steps, rewards, marker=marker).lines().label(split))
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.05), title=f"{model.project}/{model.name}")
    axes.legend()
    figure.savefig(folder / "reward.png", dpi=120, bbox_inches="tight")
    plt.close(figure)
    terminal.plot_size(80, 18)
    terminal.title("mean reward by step")
    terminal.ruler("y").lim(0, 1.05)
    print(plotext.uncolorize(terminal.build()))
    print(f"\nhistory       {folder / 'history.jsonl'}\ntrajectories  {folder / 'trajectories'}")
    print(f"checkpoints   {folder / 'checkpoints'}\ncurve         {folder / 'reward.png'}")
