"""Every accepted request until it ends, with all that is needed to give it to a fresh rank again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tokenspeed.runtime.protocol.blackbox import Work
from tokenspeed.runtime.protocol.reports import TokenLogprobs
from tokenspeed.runtime.protocol.sampling import SamplingParams


@dataclass(eq=False)
class Entry:
    """One answer that the engine owes: what came in, and what the engine has produced for it so far."""

    request_id: str
    """The engine's own id, never used twice."""
    client_id: str
    """The id that the client gave; clients may use one again."""
    prompt: list[int]
    sampling: SamplingParams
    index: int = 0
    """Which of the answers to its request this is; each has an entry."""
    shares_prompt_with: str | None = None
    """As in `Submit`."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Where asked for: one for each of `tokens`, and one for the stop token that ended the answer."""
    cached_tokens: int = 0
    compiled: bytes | None = None
    """The compiled form of its grammar."""
    admitted: bool = False
    """Its computation has begun, so that a pause or a reload waits for its end and does not hold it."""
    given: bool = False
    """The ranks that are there now have got it."""
    had: int = 0
    """Tokens that it had then."""
    running: bool = False
    """They compute it, or are just taking it in."""
    losses: set[int] = field(default_factory=set)
    """The losses of ranks that it was there at and that no other request explains, by number."""
    cleared: bool = False
    """It has run alone since, and nothing happened."""
    aborted: bool = False
    """The engine was told to end it."""
    abandoned: bool = False
    """Nobody waits for more: it is kept only until the engine says that it ended, and never resubmitted."""


class Journal:
    """The open requests of an engine, in order of arrival."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def accept(self, entry: Entry) -> None:
        """Keep `entry` until `end`."""
        self._entries[entry.request_id] = entry

    def record(
        self, request_id: str, tokens: list[int], cached_tokens: int, logprobs: Sequence[TokenLogprobs] = ()
    ) -> None:
        """Add what one step produced; ignored when the request is not open."""
        entry = self._entries.get(request_id)
        if entry is not None and not entry.abandoned:
            entry.tokens.extend(tokens)
            entry.logprobs.extend(logprobs)
            entry.cached_tokens = max(entry.cached_tokens, cached_tokens)

    def admit(self, request_id: str) -> None:
        """Note that the computation of a request begins; ignored when it is not open."""
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.admitted = entry.running = True

    def lose(self, work: Work) -> list[Entry]:
        """The ranks are lost, and `work` is what they left word of: the requests that were running."""
        for request_id in work.ran:
            self.admit(request_id)
        ran = [entry for entry in self if entry.running or entry.request_id in work.taken]
        for entry in self:
            entry.given = entry.running = False
        return ran

    def abandon(self, request_id: str) -> bool:
        """Note that nobody waits for the request any more; true when that was not known before."""
        entry = self._entries.get(request_id)
        if entry is None or entry.abandoned:
            return False
        entry.abandoned = True
        return True

    def end(self, request_id: str) -> None:
        """Forget a request that the engine has finished; ignored when it is not open."""
        self._entries.pop(request_id, None)

    def unfinished(self) -> list[Entry]:
        """The requests that somebody waits for, oldest first."""
        return [entry for entry in self._entries.values() if not entry.abandoned]

    def get(self, request_id: str) -> Entry | None:
        """The open request of this id."""
        return self._entries.get(request_id)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)
