"""The oracles speak where something is wrong: each is shown what it exists for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from aradix import CacheInitParams, Namespace, RadixCache
from aradix.cache.locks import Gates, StandingGate
from stress.harness.book import Book, Record
from stress.harness.builder import Builder
from stress.harness.compare import Noted, explain, make_linear, make_sequential
from stress.harness.kernels import Kernels
from stress.harness.outcome import Violation
from stress.harness.pages import Call, PageModel
from stress.harness.play import play
from stress.harness.worlds import Act, World
from stress.planted.plant import become

HERE = Namespace()


def held(book: Book, tokens: list[int], slots: list[int], published: int = 0) -> Record:
    """A record that found nothing, was given these slots, and published some of them."""
    record = book.new("lease", HERE)
    book.matched(record, book.since(HERE, tokens), tokens, [], len(tokens))
    book.grew(record, slots, len(slots))
    book.computed(record, book.of(HERE, tokens))
    if published:
        book.published(record, published, published, 0, slots, published)
    return record


def find(book: Book, tokens: list[int], slots: list[int]) -> None:
    record = book.new("lease", HERE)
    book.matched(record, book.since(HERE, tokens), tokens, slots, len(tokens))


def slot_of_another(book: Book) -> None:
    held(book, [1], [5])
    held(book, [2], [5])


def slot_that_is_pinned(book: Book) -> None:
    held(book, [1, 2], [5, 6], published=2)
    held(book, [3], [6])


def too_many_slots(book: Book) -> None:
    record = held(book, [1, 2, 3], [5])
    book.grew(record, [5, 6, 7], 1)


def found_unpublished(book: Book) -> None:
    held(book, [1, 2], [5, 6])
    find(book, [1, 2], [5, 6])


def found_after_a_flush(book: Book) -> None:
    held(book, [1, 2], [5, 6], published=2)
    book.flushed(HERE)
    find(book, [1, 2], [5, 6])


def found_other_tokens(book: Book) -> None:
    held(book, [1, 2], [5, 6], published=2)
    find(book, [1, 3], [5, 6])


def found_too_little(book: Book) -> None:
    held(book, [1, 2], [5, 6], published=2)
    find(book, [1, 2, 3], [5])


def published_after_a_flush(book: Book) -> None:
    record = held(book, [1, 2], [5, 6])
    book.flushed(HERE)
    book.published(record, 2, 2, 0, [5, 6], 2)


def repointed_to_something_else(book: Book) -> None:
    record = held(book, [1, 3], [7, 8])
    held(book, [1, 2], [5, 6], published=2)
    book.published(record, 2, 2, 2, [5, 6], 0)


def peeked_too_far(book: Book) -> None:
    book.peeked(HERE, book.since(HERE, [1, 2]), [1, 2], 2)


def stood_below_a_gate(book: Book) -> None:
    book.gate_granted(HERE, [1])
    held(book, [1, 2], [5, 6], published=2)
    find(book, [1, 2], [5, 6])


@pytest.mark.parametrize(
    ("act", "oracle"),
    [
        (slot_of_another, "owner"),
        (slot_that_is_pinned, "owner"),
        (too_many_slots, "owner"),
        (found_unpublished, "history"),
        (found_after_a_flush, "history"),
        (found_other_tokens, "history"),
        (found_too_little, "lost"),
        (published_after_a_flush, "history"),
        (repointed_to_something_else, "history"),
        (peeked_too_far, "history"),
        (stood_below_a_gate, "exclusive"),
    ],
)
def test_the_book_objects(act: Callable[[Book], None], oracle: str) -> None:
    book = Book(16, 1)
    with pytest.raises(Violation) as found:
        act(book)
    assert found.value.oracle == oracle
    assert book.violation is found.value


def test_the_book_accepts_what_is_right() -> None:
    book = Book(16, 1)
    first = held(book, [1, 2, 3], [5, 6, 7], published=2)
    find(book, [1, 2, 4], [5, 6])
    book.released(first)
    held(book, [9], [7])
    book.flushed(HERE)
    find(book, [1, 2], [])


def test_a_read_of_something_else_is_garbled() -> None:
    book = Book(8, 1)
    kernels = Kernels(World(seed=1, num_streams=0), book)
    contents = book.of(HERE, [1, 2])
    kernels.write(None, (), (), [3], contents[:1], "writer")
    kernels.read(None, [3], contents[:1], "reader")
    with pytest.raises(Violation, match="instead of") as found:
        kernels.read(None, [3], contents[1:], "reader")
    assert found.value.oracle == "garbled"


def call(task: int, begin: int, end: int, name: str, lease: int, args: tuple[object, ...], result: object) -> Noted:
    return Noted(task, Call(name, lease, args), begin, end, result)  # type: ignore[arg-type]


def test_an_order_is_found_only_where_there_is_one() -> None:
    opened = call(0, 1, 2, "open", 1, (0, (1, 2), 2), (0,))
    grown = call(0, 3, 4, "grow", 1, (2,), ("grown",))
    published = call(0, 5, 8, "commit", 1, ((1, 2),), (0, 2))
    seen = call(1, 6, 7, "peek", 0, (0, (1, 2)), (2,))
    order = explain([opened, grown, published, seen], PageModel(4, 1, "lru"))
    assert order == [opened, grown, published, seen]
    too_early = call(1, 3, 4, "peek", 0, (0, (1, 2)), (2,))
    assert explain([opened, grown, published, too_early], PageModel(4, 1, "lru")) is None
    half = call(1, 6, 7, "peek", 0, (0, (1, 2)), (1,))
    assert explain([opened, grown, published, half], PageModel(4, 1, "lru")) is None


def test_the_model_disagrees_with_another_order_of_eviction() -> None:
    class Reversed(Builder):
        def cache(self, params: CacheInitParams) -> RadixCache:
            others = {"lru": "mru", "mru": "lru", "fifo": "filo", "filo": "fifo"}
            return RadixCache(replace(params, eviction_policy=others[params.eviction_policy]))

    failures = [play(make_sequential(seed), builder=Reversed()).failure for seed in range(30)]
    assert [failure.oracle for failure in failures if failure is not None].count("model") > 5


def test_answers_that_no_order_explains_are_found() -> None:
    class Forgetful(Builder):
        def cache(self, params: CacheInitParams) -> RadixCache:
            class Cache(RadixCache):
                def peek(self, key: object) -> int:
                    return 0

            return Cache(params)

    found = [
        done.failure.oracle
        for seed in range(120)
        if (done := play(make_linear(seed), builder=Forgetful())).failure is not None
    ]
    assert "linear" in found


class _NeverOpens(Gates):
    def open(self, gate: StandingGate) -> None:
        gate.granted = True


def test_a_deadlock_names_who_waits_and_where() -> None:
    class Stuck(Builder):
        def cache(self, params: CacheInitParams) -> RadixCache:
            cache = RadixCache(params)
            become(cache._gates, _NeverOpens)
            return cache

    world = World(
        seed=1,
        num_streams=0,
        keys=((0, (1, 2)),),
        tasks=((Act("exclusive", (0, 0, 0, 0)),), (Act("pause", (1,)), Act("request", (0,), (Act("grow", (2, 0)),)))),
    )
    failure = play(world, builder=Stuck()).failure
    assert failure is not None
    assert failure.oracle == "deadlock"
    assert "task 1" in failure.message
    assert "__aenter__" in failure.message
