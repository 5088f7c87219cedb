"""Objects for a worker process, in a module that imports nothing large."""

import os
import time

from driftgen.errors import InputError


class Target:
    def __init__(self, start=0):
        if start < 0:
            raise InputError(f"start={start} must be at least 0")
        self.count = start

    def add(self, number):
        self.count += number
        return self.count

    def refuse(self, text):
        raise InputError(text)

    def fail(self, text):
        raise KeyError(text)

    def exhaust(self, _):
        raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes")

    def die(self, code):
        os._exit(code)

    def sleep(self, seconds):
        time.sleep(seconds)
