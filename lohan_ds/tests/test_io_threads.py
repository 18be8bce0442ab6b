"""The most urgent request goes first; nothing is lost at the end."""
from __future__ import annotations

import gc
import threading
import weakref

import pytest

from lohan_ds.store.io_threads import IoThreads, Urgency


def test_urgent_requests_pass_the_others_and_equal_ones_keep_their_order():
    threads, done, go = IoThreads(1), [], threading.Event()
    threads.submit(Urgency.UPDATE, go.wait)
    works = [threads.submit(urgency, done.append, (urgency, place)) for place in range(3)
             for urgency in (Urgency.AHEAD, Urgency.UPDATE, Urgency.FETCH)]
    go.set()
    for work in works:
        work.wait()
    assert done == sorted(done)
    threads.close()


def test_close_does_everything_first_and_ends_the_threads():
    before, threads, done = threading.active_count(), IoThreads(3), []
    for place in range(50):
        threads.submit(Urgency.AHEAD, done.append, place)
    threads.close()
    threads.close()
    assert sorted(done) == list(range(50)) and threading.active_count() == before


def test_a_failure_is_the_works_and_the_thread_goes_on():
    threads = IoThreads(1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(Urgency.FETCH, lambda: 1 // 0).wait()
    assert threads.submit(Urgency.FETCH, lambda: None).wait() is None
    threads.close()


class Buffer:
    pass


def test_an_idle_thread_keeps_no_buffer():
    threads, buffer = IoThreads(1), Buffer()
    there = weakref.ref(buffer)
    threads.submit(Urgency.FETCH, lambda buffer: None, buffer, holds=buffer).wait()
    threads.submit(Urgency.FETCH, lambda: None).wait()
    del buffer
    gc.collect()
    assert there() is None
    threads.close()
