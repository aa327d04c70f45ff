"""The tape on a few steps whose memory can be computed by hand."""

from __future__ import annotations

from polyhead.costs.recording.tape import Tape


def test_outside_training_nothing_is_kept_and_what_has_no_name_is_gone():
    tape = Tape(training=False)
    x = tape.external(100)
    first = tape.step(x, output_size=30, saves=(x,), saved_bytes=7, workspace=11)
    assert (tape.now, tape.peak) == (30, 48)
    second = tape.step(first, output_size=20, saves=(first,))
    tape.release(first)
    tape.release(first)  # once is enough
    assert (tape.now, tape.peak) == (20, 50)
    tape.finish(second)
    assert tape.now == 20


def test_what_a_step_keeps_lives_until_its_backward():
    tape = Tape(training=True)
    x = tape.external(10)
    first = tape.step(x, output_size=30, saved_bytes=7)
    second = tape.step(first, output_size=20, saves=(first,), backward_workspace=5)
    tape.finish(second)
    assert tape.now == 30 + 7 + 20
    tape.backward()
    # The gradient of the first, and what computing it takes; then the first goes, and the input gets its gradient.
    assert tape.peak == 57 + 30 + 5
    assert tape.now == 20 + 10


def test_a_view_keeps_the_whole_and_gradients_of_parts_are_put_together():
    tape = Tape(training=True)
    whole = tape.step(tape.external(0), output_size=30)
    left, right = tape.views(whole, 10, 20)
    result = tape.step(left, output_size=1, saves=(left,))
    tape.release(right)  # a part
    tape.finish(result)
    assert tape.now == 31
    tape.backward()
    # The gradient of a part beside all that was there; when the whole has gone, its gradient beside that of the part.
    assert tape.peak == 31 + 10 == 1 + 10 + 30
    assert tape.now == 1


def test_gradients_of_a_tensor_that_is_read_twice_are_added_to_a_third():
    tape = Tape(training=True)
    x = tape.external(10)
    both = tape.step(tape.step(x, output_size=2), tape.step(x, output_size=2), output_size=1)
    tape.finish(both)
    tape.backward()
    # The result, the gradient that has come first, the second one, and their sum.
    assert tape.peak == 1 + 10 + 10 + 10
    assert tape.now == 1 + 10


def test_a_gradient_that_is_passed_on_takes_no_memory():
    tape = Tape(training=True)
    x = tape.external(10)
    copied = tape.step(x, output_size=10, passes_gradient=True)
    result = tape.step(copied, output_size=1)
    tape.finish(result)
    tape.backward()
    assert (tape.now, tape.peak) == (11, 11)
