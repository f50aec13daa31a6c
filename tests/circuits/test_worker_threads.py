"""Work in threads: every part runs once, results are in order, and thread counts are restored."""

import multiprocessing
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from qkov.circuits import Circuit
from qkov.circuits.algebra.threads import ITEMS_AT_ONCE, _idle, in_threads, side_by_side
from threadpoolctl import ThreadpoolController, threadpool_limits

#: Two threads are busy with so many jobs of 0.1 seconds each for longer than anything here takes.
MORE_THAN_A_MINUTE_OF_JOBS = 1500


@pytest.fixture
def two_threads():
    """Give torch and numpy two threads whatever the environment says, and start without workers."""
    before = torch.get_num_threads()
    _idle.clear()
    torch.set_num_threads(2)
    with threadpool_limits(2, user_api="blas"):
        yield
    torch.set_num_threads(before)


def numpy_threads() -> list[int]:
    return [library["num_threads"] for library in ThreadpoolController().select(user_api="blas").info()]


@pytest.mark.parametrize("failing", [0, 1])
def test_when_a_part_fails_the_others_are_waited_for(two_threads, failing):
    has_failed, ended = threading.Event(), []

    def job(start, stop):
        if start == failing:
            has_failed.set()
            raise ValueError("this part fails")
        has_failed.wait()
        # Long enough for a caller that does not wait to be seen to go on.
        time.sleep(0.3)
        ended.append(numpy_threads())

    with pytest.raises(ValueError, match="this part fails"):
        in_threads(job, 2)
    assert [set(numbers) for numbers in ended] == [{1}]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_the_parts_are_the_whole_in_order(two_threads, count):
    parts = in_threads(lambda start, stop: list(range(start, stop)), count)
    assert [number for part in parts for number in part] == list(range(count))
    assert len(parts) == max(1, min(2, count))


def test_each_part_has_one_thread_and_other_thread_counts_stay(two_threads):
    numpys = numpy_threads()
    seen = in_threads(lambda *_: (torch.get_num_threads(), threading.current_thread().name, numpy_threads()), 2)
    assert all(threads == 1 and name.startswith("qkov") for threads, name, _ in seen)
    assert all(set(of_numpy) == {1} for *_, of_numpy in seen)
    assert torch.get_num_threads() == 2
    assert numpy_threads() == numpys
    others = []
    later = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert others == [2]


def test_an_error_in_a_part_reaches_the_caller_and_thread_counts_are_restored(two_threads):
    def fails(*_):
        raise ValueError("in a part")

    numpys = numpy_threads()
    with pytest.raises(ValueError, match="in a part"):
        in_threads(fails, 4)
    assert numpy_threads() == numpys


def test_concurrent_callers_restore_numpys_thread_count(two_threads):
    numpys = numpy_threads()
    assert set(numpys) == {2}
    is_working, may_end = threading.Event(), threading.Event()

    def begins_later_and_ends_last(*_):
        is_working.set()
        assert may_end.wait(60)

    other = threading.Thread(target=in_threads, args=(begins_later_and_ends_last, 1))

    def works(*_):
        other.start()
        assert is_working.wait(60)
        return set(numpy_threads())

    assert in_threads(works, 1) == [{1}]
    may_end.set()
    other.join()
    assert numpy_threads() == numpys


