"""The text of the forward modules as an overlay has it: the root of every edit."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.e2e.harness import ROOTS, installed_path

MODULES = (
    "tokenspeed.runtime.layers.activation",
    "tokenspeed.runtime.layers.attention",
    "tokenspeed.runtime.layers.base",
    "tokenspeed.runtime.layers.context",
    "tokenspeed.runtime.layers.embedding",
    "tokenspeed.runtime.layers.linear",
    "tokenspeed.runtime.layers.norm",
    "tokenspeed.runtime.layers.rotary",
    "tokenspeed.runtime.models.base",
    "tokenspeed.runtime.models.llama",
    "tokenspeed.runtime.models.qwen3",
    "tokenspeed.runtime.sampling.batch",
    "tokenspeed.runtime.sampling.edits",
    "tokenspeed.runtime.sampling.logprobs",
    "tokenspeed.runtime.sampling.sampler",
    "tokenspeed_kernel.ops.activation",
    "tokenspeed_kernel.ops.activation.reference",
    "tokenspeed_kernel.ops.attention",
    "tokenspeed_kernel.ops.attention.backends",
    "tokenspeed_kernel.ops.attention.reference",
    "tokenspeed_kernel.ops.attention.trimmed",
    "tokenspeed_kernel.ops.embedding",
    "tokenspeed_kernel.ops.embedding.reference",
    "tokenspeed_kernel.ops.gemm",
    "tokenspeed_kernel.ops.gemm.packed_half",
    "tokenspeed_kernel.ops.gemm.reference",
    "tokenspeed_kernel.ops.kvcache.reference",
    "tokenspeed_kernel.ops.norm",
    "tokenspeed_kernel.ops.norm.reference",
    "tokenspeed_kernel.ops.rope",
    "tokenspeed_kernel.ops.rope.reference",
    "tokenspeed_kernel.ops.sampling",
    "tokenspeed_kernel.ops.sampling.cpu",
    "tokenspeed_kernel.ops.sampling.noise",
    "tokenspeed_kernel.ops.sampling.reference",
)
"""Modules that a server of a Llama on a CPU has loaded, and that are edited."""


@cache
def installed_text(module: str) -> str:
    """The text of an installed module."""
    return installed_path(module).read_text()


class Sources:
    """Texts by module; a module that is not among them has the installed text, or does not exist."""

    def __init__(self, texts: Mapping[str, str] | None = None):
        self.texts = dict(texts or {})

    def __getitem__(self, module: str) -> str:
        return self.texts[module] if module in self.texts else installed_text(module)

    def __setitem__(self, module: str, text: str) -> None:
        self.texts[module] = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sources) and not self.changed(other)

    def copy(self) -> Sources:
        """The same texts, to be edited apart."""
        return Sources(self.texts)

    def replace(self, module: str, old: str, new: str) -> None:
        """Replace `old`, which must be there, once."""
        text = self[module]
        assert old in text, f"{module} has no {old!r}"
        self[module] = text.replace(old, new, 1)

    def append(self, module: str, lines: str) -> None:
        """Add `lines` at the end of a module, two lines below what is there."""
        self[module] = f"{self[module].rstrip()}\n\n\n{lines.strip()}\n"

    def insert_above(self, module: str, lines: str) -> None:
        """Add definitions right behind a module's imports."""
        text = self[module]
        last = end_of_imports(ast.parse(text))
        before, after = text.splitlines()[:last], text.splitlines()[last:]
        self[module] = "\n".join([*before, "", "", *lines.strip().splitlines(), "", *after]) + "\n"

    def changed(self, other: Sources) -> list[str]:
        """The modules whose text is another one, in order."""
        return sorted(name for name in {*self.texts, *other.texts} if self._get(name) != other._get(name))

    def diff(self, other: Sources) -> str:
        """What an editor would change to come from these texts to `other`."""
        return "\n".join(
            line
            for module in self.changed(other)
            for line in difflib.unified_diff(
                (self._get(module) or "").splitlines(),
                (other._get(module) or "").splitlines(),
                module,
                module,
                "",
                "",
                2,
                "",
            )
        )

    def write(self, overlay: Path) -> None:
        """Make the overlay that of these texts; files that are right already are left alone."""
        wanted = {overlay_path(overlay, module): text for module, text in self.texts.items()}
        for path in overlay.rglob("*.py"):
            if path not in wanted:
                path.unlink()
        for path, text in wanted.items():
            data = text.encode("utf-8", "surrogateescape")
            if not path.exists() or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

    def _get(self, module: str) -> str | None:
        if module not in self.texts and not installed_path(module).exists():
            return None
        return self[module]


def overlay_path(overlay: Path, module: str) -> Path:
    """Where an overlay keeps a module, installed or new."""
    package = module.split(".")[0]
    return overlay / package / installed_path(module).relative_to(ROOTS[package])


def end_of_imports(tree: ast.Module) -> int:
    """Line of the last import at the top level of a module, or of its docstring."""
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    last = max((node.end_lineno or 0 for node in imports), default=0)
    if not imports and tree.body and isinstance(tree.body[0], ast.Expr):
        last = tree.body[0].end_lineno or 0
    return last


Function = ast.FunctionDef


def functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """The functions of a module and the methods of its classes, by qualified name."""
    for node in tree.body:
        if isinstance(node, Function):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{item.name}", item) for item in node.body if isinstance(item, Function))


def replace_node(text: str, old: ast.stmt, new: ast.stmt | None) -> str:
    """`text` with a statement, decorators included, written anew; without it for None."""
    lines = text.splitlines()
    start = min([old.lineno, *(d.lineno for d in getattr(old, "decorator_list", ()))]) - 1
    written = [] if new is None else [" " * old.col_offset + line for line in ast.unparse(new).splitlines()]
    return "\n".join([*lines[:start], *written, *lines[old.end_lineno :]]) + "\n"
