"""A model of the allocator made of sets of pages and the times at which their uses end."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from aradix.errors import DoubleFreeError, UsageError
from aradix.memory.allocator import SlotAllocator
from aradix.memory.fences import EventFence, FutureFence
from stress.device import VirtualDevice, VirtualStream

NUM_PAGES = 12

# When a use of a page ends, and on which stream.
Use = tuple[VirtualStream, float]


class Block:
    """Pages in the hands of the test: for which stream, used by which, and what was pending when they went out."""

    def __init__(self, pages: list[int], owner: VirtualStream | None, carried: dict[int, set[Use]]) -> None:
        self.pages = pages
        self.owner = owner
        self.carried = carried
        self.users: list[VirtualStream] = []
        self.held = False

    def split(self, num_pages: int) -> Block:
        other = Block(self.pages[num_pages:], self.owner, self.carried)
        other.users = self.users.copy()
        other.held = self.held
        self.pages = self.pages[:num_pages]
        return other


class Modelled:
    """An allocator on a virtual device, driven together with its model; every method checks what it got.

    `which` picks a block, modulo their number; where there is none, nothing happens.
    """

    def __init__(self, page_size: int, seed: int) -> None:
        self.device = VirtualDevice(seed)
        self.streams = [self.device.stream(name) for name in "abc"]
        self.page_size = page_size
        self.allocator = SlotAllocator(NUM_PAGES * page_size, page_size, event_factory=self.device.event)
        self.blocks: list[Block] = []
        self.gone: list[list[int]] = []
        self.last_poll = 0.0
        self.free = set(range(1, NUM_PAGES + 1))
        self.out: set[int] = set()
        self.held: set[int] = set()
        # Page -> the uses it waits for; and, for some of these pages, a future as well.
        self.retired: dict[int, set[Use]] = {}
        self.futures: dict[int, Future[None]] = {}
        self.open: list[Future[None]] = []

    def slots(self, pages: list[int]) -> list[int]:
        return [page * self.page_size + offset for page in pages for offset in range(self.page_size)]

    def pending(self, uses: set[Use]) -> set[Use]:
        return {use for use in uses if use[1] > self.device.clock.now}

    def poll(self) -> int:
        """What a poll does to the model; the number of pages."""
        self.last_poll = self.device.clock.now
        passed = [
            page
            for page, uses in self.retired.items()
            if not self.pending(uses) and (page not in self.futures or self.futures[page].done())
        ]
        for page in list(self.retired):
            self.retired[page] = self.pending(self.retired[page])
            if page in self.futures and self.futures[page].done():
                del self.futures[page]
        for page in passed:
            del self.retired[page]
        self.free |= set(passed)
        return len(passed)

    def takeable(self, stream: VirtualStream | None, host_visible: bool) -> set[int]:
        if stream is None or host_visible:
            return set()
        return {page for page in self.retired if page not in self.futures}

    def alloc(self, num_pages: int, stream: int | None, host_visible: bool, held: bool, users: list[int]) -> None:
        owner = None if stream is None else self.streams[stream]
        call: Any = self.allocator.alloc_held if held else self.allocator.alloc
        slots = call(num_pages * self.page_size, owner, host_visible)
        if len(self.free) < num_pages <= NUM_PAGES:
            self.poll()
        others = self.takeable(owner, host_visible)
        if num_pages > len(self.free) + len(others):
            assert slots is None
            return
        assert slots is not None
        pages = (slots[:: self.page_size] // self.page_size).tolist()
        assert slots.tolist() == self.slots(pages)
        assert len(set(pages)) == num_pages
        early = set(pages) - self.free
        assert early <= others
        if early:
            assert self.free <= set(pages)
            assert owner is not None
            own = {page for page in others if {user for user, _ in self.retired[page]} == {owner}}
            assert len(early & own) == min(len(early), len(own))
        block = Block(pages, owner, {page: self.retired.pop(page) for page in early})
        block.held = held
        self.free -= set(pages)
        (self.held if held else self.out).update(pages)
        if owner is None or host_visible:
            self.device.host_write(slots)
        self.blocks.append(block)
        for user in users:
            self.launch(block, self.streams[user])

    def launch(self, block: Block, user: VirtualStream) -> None:
        if block.owner is not None and user is not block.owner:
            user.wait_event(block.owner.record_event())
        for earlier in block.users:
            user.wait_event(earlier.record_event())
        user.launch(writes=self.slots(block.pages))
        if user not in block.users:
            block.users.append(user)

    def use(self, which: int, user: int) -> None:
        if self.blocks:
            self.launch(self.blocks[which % len(self.blocks)], self.streams[user])

    def split(self, which: int, cut: int) -> None:
        if self.blocks:
            self.blocks.append(self.blocks[which % len(self.blocks)].split(cut))

    def give_back(self, which: int, behind: str, retire: bool, backwards: bool) -> None:
        if not self.blocks:
            return
        block = self.blocks.pop(which % len(self.blocks))
        call: Any = self.allocator.free_held if block.held else self.allocator.retire if retire else self.allocator.free
        streams = list(block.users)
        fence: Any = None
        future: Future[None] | None = None
        uses = {(user, user.mark()[0]) for user in streams}
        if behind == "future":
            future = Future()
            fence = FutureFence(future)
        elif behind == "event fence" and streams:
            last = streams.pop()
            fence = EventFence(self.device.event(), last)
        slots = self.slots(block.pages)
        call(slots[::-1] if backwards else slots, streams, fence=fence)
        (self.held if block.held else self.out).difference_update(block.pages)
        for page in block.pages:
            # What passed since the last poll is not known to have passed.
            carried = {use for use in block.carried.get(page, set()) if use[1] > self.last_poll}
            if block.owner in streams:
                carried = set()
            if future is not None:
                self.futures[page] = future
            # New events are not asked before the next poll; a caller's own event is, at once.
            if streams or carried or self.pending(uses) or future is not None:
                self.retired[page] = uses | carried
            else:
                self.free.add(page)
        if future is not None:
            self.open.append(future)
        self.gone.append(block.pages)

    def change_hands(self, which: int) -> None:
        if not self.blocks:
            return
        block = self.blocks[which % len(self.blocks)]
        slots = self.slots(block.pages)
        if block.held:
            self.allocator.disown(slots)
            self.held -= set(block.pages)
            self.out |= set(block.pages)
        else:
            self.allocator.adopt(torch.tensor(slots, dtype=torch.int64).numpy())
            self.out -= set(block.pages)
            self.held |= set(block.pages)
        block.held = not block.held

    def advance(self, seconds: float) -> None:
        self.device.advance(seconds)

    def complete(self, which: int) -> None:
        if self.open:
            self.open.pop(which % len(self.open)).set_result(None)

    def reclaim(self) -> None:
        assert self.allocator.reclaim() == self.poll() * self.page_size

    def ask(self, stream: int | None, host_visible: bool) -> None:
        owner = None if stream is None else self.streams[stream]
        self.poll()
        expected = len(self.free) + len(self.takeable(owner, host_visible))
        assert self.allocator.takeable(owner, host_visible) == expected * self.page_size

    def free_again(self, which: int) -> None:
        if not self.gone:
            return
        back = [page for page in self.gone[which % len(self.gone)] if page in self.free or page in self.retired]
        if back:
            with pytest.raises(DoubleFreeError):
                self.allocator.free(self.slots(back))

    def free_from_the_wrong_side(self, which: int) -> None:
        if not self.blocks:
            return
        block = self.blocks[which % len(self.blocks)]
        if block.pages:
            wrong: Any = self.allocator.free if block.held else self.allocator.free_held
            with pytest.raises(UsageError) as raised:
                wrong(self.slots(block.pages))
            assert not isinstance(raised.value, DoubleFreeError)

    def check(self) -> None:
        """Every page is where the model has it, and no access raced."""
        self.allocator.check()
        for state, pages in {
            "free": self.free,
            "out": self.out,
            "held": self.held,
            "retired": set(self.retired),
        }.items():
            assert set(self.allocator.pages_in(state).tolist()) == pages, state
        assert self.allocator.quarantined_size() == 0
        assert self.device.races == []
