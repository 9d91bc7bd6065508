"""How a kernel is cut up (block sizes, warps, stages, splits): timed once at start-up, kept in a file, then fixed.

While serving nothing is timed: a kernel takes the tactic that was found for its bucket of sizes, or its default.
The table is outside `tokenspeed_kernel.ops`, so that it outlasts an edit of the kernels.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Tactic = Mapping[str, int]
"""Keyword arguments of a kernel's launch; the same names in every tactic of a kernel."""

FORMAT = 1
CALLS = 4
REPEATS = 7
ANY_SOURCE = ""
"""In the place of a hash: of a tactic that was in use with the code that runs, whatever it was found for."""
SWEEP_BYTES = 128 << 20
"""More than any GPU's L2 cache."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tuned:
    """What was found for one bucket."""

    tactic: Tactic
    us: float
    """Microseconds of one call."""
    source: str
    """Hash of the module that the kernel was in."""


@dataclass
class Tactics:
    """Tuned tactics by kernel and bucket; `file` keeps them, None keeps nothing."""

    file: Path | None = None
    found: dict[str, Tuned] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _quick: dict[tuple[Any, ...], Tactic] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)
    """Buckets that took what was found for them: an edit of the kernel's module does not take it away."""
    _lost: set[str] = field(default_factory=set)
    """Those of them whose kernel lists their tactic no more."""
    _news: dict[str, list[str]] = field(default_factory=dict)
    """By kernel what was lost since the last look."""
    _is_open: bool = False

    def pick(
        self, kernel: str, bucket: tuple[Any, ...], candidates: Sequence[Tactic], run: Callable[[Tactic], object]
    ) -> Tactic:
        """The tactic for a call of `kernel` whose sizes fall into `bucket`.

        Args:
            kernel: its name; the function `run` belongs to the module whose source is hashed.
            bucket: sizes, types and whatever else decides; each part is turned into text for the file.
            candidates: the first is the default.
            run: calls the kernel with a tactic; may be called often, and must give the same each time.
        """
        tactic = self._quick.get((kernel, bucket))
        # An edit of the kernel may have given it other arguments.
        if tactic is not None and tactic.keys() == candidates[0].keys():
            return tactic
        tactic = self._known(kernel, bucket, candidates, source_hash(run.__module__))
        if tactic is None and self._is_open:
            tactic = self._find(_key(kernel, bucket), candidates, run).tactic
        if tactic is None:
            tactic = candidates[0]
        self._quick[kernel, bucket] = tactic
        return tactic

    def _known(self, kernel: str, bucket: tuple[Any, ...], candidates: Sequence[Tactic], source: str) -> Tactic | None:
        """What was found for a bucket, if it holds for the code that runs now."""
        key = _key(kernel, bucket)
        known = self.found.get(key)
        if known is None or not (key in self._used or known.source in (source, ANY_SOURCE)):
            return None
        if dict(known.tactic) in map(dict, candidates):
            self._used.add(key)
            self._lost.discard(key)
            return known.tactic
        if not self._is_open and key not in self._lost:
            self._lost.add(key)
            self._news.setdefault(kernel, []).append(",".join(map(str, bucket)))
        return None

    def _find(self, key: str, candidates: Sequence[Tactic], run: Callable[[Tactic], object]) -> Tuned:
        """Time the candidates and keep the best."""
        self.found[key] = self._tune(candidates, run, source_hash(run.__module__))
        self._used.add(key)
        return self.found[key]

    def look_again(self) -> None:
        """Kernels may list other candidates now: whatever is called next picks anew."""
        self._quick.clear()
        self._news.clear()

    def lost(self) -> list[str]:
        """For each kernel a sentence on the tactics that it lists no more, of what was called since `look_again`."""
        return [
            f"{kernel} no longer lists the tactic that was tuned for {_some(buckets)}; it takes its default there "
            "until the next start tunes it"
            for kernel, buckets in sorted(self._news.items())
        ]

    @contextmanager
    def window(self) -> Iterator[None]:
        """Within it, calls of buckets that are not known are timed; at its end the file is written."""
        self._is_open = True
        self.look_again()  # what was picked may be defaults
        try:
            yield
        finally:
            self._is_open = False
            self.save()

    def load(self, file: Path | None) -> None:
        """Take what the file holds for this GPU and Triton; a file that cannot be read is left aside with a note."""
        self.file = file
        if file is None or not file.exists():
            return
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if content["format"] != FORMAT or content["machine"] != machine():
                self._note(f"{file} is of another GPU or Triton and is not used")
                return
            self.install(content["tactics"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._note(f"{file} is damaged ({error!r}) and is not used; it is written anew")

    def save(self) -> None:
        """Write the file as a whole; failing to is no error, only a note."""
        if self.file is None:
            return
        content = {"format": FORMAT, "machine": machine(), "tactics": self.export()}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.file.parent, delete=False, encoding="utf-8") as scratch:
                json.dump(content, scratch, indent=1, sort_keys=True)
            Path(scratch.name).replace(self.file)
        except OSError as error:
            self._note(f"tactics cannot be kept in {self.file} ({error.strerror or error}); set TOKENSPEED_CACHE")

    def export(self) -> dict[str, Any]:
        """The table as JSON, for another rank or a file."""
        return {
            key: {"tactic": dict(tuned.tactic), "us": tuned.us, "source": tuned.source}
            for key, tuned in sorted(self.found.items())
        }

    def in_use(self) -> dict[str, Any]:
        """What `export` gives, without regard to the source of what this process uses.

        A rank that takes this over and runs the same code cuts its kernels up alike, although their modules have been
        edited since they were tuned.
        """
        table = self.export()
        for key in self._used - self._lost:
            table[key] |= {"us": 0.0, "source": ANY_SOURCE}
        return table

    def install(self, table: Mapping[str, Any]) -> None:
        """Take over what `export` gave."""
        self.found = {
            key: Tuned({str(n): int(v) for n, v in entry["tactic"].items()}, float(entry["us"]), str(entry["source"]))
            for key, entry in table.items()
        }
        self._used.clear()
        self._lost.clear()
        self.look_again()

    def _tune(self, candidates: Sequence[Tactic], run: Callable[[Tactic], object], source: str) -> Tuned:
        best: Tuned | None = None
        for tactic in candidates:
            us = self._time(tactic, run)
            if us is not None and (best is None or us < best.us):
                best = Tuned(tactic, us, source)
        return best or Tuned(candidates[0], 0.0, source)

    def _time(self, tactic: Tactic, run: Callable[[Tactic], object]) -> float | None:
        """Median microseconds, or None for a tactic that this GPU cannot run."""
        try:
            run(tactic)
        except Exception as error:
            # Too much shared memory or too many registers: the compiler's errors have no common class.
            log.debug("tactic %s is left out: %s", dict(tactic), error)
            return None
        # What a step reads was not read just before: each call finds the cache swept.
        sweep = torch.empty(SWEEP_BYTES, dtype=torch.uint8, device="cuda")
        return _replay_time(lambda: (sweep.zero_(), run(tactic))) - _replay_time(sweep.zero_)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        log.warning("%s", text)


def _key(kernel: str, bucket: tuple[Any, ...]) -> str:
    return f"{kernel}|{','.join(map(str, bucket))}"


def _some(buckets: Sequence[str]) -> str:
    more = f" and {len(buckets) - 2} more" if len(buckets) > 2 else ""
    return "; ".join(f"({bucket})" for bucket in buckets[:2]) + more


def _replay_time(call: Callable[[], object]) -> float:
    """Median microseconds of one call among several in a graph: launches from Python would hide a small kernel."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


TACTICS = Tactics()
"""The table of this process."""


def tactics_file() -> Path:
    """Where this machine's tactics are kept: below $TOKENSPEED_CACHE, or the user's cache directory."""
    chosen, base = os.environ.get("TOKENSPEED_CACHE"), os.environ.get("XDG_CACHE_HOME")
    root = Path(chosen).expanduser() if chosen else (Path(base) if base else Path.home() / ".cache") / "tokenspeed"
    name = re.sub(r"[^a-z0-9.]+", "-", "-".join(machine().values()).lower())
    return root / "tactics" / f"{name}.json"


def machine() -> dict[str, str]:
    """What the times depend on besides the kernel: the GPU and Triton's version."""
    triton = sys.modules.get("triton")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {"gpu": gpu, "triton": getattr(triton, "__version__", "none")}


def source_hash(module: str) -> str:
    """Hash of a module's source as it was loaded."""
    try:
        text = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        text = module
    return hashlib.sha256(text.encode()).hexdigest()[:16]
