"""Rewards that are not computed by the environment: an LLM judge that compares the attempts of a group."""

from art_ray.rewards.judge import Judge, ruler
from art_ray.rewards.question import RUBRIC

__all__ = ["RUBRIC", "Judge", "ruler"]
