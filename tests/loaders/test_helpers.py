"""The threads and processes that a loader has of its own."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_gpuopt.loaders.helpers import helpers_of
from tests.loaders.kinds import CORE, Prepare


@pytest.fixture
def over() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def started(over: threading.Event, name: str) -> threading.Thread:
    thread = threading.Thread(target=over.wait, name=name, daemon=True)
    thread.start()
    return thread


class Holds:
    """Anything that holds on to something."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


def names(*roots: Any) -> list[str]:
    return sorted(each.name for each in helpers_of(*roots)[0])


def test_threads_are_found_in_attributes_lists_and_bound_methods(over: threading.Event) -> None:
    one, two, three = (started(over, name) for name in ("one", "two", "three"))
    held = Holds(thread=one, workers=[Holds(its=two)], method=Holds(its=three).__init__)
    assert names(held) == ["one", "three", "two"]


def test_and_behind_objects_that_hold_one_another(over: threading.Event) -> None:
    crowd = [Holds() for _ in range(40)]
    for each in crowd:
        vars(each).update(others=crowd, itself=each)
    deep: Any = started(over, "deep")
    for _ in range(6):
        deep = Holds(inner=deep)
    assert names(Holds(crowd=crowd, deep=deep)) == ["deep"]


def test_and_in_the_variables_of_a_suspended_generator(over: threading.Event) -> None:
    def generate() -> Iterator[int]:
        thread = started(over, "inside")
        yield 1
        thread.join()

    generator = generate()
    next(generator)
    assert names(generator) == ["inside"]


def test_and_in_what_a_function_closes_over(over: threading.Event) -> None:
    thread = started(over, "closed over")
    assert names(Holds(function=lambda: thread)) == ["closed over"]


def test_and_in_executors(over: threading.Event) -> None:
    with ThreadPoolExecutor(2, thread_name_prefix="pool") as pool:
        pool.submit(over.wait)
        assert names(Holds(pool=pool)) == ["pool_0"]
        over.set()


def test_other_threads_and_those_that_have_ended_are_not(over: threading.Event) -> None:
    others = started(over, "others")
    ended = threading.Thread(target=int)
    ended.start()
    ended.join()
    held = Holds(main=threading.main_thread(), ended=ended, module=threading, many=[others] * 300)
    assert names(held) == []


def test_no_attribute_is_asked_for() -> None:
    class Asked(Holds):
        @property
        def thread(self) -> Any:
            raise AssertionError("asked")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    assert names(Asked(x=1)) == []


def test_processes_are_found(over: threading.Event) -> None:
    context = multiprocessing.get_context("fork")
    process = context.Process(target=int)
    process.start()
    assert helpers_of(Holds(workers=[process]))[1] == [process]
    process.join()


def test_the_threads_of_a_graph_of_nodes(tmp_path: Path) -> None:
    loader = CORE["nodes-threads"].make(tmp_path, Prepare())
    before = set(threading.enumerate())
    iterator = iter(loader)
    next(iterator)
    assert set(helpers_of(loader, iterator)[0]) == set(threading.enumerate()) - before
    assert len(helpers_of(loader)[0]) == 5  # two workers, who reads, who sorts, and the Prefetcher's
