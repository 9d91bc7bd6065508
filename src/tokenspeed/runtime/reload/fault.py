"""What went wrong in an edit, where: for the reply that an engineer reads."""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection, Mapping
from typing import Any

from tokenspeed.errors import TokenSpeedError
from tokenspeed_reload import ReloadError, chain_of
from tokenspeed_reload import describe as error_text

TRACE_FRAMES = 32
"""Innermost frames of the way to an error that a reply tells: an endless recursion has a thousand."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""What a compiler may write for a terminal."""

Fault = dict[str, Any]
Told = tuple[BaseException, traceback.FrameSummary]


class PlacedError(TokenSpeedError):
    """An error of edited code that was found elsewhere than where it was made. `place` is that, where it is known."""

    def __init__(self, sentence: str, place: traceback.FrameSummary | None):
        super().__init__(sentence)
        self.place = place


NOWHERE: Fault = {"file": None, "line": None, "text": None, "trace": []}


def describe(error: BaseException, edited_files: Mapping[str, str], own_files: Collection[str]) -> Fault:
    """As `place_of` tells it; where an error of edited code raises when it is looked at, no more than its text."""
    try:
        fault = place_of(error, edited_files, own_files)
    except BaseException:
        fault = {**NOWHERE, "error": error_text(error)}
    return {name: _sendable(value) for name, value in fault.items()}


def place_of(error: BaseException, edited_files: Mapping[str, str], own_files: Collection[str]) -> Fault:
    """The error with the file, line and text that caused it, and the way there.

    Args:
        error: what was raised; its own place wins where it names one (a syntax error, a failed module), and
            its own phase, since the reloader checks the sources before it patches.
        edited_files: files that this reload executes anew, with their text. The innermost frame in one of them
            is named: an error that an edit causes often comes up in code that the edit calls.
        own_files: files of all our packages, named where no edited one is on the way.
    """
    if isinstance(error, ReloadError):
        return {
            "phase": error.phase,
            "error": f"{error.module}: {error.error}" if error.module else error.error,
            "file": error.file,
            "line": error.line,
            "text": error.text,
            "trace": [],
        }
    frames = list(traceback.extract_tb(error.__traceback__))
    told = _told_place(error, edited_files, own_files)
    if told is not None:
        error, place = told
        frames.append(place)
    own = [frame for frame in frames if frame.filename in own_files]
    edited = [frame for frame in own if frame.filename in edited_files]
    if isinstance(error, PlacedError):
        if error.place is None:
            return {**NOWHERE, "error": str(error)}
        own = edited = [error.place]
    place = (edited or own or frames)[-1]

    def text(frame: traceback.FrameSummary) -> str | None:
        # After an undo linecache holds the old text again.
        lines = edited_files.get(frame.filename, "").split("\n")
        return lines[frame.lineno - 1].strip() if frame.lineno and frame.lineno <= len(lines) else frame.line

    return {
        "error": COLOURS.sub("", error_text(error)),
        "file": place.filename,
        "line": place.lineno,
        "text": text(place),
        "trace": [f"{frame.filename}:{frame.lineno} in {frame.name}: {text(frame)}" for frame in own[-TRACE_FRAMES:]],
    }


def _sendable(value: Any) -> Any:
    """Texts of edited code and names of files may hold what UTF-8 cannot."""
    if isinstance(value, list):
        return [_sendable(item) for item in value]
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _told_place(error: BaseException, edited_files: Mapping[str, str], own_files: Collection[str]) -> Told | None:
    """The innermost of the causes that says itself where in our files it is, as compilers of kernels do.

    They raise where they were called from. CuTe's tracer names file and line; Triton's compiler has the text of the
    function, in which its node has a line.
    """
    told: Told | None = None
    for cause in chain_of(error):
        file, line = getattr(cause, "filename", None), getattr(cause, "line", None)
        source, in_source = getattr(cause, "src", None), getattr(getattr(cause, "node", None), "lineno", None)
        if isinstance(file, str) and isinstance(line, int) and file in own_files:
            told = cause, traceback.FrameSummary(file, line, "kernel")
        elif source and isinstance(source, str) and isinstance(in_source, int):
            for file, text in edited_files.items():
                before, found, _ = text.partition(source)
                if found:
                    told = cause, traceback.FrameSummary(file, before.count("\n") + in_source, "kernel")
    return told