@pytest.mark.parametrize(
    ("left", "right"), [((5,), (5,)), ((1,), (5,)), ((5,), ()), ((2, 7), (7,)), ((7,), (2, 1)), ((0,), (0,))]
)
def test_spectra_do_not_depend_on_the_number_of_threads(two_threads, left, right):
    """Whatever of the batch is shared; and the SVD gives back the matrices."""
    torch.manual_seed(0)
    circuit = Circuit(torch.randn(*left, 40, 6), torch.randn(*right, 6, 30))
    many = circuit.singular_values(), *circuit.svd(), circuit.frobenius_norm()
    torch.set_num_threads(1)
    one = circuit.singular_values(), *circuit.svd(), circuit.frobenius_norm()
    assert all(torch.equal(some, other) for some, other in zip(many, one, strict=True))
    assert many[0].shape == (*circuit.batch_shape, 6)
    U, s, V = many[1:4]
    torch.testing.assert_close((U * s[..., None, :]) @ V, circuit.dense(), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(two_threads):
    circuit = Circuit(torch.randn(4, 20, 3), torch.randn(4, 3, 20))
    values = circuit.singular_values()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert torch.equal(pool.apply_async(circuit.singular_values).get(timeout=60), values)


def test_items_run_in_parallel_and_results_are_in_order(two_threads):
    together = threading.Barrier(2)
    has_ended = [threading.Event() for _ in range(6)]

    def job(number: int) -> tuple[int, int, str]:
        # Neither gets past the barrier alone; the later one is done first.
        together.wait(60)
        if number % 2 == 0:
            assert has_ended[number + 1].wait(60)
        has_ended[number].set()
        return number, torch.get_num_threads(), threading.current_thread().name

    numpys = numpy_threads()
    done = side_by_side(job, iter(range(6)))
    assert [number for number, *_ in done] == list(range(6))
    assert all(threads == 1 and name.startswith("qkov") for _, threads, name in done)
    assert side_by_side(lambda _: set(numpy_threads()), range(3)) == [{1}] * 3
    assert (torch.get_num_threads(), numpy_threads()) == (2, numpys)
    assert side_by_side(job, []) == []


def test_no_more_items_are_in_memory_than_are_worked_on(two_threads):
    alive, most = weakref.WeakSet(), []

    class Item:
        pass

    def made() -> Item:
        item = Item()
        alive.add(item)
        most.append(len(alive))
        return item

    def items():
        for _ in range(20):
            yield made()

    together = threading.Barrier(2)
    side_by_side(lambda _: together.wait(60), items())
    assert len(most) == 20
    assert max(most) == 2


def test_after_an_error_no_further_job_starts_or_runs_on(two_threads):
    begun, ended = [], []
    has_other_begun, fails, has_returned = threading.Event(), threading.Event(), threading.Event()

    def job(number: int) -> None:
        begun.append(number)
        if number == 3:
            assert has_other_begun.wait(60)
            fails.set()
            raise ValueError("of item 3")
        if number == 4:
            has_other_begun.set()
            assert fails.wait(60)
        if number >= 4:
            assert not has_returned.wait(0.1), "the caller did not wait for this job"
        ended.append(number)

    numpys = numpy_threads()
    with pytest.raises(ValueError, match="of item 3"):
        side_by_side(job, range(MORE_THAN_A_MINUTE_OF_JOBS))
    has_returned.set()
    assert len(begun) < MORE_THAN_A_MINUTE_OF_JOBS
    assert sorted([*ended, 3]) == sorted(begun)
    assert numpy_threads() == numpys


def test_an_error_in_the_iterator_reaches_the_caller(two_threads):
    def items():
        yield 1
        raise OSError("the file ends")

    with pytest.raises(OSError, match="the file ends"):
        side_by_side(lambda number: number, items())


@pytest.mark.parametrize("attempt", range(5))
def test_an_interrupt_waits_for_running_jobs(two_threads, heard_interrupts, attempt):
    """The signal comes about when the caller begins to wait, where Python may not notice it at once."""
    begun, ended = [], []
    is_heard, has_returned = threading.Event(), threading.Event()

    def interrupt(*_: object) -> None:
        is_heard.set()
        raise KeyboardInterrupt

    def job(number: int) -> None:
        begun.append(number)
        if number == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        if number >= 2:
            assert is_heard.wait(60)
            assert not has_returned.wait(0.1), "the caller did not wait for this job"
        ended.append(number)

    signal.signal(signal.SIGINT, interrupt)
    with pytest.raises(KeyboardInterrupt):
        side_by_side(job, range(MORE_THAN_A_MINUTE_OF_JOBS))
    has_returned.set()
    assert len(begun) < MORE_THAN_A_MINUTE_OF_JOBS
    assert sorted(begun) == sorted(ended)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_jobs_record_gradients_if_the_caller_does(two_threads, enabled, threads):
    torch.set_num_threads(threads)
    with torch.set_grad_enabled(enabled):
        assert side_by_side(lambda _: torch.is_grad_enabled(), range(4)) == [enabled] * 4


def test_with_one_thread_jobs_run_in_the_callers_thread(two_threads):
    torch.set_num_threads(1)
    assert side_by_side(lambda _: threading.current_thread(), range(3)) == [threading.current_thread()] * 3


def test_parallel_jobs_may_split_their_own_work(two_threads):
    products = side_by_side(lambda seed: Circuit(*factors(seed)).singular_values(), range(6))
    for seed, found in enumerate(products):
        left, right = factors(seed)
        torch.testing.assert_close(found, torch.linalg.svdvals(left @ right)[:, :5], rtol=1e-9, atol=0)


def test_items_are_taken_by_one_thread_at_a_time(two_threads):
    class Items:
        def __init__(self):
            self.left, self.is_taken = 8, False

        def __iter__(self):
            return self

        def __next__(self):
            assert not self.is_taken
            if not self.left:
                raise StopIteration
            self.is_taken = True
            # Give the other thread time to come in; no event says that it does not.
            time.sleep(0.005)
            self.left, self.is_taken = self.left - 1, False
            return self.left

    assert side_by_side(lambda number: number, Items()) == list(range(7, -1, -1))


def test_many_threads_are_shared_by_a_few_items(two_threads):
    torch.set_num_threads(2 * ITEMS_AT_ONCE + 1)
    running, most, lock = [], [], threading.Lock()
    together = threading.Barrier(ITEMS_AT_ONCE)

    def job(_: int) -> int:
        with lock:
            running.append(1)
            most.append(len(running))
        together.wait(60)
        with lock:
            running.pop()
        return torch.get_num_threads()

    assert side_by_side(job, range(5 * ITEMS_AT_ONCE)) == [2] * 5 * ITEMS_AT_ONCE
    assert max(most) == ITEMS_AT_ONCE
    assert torch.get_num_threads() == 2 * ITEMS_AT_ONCE + 1


@pytest.mark.parametrize("within", ["a pool of the user's", "more threads", "side by side again"])
def test_a_job_may_wait_for_threads_of_its_own(two_threads, within):
    circuit = Circuit(*factors(0))
    wanted = circuit.singular_values()

    def job(_: int) -> torch.Tensor:
        if within == "more threads":
            torch.set_num_threads(2)
            return Circuit(*factors(0)).singular_values()
        if within == "side by side again":
            torch.set_num_threads(2)
            return side_by_side(lambda seed: Circuit(*factors(seed)).singular_values(), [0, 1])[0]
        with ThreadPoolExecutor(2) as own:
            return next(own.map(lambda seed: Circuit(*factors(seed)).singular_values(), [0, 1]))

    found: list[torch.Tensor] = []
    working = threading.Thread(target=lambda: found.extend(side_by_side(job, range(4))), daemon=True)
    working.start()
    working.join(60)
    assert len(found) == 4
    for values in found:
        torch.testing.assert_close(values, wanted, rtol=1e-12, atol=0)


def test_callers_do_not_wait_for_each_others_items(two_threads):
    may_end = threading.Event()
    working = threading.Thread(target=side_by_side, args=(lambda _: may_end.wait(60), range(2)))
    working.start()
    try:
        assert in_threads(lambda start, stop: (start, stop), 4) == [(0, 2), (2, 4)]
        assert side_by_side(lambda number: number, range(4)) == [0, 1, 2, 3]
    finally:
        may_end.set()
        working.join()


def test_threads_that_cannot_start_raise_an_error_instead_of_hanging(two_threads, monkeypatch):
    started, start = [], threading.Thread.start

    def only_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", only_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        in_threads(lambda *_: None, 4)
    monkeypatch.undo()
    started[0].join(60)
    assert not started[0].is_alive()
    assert torch.get_num_threads() == 2
    assert in_threads(lambda *_: torch.get_num_threads(), 4) == [1, 1]


@pytest.mark.parametrize("threads", [1, 2])
def test_inference_mode_does_not_affect_later_calls(two_threads, threads):
    torch.set_num_threads(threads)
    left, right = (factor.float()[:1] for factor in factors(0))
    with torch.inference_mode():
        within = Circuit(left, right).frobenius_norm()
    assert Circuit(left, right).frobenius_norm().tolist() == within.tolist()


def factors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (4, 30, 5), (4, 5, 20)
    left, right = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return left, right
