"""Train language-model agents with reinforcement learning on a Ray cluster."""
