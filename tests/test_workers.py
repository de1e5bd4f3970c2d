"""Threads and processes that read ahead (jdp/workers.py): in order, never waited for in vain."""

import concurrent.futures
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time

import pytest
from dying import Read

from jdp.workers import _as_failure, _pickled, in_processes, in_threads

pytestmark = pytest.mark.alternate


def _dies(how, path):
    """The error that a worker's death, or its exception, becomes; after the batch before it."""
    results = in_processes(Read(how, path), range(3), 1)
    assert next(results)[0] == 0
    if how == "killed_while_sending":
        time.sleep(0.6)  # it stands in the middle of a batch that nobody takes
    try:
        next(results)
    except BaseException as error:
        return error


def test_a_worker_that_dies_is_an_error_that_names_it_and_never_a_hang(tmp_path):
    codes = {"exits_0_before_its_child": 0, "killed": -9, "killed_while_sending": -9}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = {
            how: pool.submit(_dies, how, str(tmp_path / "child")) for how in (*codes, "raises")
        }
        found = {how: future.result(100) for how, future in found.items()}
    for how, code in codes.items():
        said = f"was to read batch 1, has died with exit code {code}. Without it examples"
        assert isinstance(found[how], RuntimeError), how
        assert "jdp.Batches: worker process 0 (pid " in str(found[how])
        assert said in str(found[how])
    assert isinstance(found["raises"], KeyError)
    assert "In worker process 0 of jdp.Batches" in found["raises"].__notes__[0]
    assert "in raises\n" in found["raises"].__notes__[0]  # its traceback
    assert not multiprocessing.active_children()
    assert not (tmp_path / "child").exists()  # which has the worker's end of the pipe until then


class NeedsTwoError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_an_exception_that_cannot_be_sent_is_told_in_words():
    result, (error, _) = pickle.loads(_as_failure(NeedsTwoError(1, 2)))
    assert result is None
    assert isinstance(error, RuntimeError)
    assert str(error) == "NeedsTwoError: 1 and 2"


def test_workers_share_out_the_numbers_in_turn_and_end_when_they_are_no_longer_wanted():
    results = in_processes(Read(), range(10, 10**12), 2, threads=2)
    first = [next(results) for _ in range(5)]
    assert [k for k, _ in first] == [10, 11, 12, 13, 14]
    pids = {pid for _, pid in first}
    assert len(pids) == 2
    assert first[0][1] == first[2][1] == first[4][1] != os.getpid()
    assert {child.pid for child in multiprocessing.active_children()} == pids
    os.kill(first[1][1], signal.SIGINT)  # Ctrl-C reaches all of a terminal's processes
    assert [next(results)[0] for _ in range(5)] == [15, 16, 17, 18, 19]
    results.close()
    assert not multiprocessing.active_children()
    # a stuck one is given up, and killed, when the consumer has gone
    stop = threading.Event()
    stuck = in_processes(Read("sticks"), range(3), 1, cancelled=stop.is_set)
    assert next(stuck)[0] == 0
    stop.set()
    assert list(stuck) == []
    assert not multiprocessing.active_children()


def test_e15_what_is_sent_to_workers_may_be_a_lambda_or_is_refused(monkeypatch):
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot send its source and transforms .* use threads="):
        next(in_processes(lambda k: lock, range(1), 1))
    assert pickle.loads(_pickled(lambda k: k + 1))(1) == 2
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(TypeError, match=r"pip install cloudpickle, which sends lambdas too"):
        next(in_processes(lambda k: k, range(1), 1))


def test_threads_give_the_results_in_order_and_read_a_bounded_number_ahead():
    asked, gate = [], threading.Event()

    def read(k):
        asked.append(k)
        if k == 1:
            gate.wait(10)  # overtaken by those after it
        if k == 7:
            raise KeyError(k)
        return k

    results = in_threads(read, range(100), 2)
    assert next(results) == 0
    gate.set()
    assert [next(results) for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(KeyError):
        next(results)
    assert max(asked) <= 7 + 2 * 2
    stuck = in_threads(lambda k: time.sleep(1), range(9), 2, lambda: True)
    assert list(stuck) == []
