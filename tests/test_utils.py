import asyncio
import gc
import logging
import random
import threading
import weakref

import numpy as np
import pytest

from art_ray.errors import ConfigError
from art_ray.utils import DatasetBatch, iterate_dataset, limit_concurrency, retry


class Flaky:
    """Fails the first `num_failures` calls."""

    def __init__(self, num_failures: int, error: BaseException | None = None):
        self.num_failures = num_failures
        self.error = error or ConnectionError("busy")
        self.num_calls = 0

    def call(self, answer="maybe"):
        """Returns an answer."""
        self.num_calls += 1
        if self.num_calls <= self.num_failures:
            raise self.error
        return answer

    async def call_async(self, answer="maybe"):
        await asyncio.sleep(0)
        return self.call(answer)


class TestRetry:
    def test_a_plain_function_is_called_until_it_answers(self):
        flaky = Flaky(2)
        assert retry(max_attempts=3, delay=0)(flaky.call)("no") == "no"
        assert flaky.num_calls == 3

    async def test_an_async_function_is_called_until_it_answers(self):
        flaky = Flaky(2)
        assert await retry(max_attempts=3, delay=0)(flaky.call_async)(answer="no") == "no"
        assert flaky.num_calls == 3

    async def test_the_last_error_is_raised_as_it_is(self):
        flaky = Flaky(9)
        with pytest.raises(ConnectionError) as caught:
            await retry(max_attempts=2, delay=0)(flaky.call_async)()
        assert caught.value is flaky.error
        assert flaky.num_calls == 2

    def test_an_error_of_another_kind_is_raised_at_once(self):
        flaky = Flaky(1)
        with pytest.raises(ConnectionError):
            retry(delay=0, exceptions=(TimeoutError,))(flaky.call)()
        assert flaky.num_calls == 1

    async def test_a_cancellation_is_not_retried_even_when_asked_to(self):
        flaky = Flaky(1, asyncio.CancelledError())
        with pytest.raises(asyncio.CancelledError):
            await retry(delay=0, exceptions=(BaseException,))(flaky.call_async)()
        assert flaky.num_calls == 1

    def test_on_retry_learns_the_error_and_the_attempt(self):
        seen = []
        flaky = Flaky(2)
        retry(delay=0, on_retry=lambda error, attempt: seen.append((error, attempt)))(flaky.call)()
        assert seen == [(flaky.error, 1), (flaky.error, 2)]

    def test_without_on_retry_each_failure_is_a_warning(self, caplog):
        with caplog.at_level(logging.WARNING):
            retry(delay=0)(Flaky(1).call)()
        assert "Flaky.call: attempt 1 of 3 failed: ConnectionError('busy')" in caplog.text

    async def test_each_delay_is_longer_by_the_factor(self, monkeypatch):
        delays = []
        monkeypatch.setattr("time.sleep", delays.append)
        retry(max_attempts=4, delay=0.5, backoff_factor=3)(Flaky(3).call)()
        assert delays == [0.5, 1.5, 4.5]

    def test_the_decorated_function_keeps_its_name_and_docstring(self):
        decorated = retry()(Flaky(0).call)
        assert (decorated.__name__, decorated.__doc__) == ("call", "Returns an answer.")

    @pytest.mark.parametrize("options", [{"max_attempts": 0}, {"delay": -1}, {"backoff_factor": float("nan")}])
    def test_numbers_that_mean_nothing_are_refused(self, options):
        with pytest.raises(ConfigError, match=next(iter(options))):
            retry(**options)

    def test_what_cannot_be_retried_is_refused(self):
        with pytest.raises(TypeError, match="parentheses"):
            retry(Flaky(0).call)

        async def answers():
            yield "maybe"

        with pytest.raises(TypeError, match="generator"):
            retry()(answers)


class Crowd:
    """Counts how many calls run at once."""

    def __init__(self):
        self.num_running = 0
        self.most = 0

    async def visit(self, room: str = "one") -> str:
        self.num_running += 1
        self.most = max(self.most, self.num_running)
        for _ in range(3):
            await asyncio.sleep(0)
        self.num_running -= 1
        return room


