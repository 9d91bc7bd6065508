"""What went wrong in an edit, where: for the reply that an engineer reads."""

from __future__ import annotations

import traceback
from collections.abc import Collection
from typing import Any

from tokenspeed_reload import ReloadError

Fault = dict[str, Any]


def describe(error: BaseException, edited_files: Collection[str], own_files: Collection[str]) -> Fault:
    """The error with the file, line and text that caused it, and the way there.

    Args:
        error: what was raised; its own place wins where it names one (a syntax error, a failed module), and
            its own phase, since the reloader checks the sources before it patches.
        edited_files: files that this reload executes anew. The innermost frame in one of them is named: an
            error that an edit causes often comes up in code that the edit calls.
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
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename in own_files]
    edited = [frame for frame in own if frame.filename in edited_files]
    place = (edited or own or frames)[-1]
    return {
        "error": f"{type(error).__name__}: {error}".rstrip(": "),
        "file": place.filename,
        "line": place.lineno,
        "text": place.line,
        "trace": [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in own],
    }
