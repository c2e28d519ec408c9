"""Read from the network in several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

T = TypeVar("T")

THREADS = 16


def start_together(iterators: Sequence[Iterator[T]], readers: Sequence[Hashable]) -> list[Iterator[T]]:
    """Return the iterators with their first items read, in threads. Those with the same reader are read one by one."""
    groups: dict[Hashable, list[int]] = {}
    for number, reader in enumerate(readers):
        groups.setdefault(reader, []).append(number)
    firsts: dict[int, T] = {}

    def start(group: list[int]) -> None:
        firsts.update((number, next(iterators[number])) for number in group)

    for_each(start, groups.values())
    return [chain([firsts[number]], iterator) for number, iterator in enumerate(iterators)]


def for_each(call: Callable[[T], object], items: Iterable[T]) -> None:
    """Call with each item, in any order. Raises the first error. Threads do not keep a process that ends alive."""
    waiting, errors, lock = iter(items), list[BaseException](), threading.Lock()
    for first in waiting:  # alone, so that what all of them need is found once
        call(first)
        break

    def work() -> None:
        while not errors:
            with lock:
                found = next(waiting, errors)
            if found is errors:
                return
            try:
                call(found)  # type: ignore[arg-type]
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
