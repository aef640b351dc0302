"""Small tools for training scripts: retries, limits on concurrency, and batches of a data set."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import random
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

from art_ray.errors import ConfigError
from art_ray.progress import bar

__all__ = ["DatasetBatch", "iterate_dataset", "limit_concurrency", "retry"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def retry(
    max_attempts: int = 3,
    delay: float = 0.25,
    backoff_factor: float = 2.0,
    exceptions: type[BaseException] | tuple[type[BaseException], ...] = (Exception,),
    on_retry: Callable[[Any, int], None] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a plain or async function so that it is called again when it raises.

    A cancellation is never retried, whatever `exceptions` says. The last attempt's exception is raised as it is.

    Args:
        max_attempts: how often the function is called at most, the first call included.
        delay: seconds before the second attempt.
        backoff_factor: by what each further delay is longer than the one before it.
        exceptions: what is worth another attempt; anything else is raised at once.
        on_retry: called before each delay with the exception and the number of the attempt that raised it, counted
            from 1; without it, a warning is logged.

    Raises:
        ConfigError: a number that is out of range.
        TypeError: what is decorated is not a function that can be called twice.

    Example:
        >>> @retry(max_attempts=3, delay=0, on_retry=lambda error, attempt: print(f"attempt {attempt}: {error}"))
        ... def divide(denominators: list[int]) -> float:
        ...     return 1 / denominators.pop(0)
        >>> divide([0, 0, 4])
        attempt 1: division by zero
        attempt 2: division by zero
        0.25
    """
    if callable(max_attempts):
        raise TypeError("write @retry() with parentheses")
    if max_attempts < 1 or not delay >= 0 or not backoff_factor >= 0:
        raise ConfigError(
            f"retry(max_attempts={max_attempts}, delay={delay}, backoff_factor={backoff_factor}): "
            "at least 1 attempt is made, and neither delay nor factor is negative"
        )

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = getattr(function, "__qualname__", repr(function))
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"retry: {name} is a generator, whose body runs after the call that would be retried")

        def is_last(error: BaseException, attempt: int) -> bool:
            return attempt == max_attempts or isinstance(error, asyncio.CancelledError)

        def report(error: BaseException, attempt: int) -> None:
            if on_retry is not None:
                on_retry(error, attempt)
            else:
                logger.warning("%s: attempt %d of %d failed: %r", name, attempt, max_attempts, error)

        def pause_s(attempt: int) -> float:
            return delay * backoff_factor ** (attempt - 1)

        @functools.wraps(function)
        async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            attempt = 0
            while True:
                attempt += 1
                try:
                    return await cast(Any, function)(*args, **kwargs)
                except exceptions as error:
                    if is_last(error, attempt):
                        raise
                    report(error, attempt)
                await asyncio.sleep(pause_s(attempt))

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            attempt = 0
            while True:
                attempt += 1
                try:
                    return function(*args, **kwargs)
                except exceptions as error:
                    if is_last(error, attempt):
                        raise
                    report(error, attempt)
                time.sleep(pause_s(attempt))

        return cast(Callable[P, R], call_async if inspect.iscoroutinefunction(function) else call)

    return decorate


