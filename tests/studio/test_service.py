"""The queue before the worker: order of arrival, one at a time, bounded."""

import threading
import time

import pytest

from driftgen.errors import InputError
from driftgen.studio.service import Service
from driftgen.studio.worker_process import WorkerProcess, _describe


def test_fifty_requests_in_the_order_of_arrival():
    gate, order, active, most = threading.Event(), [], [0], [0]

    def call(name, argument):
        gate.wait()
        active[0] += 1
        most[0] = max(most[0], active[0])
        order.append(argument)
        active[0] -= 1
        return name, argument

    service = Service(call)
    futures = [service.submit("sample", i) for i in range(50)]
    gate.set()
    assert [future.result(10) for future in futures] == [("sample", i) for i in range(50)]
    assert order == list(range(50))
    assert most == [1]
    service.close()


def test_too_many_requests_are_refused_and_the_others_answered():
    gate = threading.Event()
    service = Service(lambda name, argument: gate.wait() and argument, most_waiting=3)
    first = service.submit("x", 0)
    while not first.running():
        pass
    others = [service.submit("x", i) for i in range(3)]
    with pytest.raises(InputError, match="3 requests are waiting already"):
        service.submit("x", 9)
    gate.set()
    assert [future.result(10) for future in (first, *others)] == [0, 0, 1, 2]
    service.close()


def test_an_error_and_a_canceled_request_do_not_stop_the_worker():
    gate = threading.Event()

    def call(name, argument):
        gate.wait()
        return 1 / argument

    service = Service(call)
    futures = [service.submit("x", i) for i in (1, 0, 2, 4)]
    assert futures[2].cancel()
    gate.set()
    assert futures[0].result(10) == 1
    assert isinstance(futures[1].exception(10), ZeroDivisionError)
    assert futures[3].result(10) == 0.25
    service.close()


@pytest.fixture
def process():
    process = WorkerProcess("tests.support.worker_targets", "Target", 3)
    yield process
    process.close()


def test_a_process_keeps_its_object(process):
    assert process.call("add", 2) == 5
    assert process.call("add", 1) == 6


def test_a_refusal_of_the_constructor_answers_every_call(capfd):
    process = WorkerProcess("tests.support.worker_targets", "Target", -1)
    before = process.pid
    for _ in range(2):
        with pytest.raises(InputError, match=r"^start=-1 must be at least 0$"):
            process.call("add", 2)
    assert process.pid == before
    process.close()
    assert capfd.readouterr().err == ""


def test_errors_of_a_process_are_one_line(process):
    with pytest.raises(InputError, match=r"^give a number$"):
        process.call("refuse", "give a number")
    with pytest.raises(InputError, match="ask for fewer images"):
        process.call("exhaust", None)
    with pytest.raises(InputError, match=r"this failed \(KeyError: 'key'\)"):
        process.call("fail", "key")
    assert process.call("add", 0) == 3


def test_errors_that_nobody_foresaw_are_printed(capsys):
    with pytest.raises(KeyError) as caught:
        raise KeyError("two\nlines")
    assert "\n" not in _describe(caught.value)
    assert "test_service.py" in capsys.readouterr().err


def test_a_process_that_dies_is_replaced(process):
    process.call("add", 2)
    before = process.pid
    with pytest.raises(InputError, match=r"ended \(exit code 7\)"):
        process.call("die", 7)
    assert process.call("add", 1) == 4  # a new object
    assert process.pid != before


def test_a_process_ends_in_the_middle_of_a_call(process):
    """Ctrl-C must not wait for a large batch, nor start another process in its place."""
    process.call("add", 0)
    service, begin = Service(process.call), time.monotonic()
    future = service.submit("sleep", 100)
    while not future.running():
        time.sleep(0.01)
    time.sleep(0.1)
    before = process.pid
    process.close()
    with pytest.raises(InputError, match="the server ended before this was done"):
        future.result(10)
    assert time.monotonic() - begin < 20
    assert process.pid == before
    with pytest.raises(InputError, match="the server ended"):
        process.call("add", 1)
