"""The process that compiles grammars: what takes too long, too much, or is wanted no longer."""

from __future__ import annotations

import asyncio
import os
import signal
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
from tokenspeed.runtime.protocol import DefineGrammar, ForgetGrammar, Grammar
from tokenspeed.server.errors import UnsupportedCall
from tokenspeed.server.grammars import GrammarCompiler

SLOW = Grammar(kind="regex", text="".join(f"([a-{last}]{{1,500}}x){{1,500}}" for last in "bcdefghijklmnopqrstuvwxyz"))
Start = Callable[..., GrammarCompiler]


def regex(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


@pytest.fixture
async def start(tokenizer_dir: Path) -> AsyncIterator[Start]:
    compilers: list[GrammarCompiler] = []

    def build(**limits: Any) -> GrammarCompiler:
        compiler = GrammarCompiler(lambda: None, **limits)
        compiler.open(engine_info(tokenizer_path=str(tokenizer_dir), vocab_size=260, eos_token_ids=(257,)))
        compilers.append(compiler)
        return compiler

    yield build
    for compiler in compilers:
        await compiler.close()


def workers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "tokenspeed.grammar.worker" in " ".join(child.cmdline())]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


async def test_grammars_are_compiled_once_and_apart_from_each_other(start: Start) -> None:
    compiler = start(time_limit=4.0)
    first, *others = await asyncio.gather(*(compiler.compile(regex("[ab]{3}")) for _ in range(5)))
    assert all(other is first for other in others)
    assert await compiler.compile(regex("[ab]{3}")) is first
    for _ in range(2):
        with pytest.raises(GrammarError, match="parenthesis"):
            await compiler.compile(regex("(a"))

    slow = [asyncio.create_task(compiler.compile(SLOW)) for _ in range(2)]
    await asyncio.gather(*(compiler.compile(regex(f"a{{{n}}}")) for n in range(1, 9)))
    assert not slow[0].done(), "the test needs a grammar that takes longer"
    slow[0].cancel()
    with pytest.raises(GrammarError, match="took longer than 4 s to compile"):
        await slow[1]
    with pytest.raises(GrammarError, match="took longer"):
        await compiler.compile(SLOW)
    assert await compiler.compile(regex("b"))


async def test_one_that_takes_too_much_memory_ends_alone(start: Start) -> None:
    compiler = start(memory_limit=8 * 2**20)
    with pytest.raises(GrammarError, match="takes more than 8 MiB of memory to compile"):
        await compiler.compile(SLOW)
    assert await compiler.compile(regex("b"))


async def test_what_nobody_waits_for_is_given_up_and_a_killed_worker_is_replaced(start: Start) -> None:
    compiler = start()
    await compiler.compile(regex("a"))
    waiting = [asyncio.create_task(compiler.compile(SLOW)) for _ in range(2)]
    await until(lambda: len(workers()) == 2)
    waiting[0].cancel()
    await asyncio.sleep(0.1)
    assert len(workers()) == 2, "the other one still waits"
    waiting[1].cancel()
    await until(lambda: len(workers()) == 1)
    assert await compiler.compile(regex("b"))

    slow = asyncio.create_task(compiler.compile(SLOW))
    await until(lambda: len(workers()) == 2)
    worker = next(process for process in workers() if process.ppid() == os.getpid())
    worker.send_signal(signal.SIGKILL)
    with pytest.raises(TokenSpeedError, match="the compiler of grammars ended"):
        await slow
    assert await compiler.compile(regex("c"))
    assert len(workers()) == 1

    slow = asyncio.create_task(compiler.compile(SLOW))
    await until(lambda: len(workers()) == 2)
    await compiler.close()
    with pytest.raises(TokenSpeedError):
        await slow
    await until(lambda: not workers())


async def test_without_xgrammar_the_way_to_get_it_is_told(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(UnsupportedCall, match=r"pip install 'tokenspeed\[structured\]'"):
        await start().compile(regex("a"))


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
