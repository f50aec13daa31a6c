"""Reading ahead: the order, which reading starts when, and failures in the right position."""

import threading

import pytest
from qkov.circuits.reading.ahead import read_ahead


class Readings:
    """Readings that tell when they are begun, each ending only when it is let."""

    def __init__(self, count: int) -> None:
        self.begun: list[int] = []
        self._changes = threading.Condition()
        self.let = [threading.Event() for _ in range(count)]
        self.jobs = [lambda number=number: self.read(number) for number in range(count)]

    def read(self, number: int) -> int:
        with self._changes:
            self.begun.append(number)
            self._changes.notify_all()
        assert self.let[number].wait(timeout=10)
        return number

    def wait_until_begun(self, count: int) -> None:
        with self._changes:
            assert self._changes.wait_for(lambda: len(self.begun) >= count, timeout=60)
        assert len(self.begun) == count


def test_the_next_is_begun_while_one_is_in_use_and_no_more():
    readings = Readings(4)
    for event in readings.let[:3]:
        event.set()
    coming = read_ahead(readings.jobs)
    assert next(coming) == 0
    assert readings.begun == [0]
    assert next(coming) == 1
    readings.wait_until_begun(3)
    assert readings.begun == [0, 1, 2]
    assert next(coming) == 2
    readings.wait_until_begun(4)
    readings.let[3].set()
    assert list(coming) == [3]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_all_come_in_order(count):
    assert list(read_ahead([lambda number=number: number for number in range(count)])) == list(range(count))


def test_a_reading_that_fails_raises_in_its_place():
    def fails():
        raise ValueError("damaged")

    coming = read_ahead([lambda: 0, lambda: 1, fails, lambda: 3])
    assert [next(coming), next(coming)] == [0, 1]
    with pytest.raises(ValueError, match="damaged"):
        next(coming)


def test_stopping_does_not_wait_for_what_was_begun():
    readings = Readings(3)
    readings.let[0].set()
    readings.let[1].set()
    coming = read_ahead(readings.jobs)
    assert [next(coming), next(coming)] == [0, 1]
    coming.close()
    readings.let[2].set()