def limit_concurrency(
    n: int, derive_key: Callable[..., Hashable] | None = None
) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[P, Coroutine[Any, Any, R]]]:
    """Decorates an async function so that at most `n` calls of it run at once; the others wait their turn.

    Functions decorated by one and the same limit share it.

    Args:
        n: how many calls run at once, per key.
        derive_key: called with the arguments of each call; only calls with equal keys wait for each other.

    Raises:
        ConfigError: `n` is below 1.
        TypeError: what is decorated is not an async function.

    Example:
        >>> @limit_concurrency(2, derive_key=lambda url: url.split("/")[0])
        ... async def fetch(url: str) -> str:
        ...     return url.upper()
        >>> asyncio.run(fetch("host/page"))
        'HOST/PAGE'
    """
    if callable(n):
        raise TypeError("write @limit_concurrency(n) with the number of calls")
    if n < 1:
        raise ConfigError(f"limit_concurrency({n}): with fewer than 1 call at once, none would ever run")
    # A semaphore belongs to one event loop, and is forgotten once no call holds it or waits for it.
    per_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakValueDictionary[Hashable, asyncio.Semaphore]]
    per_loop = WeakKeyDictionary()

    def decorate(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"limit_concurrency: {getattr(function, '__qualname__', function)!r} is no async function")

        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            key = derive_key(*args, **kwargs) if derive_key is not None else None
            semaphores = per_loop.setdefault(asyncio.get_running_loop(), WeakValueDictionary())
            semaphore = semaphores.setdefault(key, asyncio.Semaphore(n))
            async with semaphore:
                return await function(*args, **kwargs)

        return call

    return decorate


class DatasetBatch(NamedTuple, Generic[T]):
    """The items of one training step, and where in the run they stand."""

    items: list[T]
    step: int
    """Step of the whole run, counted from 0."""
    epoch: int
    """Pass over the data set, counted from 0."""
    epoch_step: int
    """Step within the epoch, counted from 0."""


def iterate_dataset(
    items: Iterable[T],
    groups_per_step: int = 1,
    num_epochs: int = 1,
    initial_step: int = 0,
    use_tqdm: bool = True,
) -> Iterator[DatasetBatch[T]]:
    """Returns an iterator over batches of a data set, each epoch shuffled in an order of its own.

    The order depends on the epoch and the number of items alone, so that a run that starts again at `initial_step`
    goes on with the batches that were still to come. The random state of the caller is neither read nor changed.

    Args:
        items: the data set; a sequence stays where it is, any other iterable is made a list.
        groups_per_step: items per batch; the last batch of an epoch may be smaller.
        num_epochs: how often each item comes.
        initial_step: the step of the first batch, for instance `await model.get_step()`.
        use_tqdm: whether a progress bar counts the batches.

    Raises:
        ConfigError: a number that is out of range.

    Example:
        >>> for batch in iterate_dataset(range(3), groups_per_step=2, num_epochs=2, use_tqdm=False):
        ...     print(batch.step, batch.epoch, batch.epoch_step, len(batch.items))
        0 0 0 2
        1 0 1 1
        2 1 0 2
        3 1 1 1
    """
    for name, value, least in [
        ("groups_per_step", groups_per_step, 1),
        ("num_epochs", num_epochs, 0),
        ("initial_step", initial_step, 0),
    ]:
        if value < least:
            raise ConfigError(f"iterate_dataset: {name} is at least {least}, got {value}")
    sequence = items if isinstance(items, Sequence) else list(items)
    return _batches(sequence, groups_per_step, num_epochs, initial_step, use_tqdm)


def _batches(
    items: Sequence[T], groups_per_step: int, num_epochs: int, initial_step: int, use_tqdm: bool
) -> Iterator[DatasetBatch[T]]:
    steps_per_epoch = math.ceil(len(items) / groups_per_step)
    num_steps = steps_per_epoch * num_epochs
    with bar(total=num_steps, initial=initial_step, desc="steps", unit="step", disable=not use_tqdm) as shown:
        for step in range(initial_step, num_steps):
            epoch, epoch_step = divmod(step, steps_per_epoch)
            start = epoch_step * groups_per_step
            chosen = _shuffled(len(items), epoch)[start : start + groups_per_step]
            yield DatasetBatch([items[index] for index in chosen], step, epoch, epoch_step)
            shown.update()


@functools.lru_cache(maxsize=4)
def _shuffled(num_items: int, epoch: int) -> tuple[int, ...]:
    """Returns the indices of the data set in the order of this epoch, which is also ART's."""
    indices = list(range(num_items))
    random.Random(epoch).shuffle(indices)
    return tuple(indices)
