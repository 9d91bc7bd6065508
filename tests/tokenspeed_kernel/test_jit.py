"""Compiles are counted as Triton and others report them, without a GPU."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_kernel.jit import count_compiles, note_compile, noted


def test_nothing_is_counted_where_triton_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    with count_compiles() as count:
        pass
    assert (count.compiled, count.seconds) == (0, 0.0)


def test_what_other_compilers_make_is_counted_by_all_who_look_on_and_known_while_it_is_used() -> None:
    class Compiled:
        pass

    first, second = Compiled(), Compiled()
    with count_compiles() as outer:
        note_compile(first, 0.5)
        with pytest.raises(KeyError), count_compiles() as inner:
            note_compile(second, 0.25)
            raise KeyError
    note_compile(first, 1.0)
    assert (outer.compiled, outer.seconds) == (2, 0.75)
    assert (inner.compiled, inner.seconds) == (1, 0.25)
    assert first in noted()
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None


def test_a_compile_is_counted_and_a_hit_of_the_cache_is_not(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="the extra [gpu] is not installed")
    compiler = pytest.importorskip("triton.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    source = tmp_path / "kernel.py"
    source.write_text("import triton\n@triton.jit\ndef kernel(x):\n    pass\n")
    names: dict[str, Any] = {}
    exec(compile(source.read_text(), str(source), "exec"), names)

    def build() -> None:
        triton.compile(compiler.ASTSource(names["kernel"], {"x": "*fp32"}, {}), target=target)

    heard: list[bool] = []
    earlier = triton.knobs.compilation.listener

    def listener(**event: Any) -> None:
        heard.append(event["cache_hit"])

    triton.knobs.compilation.listener = listener
    try:
        with triton.knobs.cache.scope():
            triton.knobs.cache.dir = str(tmp_path / "cache")
            with count_compiles() as count:
                build()
                build()
        assert count.compiled == 1
        assert count.seconds > 0
        assert heard == [False, True]
        assert triton.knobs.compilation.listener is listener
        with pytest.raises(KeyError), count_compiles():
            assert triton.knobs.compilation.listener is not listener
            raise KeyError
        assert triton.knobs.compilation.listener is listener
    finally:
        triton.knobs.compilation.listener = earlier
