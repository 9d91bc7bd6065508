"""The process that compiles grammars: what takes too long, too much, or is wanted no longer."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tokenspeed.server.engine_info import engine_info
from tokenspeed.errors import TokenSpeedError
from tokenspeed.grammar.definitions import MOST_GRAMMARS, Definitions
from tokenspeed.grammar.errors import GrammarError
from tokenspeed.runtime.protocol.calls import DefineGrammar, ForgetGrammar
from tokenspeed.runtime.protocol.sampling import Grammar
from tokenspeed.server.errors import UnsupportedCall
from tokenspeed.server.grammars import GrammarCompiler

SLOW = Grammar(kind="regex", text="".join(f"([a-{last}]{{1,500}}x){{1,500}}" for last in "bcdefghijklmnopqrstuvwxyz"))
UNBOUNDED = {"time_limit": 3600.0, "memory_limit": 2**40}


def regex(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


class Compilers:
    """Compilers of one test, whose processes can be told from those of others by the directory of their tokenizer."""

    def __init__(self, tokenizer_dir: Path) -> None:
        self.tokenizer_dir = tokenizer_dir
        self._started: list[GrammarCompiler] = []

    def start(self, **limits: Any) -> GrammarCompiler:
        compiler = GrammarCompiler(lambda: None, **{**UNBOUNDED, **limits})
        compiler.open(engine_info(tokenizer_path=str(self.tokenizer_dir), vocab_size=260, eos_token_ids=(257,)))
        self._started.append(compiler)
        return compiler

    def processes(self) -> list[psutil.Process]:
        """The worker, and its fork for each grammar."""
        return [child for child in psutil.Process().children(recursive=True) if self._owns(child)]

    def workers(self) -> list[psutil.Process]:
        return [process for process in self.processes() if process.ppid() == os.getpid()]

    async def stopped_forks(self, number: int) -> list[psutil.Process]:
        """Wait for so many forks and stop them: they neither end nor take memory, however fast the machine is."""
        await until(lambda: len(self._forks_at_work()) == number)
        forks = self._forks_at_work()
        for fork in forks:
            fork.suspend()
        return forks

    async def close(self) -> None:
        for process in self.processes():
            process.kill()
        for compiler in self._started:
            await compiler.close()

    def _forks_at_work(self) -> list[psutil.Process]:
        """The forks that have set their limits; these end with their worker, even while they are stopped."""
        forks = [process for process in self.processes() if process.ppid() != os.getpid()]
        return [fork for fork in forks if fork.rlimit(psutil.RLIMIT_AS)[0] != resource.RLIM_INFINITY]

    def _owns(self, process: psutil.Process) -> bool:
        try:
            return str(self.tokenizer_dir) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


@pytest.fixture
async def compilers(tokenizer_dir: Path, tmp_path: Path) -> AsyncIterator[Compilers]:
    own = tmp_path / "tokenizer"
    own.symlink_to(tokenizer_dir)
    compilers = Compilers(own)
    yield compilers
    await compilers.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.02)


async def test_grammars_are_compiled_once_and_apart_from_each_other(compilers: Compilers) -> None:
    compiler = compilers.start()
    first, *others = await asyncio.gather(*(compiler.compile(regex("[ab]{3}")) for _ in range(5)))
    assert all(other is first for other in others)
    assert await compiler.compile(regex("[ab]{3}")) is first
    for _ in range(2):
        with pytest.raises(GrammarError, match="parenthesis"):
            await compiler.compile(regex("(a"))

    slow = asyncio.create_task(compiler.compile(SLOW))
    await compilers.stopped_forks(1)
    await asyncio.gather(*(compiler.compile(regex(f"a{{{n}}}")) for n in range(1, 9)))
    assert not slow.done()


async def test_one_that_takes_too_long_ends_alone(compilers: Compilers) -> None:
    compiler = compilers.start(time_limit=5.0)
    slow = [asyncio.create_task(compiler.compile(SLOW)) for _ in range(2)]
    (fork,) = await compilers.stopped_forks(1)
    slow[0].cancel()
    with pytest.raises(GrammarError, match="took longer than 5 s to compile"):
        await slow[1]
    assert not fork.is_running()
    with pytest.raises(GrammarError, match="took longer"):
        await compiler.compile(SLOW)
    assert await compiler.compile(regex("b"))


async def test_one_that_takes_too_much_memory_ends_alone(compilers: Compilers) -> None:
    compiler = compilers.start(memory_limit=8 * 2**20)
    with pytest.raises(GrammarError, match="takes more than 8 MiB of memory to compile"):
        await compiler.compile(SLOW)
    assert await compiler.compile(regex("b"))


async def test_a_worker_that_stands_still_is_replaced(compilers: Compilers) -> None:
    compiler = compilers.start(load_limit=4.0, time_limit=1.0)
    waiting = [asyncio.create_task(compiler.compile(regex(text))) for text in "ab"]
    await until(lambda: bool(compilers.processes()))
    for process in compilers.processes():
        process.suspend()
    for each in waiting:
        with pytest.raises(TokenSpeedError, match="the compiler of grammars ended"):
            await each


async def test_what_nobody_waits_for_is_given_up_and_a_killed_worker_is_replaced(compilers: Compilers) -> None:
    compiler = compilers.start()
    await compiler.compile(regex("a"))
    waiting = [asyncio.create_task(compiler.compile(SLOW)) for _ in range(2)]
    (fork,) = await compilers.stopped_forks(1)
    waiting[0].cancel()
    await compiler.compile(regex("the worker has read what came before"))
    assert fork.is_running(), "the other one still waits"
    waiting[1].cancel()
    await until(lambda: not fork.is_running())
    assert await compiler.compile(regex("b"))

    slow = asyncio.create_task(compiler.compile(SLOW))
    await compilers.stopped_forks(1)
    (worker,) = compilers.workers()
    worker.kill()
    with pytest.raises(TokenSpeedError, match="the compiler of grammars ended"):
        await slow
    assert await compiler.compile(regex("c"))
    assert len(compilers.workers()) == 1

    slow = asyncio.create_task(compiler.compile(SLOW))
    await compilers.stopped_forks(1)
    await compiler.close()
    with pytest.raises(TokenSpeedError):
        await slow
    await until(lambda: not compilers.processes())


async def test_without_xgrammar_the_way_to_get_it_is_told(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(UnsupportedCall, match=r"pip install 'tokenspeed\[structured\]'"):
        await compilers.start().compile(regex("a"))


async def test_a_model_without_an_end_is_told() -> None:
    compiler = GrammarCompiler(lambda: None)
    compiler.open(engine_info(eos_token_ids=()))
    with pytest.raises(UnsupportedCall, match="end-of-text token"):
        await compiler.compile(regex("a"))


def test_the_ranks_are_told_each_grammar_once_and_to_forget_old_ones() -> None:
    sent: list[DefineGrammar | ForgetGrammar] = []
    definitions = Definitions(sent.append)
    keys = [definitions.define(regex(str(n)), b"x").key for n in range(MOST_GRAMMARS)]
    assert definitions.define(regex("0"), b"x").key == keys[0]
    assert sent == [DefineGrammar(key=key, compiled=b"x") for key in keys]
    sent.clear()
    new = definitions.define(regex("new"), b"y").key
    assert sent == [DefineGrammar(key=new, compiled=b"y"), ForgetGrammar(key=keys[1])], "the least recently used"
