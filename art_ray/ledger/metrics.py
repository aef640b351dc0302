"""The metrics of one log call, gathered group by group."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from art_ray.ledger.codec import shown
from art_ray.trajectories import TrajectoryGroup, as_number, mean_and_deviation
from art_ray.types import Outcome

__all__ = ["BUILT_IN", "StepMetrics", "checked_metrics", "checked_number"]

logger = logging.getLogger(__name__)

BUILT_IN = ("reward", "exception_rate", "reward_std_dev")
_warned: set[str] = set()


def checked_number(value: object, where: str) -> float | int:
    """Returns `value` as a Python number; numpy and torch scalars and bools become one.

    Raises:
        TypeError: it is no number; `where` says which value it is.
    """
    if type(value) is float:
        return value
    try:
        number = as_number(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor that holds no readable value
        raise TypeError(f"{where} is a {type(value).__name__} that gives no number: {error}") from None
    if isinstance(number, bool):
        return int(number)
    if isinstance(number, float):
        return number
    if isinstance(number, int):
        try:
            float(number)
        except OverflowError:
            raise TypeError(f"{where} is an integer beyond the range of a double") from None
        return number
    raise TypeError(f"{where} must be a number, got {shown(value)}")


def checked_metrics(metrics: object, where: str) -> dict[str, float | int]:
    """Returns `metrics` with every value as a Python number.

    Raises:
        TypeError: not a mapping, a name that is no text, or a value that is no number.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"{where} must map names to numbers, got {shown(metrics)}")
    if set(map(type, metrics)) <= {str} and set(map(type, metrics.values())) <= {float}:
        return metrics if type(metrics) is dict else dict(metrics)
    checked = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"a name in {where} must be a text, got {shown(name)}")
        checked[name] = checked_number(value, f"{where}[{name!r:.80}]")
    return checked


class StepMetrics:
    """Takes the groups of one log call, one at a time, and gives the means that the history keeps.

    Kept per trajectory: one float per metric, so that means are sums rounded once (`math.fsum`).
    """

    def __init__(self) -> None:
        self.outcomes: Counter[Outcome] = Counter()
        """How many rollouts ended as what; the sum is the number of rollouts that were logged."""
        self._rewards: list[float] = []
        self._spreads: list[float] = []
        self._custom: defaultdict[str, list[float]] = defaultdict(list)
        self._group: defaultdict[str, list[float]] = defaultdict(list)
        self._num_trajectories = 0
        self._num_exceptions = 0

    def add(self, group: TrajectoryGroup, rows: Sequence[tuple[float, Mapping[str, float]]]) -> None:
        """Takes one group; `rows` are the checked reward and metrics of each of its trajectories."""
        scored = [reward for reward, _ in rows if math.isfinite(reward)]
        self._rewards += scored
        if len(scored) >= 2:
            self._spreads.append(mean_and_deviation(scored)[1])
        for _, metrics in rows:
            for name, value in metrics.items():
                self._custom[name].append(value)
        for name, value in group.metrics.items():
            self._group[name].append(checked_number(value, f"group metric {name!r:.80}"))
        self._num_trajectories += len(rows)
        self._num_exceptions += len(group.exceptions)

    def result(self) -> dict[str, float]:
        """Returns the metrics, without the split's prefix. A value may be non-finite."""
        metrics: dict[str, float] = {}
        if self._rewards:
            metrics["reward"] = _mean(self._rewards)
        num_rollouts = self._num_trajectories + self._num_exceptions
        if num_rollouts:
            metrics["exception_rate"] = self._num_exceptions / num_rollouts
        metrics["reward_std_dev"] = _mean(self._spreads) if self._spreads else 0.0
        group_metrics = {f"group_{name}": _mean(values) for name, values in self._group.items()}
        for name, values in self._custom.items():
            if name in BUILT_IN or name in group_metrics:
                warn_of_built_in(name)
            else:
                metrics[name] = _mean(values)
        return {**metrics, **group_metrics}


def warn_of_built_in(name: str) -> None:
    """Warns, once per process and name, that a custom metric carries a built-in's name."""
    if name not in _warned:
        _warned.add(name)
        logger.warning(
            "the custom metric %r carries the name of a built-in one: it is kept in the parquet file and left out of "
            "the history; rename it to see it there", name,
        )  # fmt: skip


def _mean(values: list[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # the sum is beyond a double, but not the mean
        return math.fsum(value / len(values) for value in values)
    except ValueError:  # both infinities are among them
        return math.nan
