"""Things for worker processes to read, in a module that is quick to import there."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np


class Read:
    """Returns k, and at 1 does what it is told to."""

    def __init__(self, how="live", path=None):
        self.how, self.path = how, path

    def __call__(self, k):
        if k == 1:
            getattr(self, self.how)()
        if k == 1 and self.how == "killed_while_sending":
            return np.zeros(10**6)
        return k, os.getpid()

    def live(self):
        """Nothing happens."""

    def exits_0(self):
        os._exit(0)

    def killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def exits_0_before_its_child(self):
        if os.fork():
            os._exit(0)
        time.sleep(20)
        open(self.path, "w").close()
        os._exit(0)

    def killed_while_sending(self):
        threading.Timer(0.2, self.killed).start()

    def raises(self):
        raise KeyError("mask")

    def sticks(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)


class Source:
    """Example i is its id; a worker process dies of example 20."""

    def __init__(self, length):
        self.length, self.home = length, os.getpid()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == 20 and os.getpid() != self.home:
            os._exit(0)
        return {"id": np.int32(index)}


def double(example):
    return example | {"x": example["x"] * 2}


def noise(example, generator):
    return example | {"x": example["x"] + generator.normal(size=1).astype(np.float32)}
