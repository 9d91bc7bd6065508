"""Code that runs while it is replaced: waited for, refused, or listed."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from tokenspeed_reload import StillRunning

OLD = """
import threading
entered, leave = threading.Event(), threading.Event()
def inner():
    entered.set()
    leave.wait(600)
    return 1
def outer(): return inner()
def quiet(): return 1
def gen():
    yield 1
    yield 2
async def agen():
    yield 1
    yield 2
async def coro(event):
    await event.wait()
    return 1
def call(f): return f()
"""
NEW = OLD.replace("return 1", "return 10").replace("yield 2", "yield 20").replace("return f()", "return [f()]")


def in_thread(function) -> threading.Thread:
    thread = threading.Thread(target=function, name="worker")
    thread.start()
    return thread


def start(project, **options):
    project.write_module("m", OLD)
    project.watch("m", **options)
    return project.load("m")


def test_a_thread_that_leaves_in_time_is_waited_for(project):
    m = start(project, wait_s=120)
    thread = in_thread(m.outer)
    m.entered.wait()
    timer = threading.Timer(0.2, m.leave.set)
    timer.start()
    project.write_module("m", NEW)
    report = project.reload()
    thread.join()
    timer.join()
    assert m.inner() == 10
    assert report.running == []


def test_a_thread_that_stays_makes_the_reload_refuse(project, picture):
    m = start(project, wait_s=0.05)
    thread = in_thread(m.outer)
    m.entered.wait()
    try:
        before = picture({}, ["m"])
        project.write_module("m", NEW)
        with pytest.raises(StillRunning) as caught:
            project.reload()
        assert [(r.what, r.where, r.line) for r in caught.value.running] == [
            ("m.inner", "frame of thread worker", 6),
        ]
        assert "m.inner" in str(caught.value)
        assert picture({}, ["m"]) == before
    finally:
        m.leave.set()
        thread.join()
    project.reload()
    assert m.inner() == 10


def test_a_thread_in_code_that_stays_is_no_hindrance(project):
    m = start(project, wait_s=0.05)
    thread = in_thread(m.outer)
    m.entered.wait()
    try:
        project.write_module("m", "# moved by a line\n" + OLD.replace("def quiet(): return 1", "def quiet(): return 5"))
        project.reload()
        assert m.quiet() == 5
    finally:
        m.leave.set()
        thread.join()


def test_own_frames_are_exempt_and_listed(project):
    m = start(project, wait_s=0.05)
    project.write_module("m", NEW)
    (report,) = [m.call(project.reload)]
    assert [(r.what, r.where) for r in report.running] == [("m.call", "frame of the thread that reloads")]
    assert m.call(m.quiet) == [10]


@pytest.mark.parametrize("frozen", [False, True])
def test_suspended_generators_coroutines_and_tasks_are_listed(project, frozen):
    m = start(project, wait_s=0.05)

    async def run():
        event = asyncio.Event()
        task = asyncio.create_task(m.coro(event), name="waiter")
        generator, asynchronous, finished = m.gen(), m.agen(), m.gen()
        next(generator)
        await anext(asynchronous)
        list(finished)
        await asyncio.sleep(0)
        if frozen:
            gc.freeze()
        try:
            project.write_module("m", NEW)
            report = project.reload()
        finally:
            gc.unfreeze()
        event.set()
        return report, await task, next(generator), await anext(asynchronous)

    report, *rest = asyncio.run(run())
    assert sorted((r.what, r.where) for r in report.running) == [
        ("m.agen", "asynchronous generator"),
        ("m.coro", "coroutine of task waiter"),
        ("m.gen", "generator"),
    ]
    assert rest == [1, 2, 2]
    assert list(m.gen()) == [1, 20]
