"""What is remembered of a model: trajectories, history, and the reporters that show them. No Ray, no torch."""

from __future__ import annotations

from art_ray.ledger.history import History
from art_ray.ledger.ledger import Ledger, LedgerConfig, LogReceipt
from art_ray.ledger.parquet import iterate_trajectory_groups_parquet, read_trajectory_groups_parquet
from art_ray.ledger.reporters import replay

__all__ = [
    "History",
    "Ledger",
    "LedgerConfig",
    "LogReceipt",
    "iterate_trajectory_groups_parquet",
    "read_trajectory_groups_parquet",
    "replay",
]
