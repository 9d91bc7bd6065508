"""Which attributes of a kernel say how it is compiled and launched, and when two values of one mean the same."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from tokenspeed_reload.values import is_a, same_value

BINARIES = frozenset({"device_caches", "kernel", "CompiledKernel", "compile", "ASTSource"})
_KEY = frozenset({"hash", "used_global_vals", "_hash_lock"})
_PLACE = frozenset({"raw_src", "starting_line_number", "file_name", "def_file_line_number", "def_file_col_number"})
_DERIVED = frozenset({"params", "arg_names", "constexprs", "rewriter", "base_fn", "fn", "pre_run_hooks"})
_RAN = frozenset({"nargs", "configs_timings", "best_config", "bench_time", "restore_copies", "do_bench", "cache"})
NOT_COMPARED = BINARIES | _KEY | _PLACE | _DERIVED | _RAN

SELF_MADE = BINARIES | _KEY | _PLACE | frozenset({"params", "constexprs", "rewriter", "_src", "__doc__"})
"""What follows from the source and from what was compiled; the parameters follow from the signature too."""


def same_setting(left: Any, right: Any) -> bool:
    """True for values that mean the same to a compiler, told without methods of the program."""
    if same_value(left, right):
        return True
    if type(left) is not type(right):
        return False
    if type(left) in (list, tuple):
        return len(left) == len(right) and all(map(same_setting, left, right))
    if type(left) is dict:
        return list(left) == list(right) and all(same_setting(left[k], right[k]) for k in left)
    if type(left) is inspect.Signature:
        return same_setting(
            _parameters(left.parameters.values()), _parameters(right.parameters.values())
        ) and same_setting(_kind(left.return_annotation), _kind(right.return_annotation))
    if type(left).__module__ == "triton.language.core" and hasattr(left, "value"):
        return same_setting(left.value, right.value)
    return False


def _parameters(parameters: Iterable[inspect.Parameter]) -> list[tuple[Any, ...]]:
    return [(p.name, int(p.kind), p.default, _kind(p.annotation)) for p in parameters]


def _kind(annotation: Any) -> Any:
    """Triton goes by the text of an annotation."""
    return annotation if is_a(annotation, type | str) else repr(annotation)