class TestLimitConcurrency:
    async def test_at_most_n_calls_run_at_once_and_all_of_them_run(self):
        crowd = Crowd()
        visit = limit_concurrency(2)(crowd.visit)
        assert await asyncio.gather(*(visit(str(i)) for i in range(7))) == [str(i) for i in range(7)]
        assert crowd.most == 2

    async def test_each_key_has_a_limit_of_its_own(self):
        crowd = Crowd()
        visit = limit_concurrency(2, derive_key=lambda room: room)(crowd.visit)
        await asyncio.gather(*(visit(room) for room in "aaaabbbb"))
        assert crowd.most == 4

    async def test_functions_under_one_limit_share_it(self):
        crowd = Crowd()
        limit = limit_concurrency(1)
        first, second = limit(crowd.visit), limit(crowd.visit)
        await asyncio.gather(first(), second(), first())
        assert crowd.most == 1

    async def test_a_call_that_fails_or_is_cancelled_frees_its_place(self):
        @limit_concurrency(1)
        async def call(error):
            await asyncio.sleep(0)
            raise error

        for error in (ValueError(), asyncio.CancelledError(), ValueError()):
            with pytest.raises(type(error)):
                await asyncio.wait_for(call(error), timeout=10)

    def test_it_works_in_one_event_loop_after_another(self):
        crowd = Crowd()
        visit = limit_concurrency(1)(crowd.visit)

        async def visits():
            await asyncio.gather(*(visit() for _ in range(3)))

        asyncio.run(visits())
        asyncio.run(visits())
        assert crowd.most == 1

    def test_event_loops_of_two_threads_do_not_wait_for_each_other(self):
        entered, leave = threading.Event(), threading.Event()

        @limit_concurrency(1)
        async def visit(stay):
            if stay:
                entered.set()
                await asyncio.to_thread(leave.wait, 60)

        thread = threading.Thread(target=lambda: asyncio.run(visit(stay=True)))
        thread.start()
        try:
            assert entered.wait(60)
            asyncio.run(asyncio.wait_for(visit(stay=False), timeout=10))
        finally:
            leave.set()
            thread.join()

    async def test_a_key_that_is_no_longer_used_is_forgotten(self):
        class Key:
            pass

        @limit_concurrency(1, derive_key=lambda key: key)
        async def visit(key):
            await asyncio.sleep(0)

        key = Key()
        await asyncio.gather(visit(key), visit(key))
        forgotten = weakref.ref(key)
        del key
        gc.collect()
        assert forgotten() is None

    def test_what_cannot_be_limited_is_refused(self):
        with pytest.raises(ConfigError, match="fewer than 1"):
            limit_concurrency(0)
        with pytest.raises(TypeError, match="no async function"):
            limit_concurrency(1)(len)
        with pytest.raises(TypeError, match="number of calls"):
            limit_concurrency(Crowd().visit)


def batches_of(*args, **options) -> list[DatasetBatch]:
    return list(iterate_dataset(*args, use_tqdm=False, **options))


class TestIterateDataset:
    def test_each_item_comes_once_per_epoch(self):
        batches = batches_of(list("abcde"), groups_per_step=2, num_epochs=3)
        assert [len(b.items) for b in batches] == [2, 2, 1] * 3
        for epoch in range(3):
            assert sorted(item for b in batches if b.epoch == epoch for item in b.items) == list("abcde")

    def test_a_batch_has_named_parts_and_can_be_unpacked(self):
        *_, last = batches_of(range(4), groups_per_step=2, num_epochs=2)
        items, step, epoch, epoch_step = last
        assert (items, step, epoch, epoch_step) == (last.items, last.step, last.epoch, last.epoch_step)
        assert (step, epoch, epoch_step) == (3, 1, 1)

    def test_every_epoch_has_an_order_of_its_own_and_every_run_the_same(self):
        first = batches_of(range(20), groups_per_step=20, num_epochs=2)
        assert first[0].items != first[1].items
        assert first == batches_of(range(20), groups_per_step=20, num_epochs=2)

    def test_the_order_is_the_one_that_art_gives(self):
        # iterate_dataset(list(range(7)), 3, 2) of openpipe-art 0.5.18
        assert [b.items for b in batches_of(range(7), 3, 2, initial_step=1)] == [
            [0, 5, 3],
            [6],
            [3, 6, 5],
            [2, 0, 4],
            [1],
        ]

    @pytest.mark.parametrize("initial_step", range(8))
    def test_a_run_that_starts_again_goes_on_where_it_was(self, initial_step):
        whole = batches_of(range(5), groups_per_step=2, num_epochs=2)
        assert batches_of(range(5), groups_per_step=2, num_epochs=2, initial_step=initial_step) == whole[initial_step:]

    def test_the_random_state_of_the_caller_is_untouched(self):
        random.seed(7)
        np.random.seed(7)
        before, before_numpy = random.getstate(), np.random.get_state()[1].tolist()
        batches_of(range(20), num_epochs=2)
        assert random.getstate() == before
        assert np.random.get_state()[1].tolist() == before_numpy

    def test_neither_does_the_state_of_the_caller_change_the_order(self):
        random.seed(1)
        first = batches_of(range(20))
        random.seed(2)
        assert batches_of(range(20)) == first

    def test_an_iterable_is_as_good_as_a_list(self):
        assert batches_of(i for i in range(5)) == batches_of(list(range(5)))

    def test_nothing_gives_no_batch(self):
        assert batches_of([]) == []
        assert batches_of([1, 2], num_epochs=0) == []

    @pytest.mark.parametrize("options", [{"groups_per_step": 0}, {"num_epochs": -1}, {"initial_step": -1}])
    def test_numbers_that_mean_nothing_are_refused_at_the_call(self, options):
        with pytest.raises(ConfigError, match=next(iter(options))):
            iterate_dataset([1], **options)

    def test_the_bar_counts_steps_and_starts_where_the_run_does(self, capsys):
        for _ in iterate_dataset(range(4), initial_step=3):
            pass
        assert " 4/4 " in capsys.readouterr().err.rpartition("\r")[2]
