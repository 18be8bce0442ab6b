import gc
import threading
import weakref

import pytest

from lohan_ds.work import Work


class Buffer:
    pass


def test_then_chains_values_works_and_failures():
    inner, first = Work(), Work()
    chained = first.then(lambda value: inner).then(lambda value: value + 1)
    first.finish(0)
    assert not chained.done()
    inner.finish(41)
    assert chained.wait() == 42
    failed = Work()
    after = failed.then(lambda value: 1 / 0)
    failed.fail(OSError("disk"))
    with pytest.raises(OSError, match="disk"):
        after.wait()
    with pytest.raises(ZeroDivisionError):
        Work.completed().then(lambda value: 1 / 0).wait()


def test_all_of_waits_for_all_and_names_the_first_failure():
    works = [Work(), Work(), Work()]
    joint = Work.all_of(works, value="all")
    works[2].fail(ValueError("third"))
    works[1].fail(OSError("second"))
    assert not joint.done()
    works[0].finish()
    with pytest.raises(OSError, match="second"):
        joint.wait()
    assert Work.all_of([], value=7).wait() == 7


def test_wait_wakes_a_thread_and_a_work_ends_once():
    work, seen = Work(), []
    thread = threading.Thread(target=lambda: seen.append(work.wait()))
    thread.start()
    work.finish("there")
    thread.join(5)
    assert seen == ["there"]
    with pytest.raises(AssertionError):
        work.finish()


def test_an_ended_chain_keeps_no_buffer_alive_without_the_collector():
    gc.disable()
    try:
        buffer, published = Buffer(), Work()
        alive = weakref.ref(buffer)
        read = published.then(lambda _, out=buffer: Work.all_of([Work.completed(out), Work.completed(out)], value=out))
        read.on_done(lambda: None)
        published.finish()
        assert read.wait() is buffer
        del buffer, read
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", [False, True])
def test_the_first_of_several(fails):
    slow, fast = Work(), Work()
    first = Work.first_of([slow, fast])
    assert not first.done()
    fast.fail(OSError("gone")) if fails else fast.finish(3)
    assert first.wait() is None
    slow.finish()
    assert Work.first_of([slow, Work()]).done()


@pytest.mark.parametrize("fails", [False, True])
def test_nobody_sees_the_end_before_what_is_called_first(fails):
    """Also not who comes while it is being called."""
    work, entered, go_on, order = Work(), threading.Event(), threading.Event(), []

    def called_first():
        entered.set()
        assert go_on.wait(10)
        order.append("first")

    follow = work.first_calling(called_first)
    error = OSError("gone")
    thread = threading.Thread(target=lambda: work.fail(error) if fails else work.finish(3))
    thread.start()
    assert entered.wait(10) and work.done() and not follow.done()
    follow.on_done(lambda: order.append("then"))
    go_on.set()
    thread.join()
    assert order == ["first", "then"]
    assert follow.exception() is error if fails else follow.wait() == 3
