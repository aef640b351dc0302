"""Each agent takes a step, on one policy that all share."""

import agent
import curve
import game_2048
import langgraph_agent
import polars
import pytest
import tic_tac_toe
import tool_calling

from art_ray.ledger import read_trajectory_groups_parquet
from art_ray.training.samples import samples_of
from art_ray.trajectories import Choice, Sampling
from tests.examples.conftest import chosen

AGENTS = {
    "game_2048": (game_2048.rollout, game_2048.games(size=3, turns=3, goal=16)),
    "langgraph_agent": (langgraph_agent.rollout, langgraph_agent.sums()),
    "tic_tac_toe": (tic_tac_toe.rollout, tic_tac_toe.games("random")),
    "tool_calling": (tool_calling.rollout, tool_calling.questions()),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_takes_a_step_and_shows_what_it_learned_from(policy, name, capsys):
    rollout, scenarios = AGENTS[name]
    step = await policy.get_step()
    await agent.train(policy, rollout, scenarios, chosen(step))
    assert await policy.get_step() == step + 1

    path = curve.folder_of(policy) / "trajectories" / "train" / f"{step:04d}.parquet"
    groups = read_trajectory_groups_parquet(str(path))
    assert [len(group) for group in groups] == [4, 4]
    for group in groups:
        assert not group.exceptions
        for trajectory in group:
            assert 0 <= trajectory.reward <= 1
            answers = [item for item in trajectory.messages_and_choices if isinstance(item, Choice)]
            assert answers
            assert {Sampling.of(answer).policy_versions[0] for answer in answers} == {step}
    outcomes = polars.read_parquet(path)["outcome"].to_list()
    assert set(outcomes) <= {"scored", "no_spread"}, outcomes

    shown = capsys.readouterr().out
    assert f"step {step + 1:3d}  reward" in shown
    assert "the best rollout of the last step" in shown
    assert (curve.folder_of(policy) / "reward.png").stat().st_size > 1000


async def test_every_token_that_was_sampled_in_a_game_is_trained(policy):
    trajectory = await tic_tac_toe.rollout(policy, tic_tac_toe.Game(seed=0, opponent="random"))
    samples = samples_of(trajectory, 8192)
    answers = [item for item in trajectory.messages_and_choices if isinstance(item, Choice)]
    assert sum(sample.num_trained for sample in samples) == sum(len(Sampling.of(a).token_ids) for a in answers)
