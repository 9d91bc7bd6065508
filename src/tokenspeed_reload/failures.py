"""What is told of a reload that failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType

from tokenspeed_reload.errors import ReloadError, describe
from tokenspeed_reload.records import SourceText


def failure_of(error: BaseException, module: str, sources: Iterable[SourceText], not_undone: list[str]) -> ReloadError:
    """What a reload raises.

    Args:
        error: what was raised inside of it.
        module: the module that ran.
        sources: the texts that may have run, those of the reload before those of earlier ones.
        not_undone: what the undo could not restore.
    """
    texts = list(sources)
    file: str | None
    if isinstance(error, SyntaxError) and error.filename:
        file, line = error.filename, error.lineno
        text = error.text.strip() if type(error.text) is str else None
    else:
        file, line = _place(error.__traceback__, {source.path for source in texts})
        source = next((s for s in texts if s.path == file), None)
        text = source.line(line) if source is not None else None
    return ReloadError("patch", describe(error), module=module, file=file, line=line, text=text, not_undone=not_undone)


def _place(trace: TracebackType | None, paths: set[str]) -> tuple[str | None, int | None]:
    """The innermost line of the recorded modules in a traceback."""
    file: str | None = None
    line: int | None = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in paths:
            file, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    return file, line


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that led to it, each once: `raise error from error` makes a circle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
