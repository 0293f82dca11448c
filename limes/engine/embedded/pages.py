"""Pages of the KV cache: who holds them, and which hold a known beginning of a prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

PrefixKey = tuple[int, tuple[int, ...]]
ROOT = 0


class PagePool:
    """Counts holders of pages. A full prompt page can be published under its content; when nobody holds it any more it
    stays findable until its room is needed, the least recently used first.

    A key is (serial of the page before it, its own tokens), so equal keys mean equal beginnings, without hashing risk.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._key_of: dict[int, PrefixKey] = {}
        self._page_of: dict[PrefixKey, int] = {}
        self._serial_of: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._next_serial = ROOT + 1

    @property
    def num_available(self) -> int:
        """Pages that `take` can hand out."""
        return len(self._free) + len(self._idle)

    def take(self, num: int) -> list[int]:
        """Hand out `num` pages; the caller has checked that there are enough."""
        assert num <= self.num_available
        while len(self._free) < num:
            page, _ = self._idle.popitem(last=False)
            self._forget_page(page)
            self._free.append(page)
        pages = [self._free.pop() for _ in range(num)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, key: PrefixKey) -> int | None:
        """Take hold of the page published under `key`, if there is one."""
        page = self._page_of.get(key)
        if page is not None:
            self._holders[page] += 1
            self._idle.pop(page, None)
        return page

    def publish(self, page: int, key: PrefixKey) -> int:
        """Let others find a held page; returns the serial that its followers' keys start with."""
        assert self._holders[page] > 0
        if key in self._page_of:
            return self._serial_of[self._page_of[key]]
        serial, self._next_serial = self._next_serial, self._next_serial + 1
        self._key_of[page], self._page_of[key], self._serial_of[page] = key, page, serial
        return serial

    def serial(self, page: int) -> int:
        """Serial of a published page."""
        return self._serial_of[page]

    def release(self, pages: Iterable[int]) -> None:
        """Give up one hold on each page; the last pages of a prompt are forgotten first."""
        for page in reversed(list(pages)):
            assert self._holders[page] > 0, f"page {page} released twice"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def forget(self) -> None:
        """Drop all published contents; held pages stay held."""
        for page in list(self._key_of):
            self._forget_page(page)
        self._free.extend(self._idle)
        self._idle.clear()

    def _forget_page(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
        del self._serial_of[page]
