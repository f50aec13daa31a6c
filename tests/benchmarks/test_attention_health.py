"""The proof of alarms and guards in short: a safe run, a fatal rate of W_Q and W_K, and what a guard makes of it."""

from .attention_health import LIMIT, departure, ending, train

STEPS = 80
#: The rate at which the repeats are learnt within these steps, and a rate of W_Q and W_K at which they are not.
RATE, FATAL = 2.0, 30.0


def test_an_alarm_comes_before_the_loss_departs_and_a_guard_brings_the_run_back():
    safe, fatal, guarded = (
        train(RATE, qk, STEPS, repeats_alone=True, **guard)
        for qk, guard in ((1.0, {}), (FATAL, {}), (FATAL, {"guard": LIMIT}))
    )
    assert departure(safe.losses, safe.losses) is None
    departs = departure(fatal.losses, safe.losses)
    assert fatal.alarm is not None
    assert departs is not None
    assert fatal.alarm < departs
    assert max(fatal.scores) > 10 * LIMIT
    assert ending(fatal.losses, safe.losses) > 2
    assert max(guarded.scores) < max(fatal.scores) / 10
    assert guarded.losses[-1] < fatal.losses[-1] / 2


def test_a_departure_is_twenty_steps_in_a_row_above_the_safe_run():
    safe = [1.0] * 60
    assert departure([1.05] * 60, safe) is None
    assert departure([1.0] * 30 + [1.2] * 19 + [1.0] * 11, safe) is None
    assert departure([1.0] * 30 + [1.2] * 20 + [1.0] * 10, safe) == 31
    assert departure([1.0] * 30 + [float("nan")] * 30, safe) == 31
    assert ending([5.0] * 40 + [2.0] * 20, safe) == 2
