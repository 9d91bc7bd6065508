"""What clients get of a server, in a form that can be compared."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.harness import HTTP, Server
from tests.waiting import PATIENCE


def answers(server: Server, body: dict[str, Any]) -> list[Any]:
    """The texts and log-probabilities of a request."""
    choices = server.complete(**body)["choices"]
    return [(choice["text"], choice["finish_reason"], rounded(choice.get("logprobs"))) for choice in choices]


def rounded(logprobs: Any) -> Any:
    """The tokens and their log-probabilities, as far as they are alike in batches of all sizes."""
    if logprobs is None:
        return None
    return logprobs["tokens"], [round(value, 2) for value in logprobs["token_logprobs"]]


def stream(server: Server, body: dict[str, Any]) -> str:
    """The pieces of one streamed answer."""
    request = {"model": server.served, "temperature": 0, "stream": True, **body}
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=request, timeout=PATIENCE) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])
