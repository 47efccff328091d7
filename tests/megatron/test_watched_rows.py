"""Rows in order, errors passed on, and a dead worker noticed while its pipe says nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest

from megatron_tree_cp.megatron.watched_rows import WatchedRows


def test_rows_come_in_order_and_end():
    assert list(WatchedRows([3, None, 1])) == [3, None, 1]


def test_errors_reach_the_caller():
    def rows():
        yield 1
        raise ValueError("line 7")

    watched = WatchedRows(rows())
    assert next(watched) == 1
    for _ in range(2):  # asked again it says the same, and does not wait for ever
        with pytest.raises(ValueError, match="line 7"):
            next(watched)


@pytest.mark.timeout(20)
def test_an_ended_iterator_stays_ended():
    watched = WatchedRows([7])
    assert [*watched, *watched] == [7]


class HalfWritten:
    """One row, then silence: what a pipe gives whose writer died inside a message."""

    def __iter__(self):
        self.worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
        self.worker.start()
        yield "row"
        threading.Event().wait()


@pytest.mark.timeout(60)
def test_a_worker_that_dies_inside_a_message_is_named():
    loader = HalfWritten()

    class Started:
        def __iter__(self):
            rows = iter(loader)
            first = next(rows)  # DataLoader's workers run as soon as there is an iterator
            return (row for part in ([first], rows) for row in part)

    watched = WatchedRows(Started())
    assert next(watched) == "row"
    os.kill(loader.worker.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"planner process {loader.worker.pid} ended with .* -9"):
        next(watched)
    assert time.monotonic() - started < 10


@pytest.mark.timeout(60)
def test_a_slow_worker_is_waited_for():
    def rows():
        time.sleep(2.5)  # more than two looks
        yield "late"

    assert list(WatchedRows(rows())) == ["late"]
