"""Readers get what the update they wait for has made, and nothing of a speculation that was dropped."""
from __future__ import annotations

import torch

from lohan_ds.block import make_block
from lohan_ds.store.feeds import Feeds
from lohan_ds.work import Work

BLOCK = make_block(0, "b", "bfloat16", [("p", (4096,), 0)], 2048)
FIRST, SECOND = BLOCK.chunks


def values(number: float) -> torch.Tensor:
    return torch.full((2048,), number, dtype=torch.bfloat16)


def out() -> torch.Tensor:
    return torch.zeros(4096, dtype=torch.bfloat16)


def test_chunks_made_before_and_after_the_read():
    feeds, update = Feeds(1), Work()
    feeds.give(0, update, FIRST, values(1))
    feed = feeds.add(BLOCK, out(), update)
    assert not feed.work.done()
    feeds.give(0, update, SECOND, values(2))
    assert torch.equal(feed.work.wait(), torch.cat([values(1), values(2)]))


def test_what_was_written_is_read_from_the_drive():
    feeds, update = Feeds(1), Work()
    feeds.give(0, update, FIRST, values(1))
    feeds.written(0, FIRST)
    feed = feeds.add(BLOCK, out(), update)
    feeds.give(0, update, SECOND, values(2))
    assert not feed.work.done() and set(feed.stop()) == {SECOND.index}


def test_a_speculation_that_stands():
    feeds, update = Feeds(1), Work()
    feeds.give(0, None, FIRST, values(1))
    feed = feeds.add(BLOCK, out(), update)
    assert not feed.stop.__self__._taken, "nothing before it is known to stand"
    feeds.adopt(0, update)
    feeds.give(0, None, SECOND, values(2))   # the same speculation goes on
    assert torch.equal(feed.work.wait(), torch.cat([values(1), values(2)]))


def test_a_whole_speculation_that_stands_feeds_who_waits_already():
    feeds, update = Feeds(1), Work()
    feeds.give(0, None, FIRST, values(1))
    feeds.give(0, None, SECOND, values(2))
    early = feeds.add(BLOCK, out(), update)
    feeds.adopt(0, update)
    late = feeds.add(BLOCK, out(), update)
    assert torch.equal(early.work.wait(), late.work.wait())


def test_a_speculation_that_is_dropped():
    feeds, update = Feeds(1), Work()
    feeds.give(0, None, FIRST, values(1))
    feeds.written(0, FIRST)
    feeds.give(0, None, SECOND, values(1))   # still to be written when the update is decided
    feed = feeds.add(BLOCK, out(), update)
    feeds.written(0, SECOND)
    feeds.give(0, update, FIRST, values(3))
    feeds.give(0, update, SECOND, values(4))
    assert torch.equal(feed.work.wait(), torch.cat([values(3), values(4)]))


def test_the_next_speculation_is_of_no_update_yet():
    feeds, update, following = Feeds(1), Work(), Work()
    feeds.adopt(0, update)
    update.finish(0)
    feeds.give(0, None, FIRST, values(1))
    feeds.give(0, None, SECOND, values(1))
    feed = feeds.add(BLOCK, out(), following)
    assert not feed.work.done() and not feed.stop()
