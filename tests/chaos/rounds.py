"""How often a test of this folder kills: a short choice by default, the long form by `make chaos`."""

import os


def kills(short: int, long: int) -> int:
    """How many kills this run asks for: `short` in the test suite, `long` (or `CHAOS_KILLS`) in `make chaos`."""
    asked = os.environ.get("CHAOS_KILLS")
    return short if asked is None else int(asked or long)
