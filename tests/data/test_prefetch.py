"""The background thread that loads the next draw."""

import threading

from driftgen.data.prefetch import Prefetcher


def test_results_are_those_of_the_key():
    prefetcher = Prefetcher()
    prefetcher.start((1,), lambda: "ahead")
    assert prefetcher.get((1,), lambda: "now") == "ahead"
    assert prefetcher.get((1,), lambda: "now") == "now"
    prefetcher.start((2,), lambda: "ahead")
    assert prefetcher.get((3,), lambda: "now") == "now"


def test_wait_ends_with_the_load_and_keeps_its_result():
    prefetcher, begun, done = Prefetcher(), threading.Event(), []

    def load():
        begun.set()
        threading.Event().wait(0.2)
        done.append(True)
        return "ahead"

    prefetcher.wait()  # nothing to wait for
    prefetcher.start((1,), load)
    begun.wait()
    prefetcher.wait()
    assert done
    assert prefetcher.get((1,), lambda: "now") == "ahead"
