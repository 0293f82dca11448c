from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from limes.engine.embedded.pages import ROOT, PagePool

NUM_PAGES, SIZE = 7, 2
BLOCKS = st.tuples(st.integers(0, 1), st.integers(0, 1))


class PoolMachine(RuleBasedStateMachine):
    """Holders take chains of pages under contents; a model remembers the whole beginning that each page stands for."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.holders: list[list[int]] = []
        self.beginning: dict[int, tuple] = {}  # of published pages, until they are handed out anew

    @rule(blocks=st.lists(BLOCKS, max_size=4), num_own=st.integers(0, 2))
    def place(self, blocks, num_own):
        """What the scheduler does with a prompt: share what is published, take the rest, publish it."""
        if len(blocks) + num_own > self.pool.num_available:
            return
        serial, pages = ROOT, []
        for i, block in enumerate(blocks):
            page = self.pool.share((serial, block))
            if page is None:
                break
            assert self.beginning[page] == tuple(blocks[: i + 1])
            serial = self.pool.serial(page)
            pages.append(page)
        num_shared = len(pages)
        pages += self.pool.take(len(blocks) - num_shared + num_own)
        for page in pages[num_shared:]:
            self.beginning.pop(page, None)
        for i in range(num_shared, len(blocks)):
            serial = self.pool.publish(pages[i], (serial, blocks[i]))
            self.beginning[pages[i]] = tuple(blocks[: i + 1])
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        number = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(number))

    @rule()
    def forget(self):
        self.pool.forget()
        self.beginning.clear()

    @invariant()
    def every_page_is_held_or_available_once(self):
        pool = self.pool
        held = Counter(page for pages in self.holders for page in pages)
        assert pool._holders == [held[page] for page in range(NUM_PAGES)]
        free = [*pool._free, *pool._idle]
        assert sorted([*free, *held]) == list(range(NUM_PAGES))
        assert pool.num_available == len(free)

    @invariant()
    def published_pages_are_found_by_equal_beginnings_only(self):
        pool = self.pool
        assert {page: key for key, page in pool._page_of.items()} == pool._key_of
        assert set(pool._serial_of) == set(pool._key_of)
        assert len(set(pool._serial_of.values())) == len(pool._serial_of)
        assert set(pool._idle) <= set(pool._key_of)
        assert set(pool._key_of) <= set(self.beginning)

    def teardown(self):
        for pages in self.holders:
            self.pool.release(pages)
        assert self.pool.num_available == NUM_PAGES


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPagePool = PoolMachine.TestCase


def test_a_page_cannot_be_released_twice_nor_too_many_taken():
    pool = PagePool(2)
    pages = pool.take(2)
    with pytest.raises(AssertionError):
        pool.take(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages[:1])


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning():
    pool = PagePool(3)
    pages = pool.take(3)
    serial = pool.publish(pages[0], (ROOT, (1,)))
    second = pool.publish(pages[1], (serial, (2,)))
    pool.publish(pages[2], (second, (3,)))
    pool.release(pages)
    pool.take(1)
    assert pool.share((ROOT, (1,))) == pages[0]
    assert pool.share((serial, (2,))) == pages[1]
    assert pool.share((second, (3,))) is None


def test_least_recently_used_prompts_go_first():
    pool = PagePool(3)
    for token in range(3):
        page = pool.take(1)
        pool.publish(page[0], (ROOT, (token,)))
        pool.release(page)
    used = pool.share((ROOT, (0,)))
    pool.release([used])
    pool.take(2)
    assert pool.share((ROOT, (0,))) == used
    assert pool.share((ROOT, (1,))) is None
    assert pool.share((ROOT, (2,))) is None
