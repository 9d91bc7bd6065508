"""The variables of running functions."""

from __future__ import annotations

import gc
import weakref

from tokenspeed_reload.framelocals import local_variables


class Thing:
    pass


def holding() -> tuple[weakref.ref[Thing], list[tuple[str, str]]]:
    thing = Thing()
    return weakref.ref(thing), local_variables()[id(thing)]


def test_a_look_names_the_function_and_the_variable_and_keeps_nothing_alive():
    gc.collect()
    gc.disable()
    try:
        thing, found = holding()
        assert found == [(f"{__name__}.holding", "thing")]
        assert thing() is None
    finally:
        gc.enable()
