"""Who shows the history elsewhere."""

from __future__ import annotations


def checked_reporters(names):
    return list(names or [])


def replay(model, name):
    raise NotImplementedError


class Reporting:
    def __init__(self, *args):
        pass

    def history_grew(self):
        pass

    def close(self, timeout_s):
        pass
