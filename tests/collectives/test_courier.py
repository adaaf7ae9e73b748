"""The courier starts collectives in their order, and none waits for another to be posted."""

import gc
import threading

import pytest

from zerolab.collectives.courier import Courier


def test_what_comes_meanwhile_is_started_before_the_thread_goes_back_to_wait():
    courier, order, came = Courier(), [], threading.Event()

    def first():
        assert came.wait(5)  # until the second is handed over
        order.append("first posted")
        yield
        order.append("first done")

    def second():
        order.append("second posted")
        yield
        order.append("second done")

    deliveries = [courier.carry(first()), courier.carry(second())]
    came.set()
    for delivery in deliveries:
        delivery.wait()
    assert order == ["first posted", "second posted", "first done", "second done"]


def test_a_second_half_takes_its_turn_behind_what_was_posted_before_it():
    courier, order, came = Courier(), [], threading.Event()

    def halves(name: str):
        assert came.wait(5)
        for half in (1, 2):
            order.append(f"{name}{half}")
            yield

    deliveries = [courier.carry(halves("a")), courier.carry(halves("b"))]
    came.set()
    for delivery in deliveries:
        delivery.wait()
    assert order == ["a1", "b1", "a2", "b2"]


def test_after_an_error_everything_under_way_and_to_come_ends_in_it():
    courier, came = Courier(), threading.Event()

    def under_way():
        assert came.wait(5)
        yield
        yield

    def wrong():
        yield
        raise RuntimeError("another path")

    deliveries = [courier.carry(under_way()), courier.carry(wrong())]
    came.set()
    deliveries.append(courier.carry(under_way()))
    for delivery in [*deliveries, courier.carry(under_way())]:
        with pytest.raises(RuntimeError, match="another path"):
            delivery.wait()


def test_its_thread_ends_with_it_and_after_what_is_under_way():
    courier, came, done = Courier(), threading.Event(), threading.Event()

    def last():
        yield
        assert came.wait(5)
        yield
        done.set()

    courier.carry(last())
    thread = courier._thread
    del courier
    gc.collect()
    came.set()
    thread.join(5)
    assert done.is_set() and not thread.is_alive()
