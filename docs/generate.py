"""Writes docs/flags.md and docs/control-api.md from the configuration and from the routes: `make docs`."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import Field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
from starlette.routing import Route

from tokenspeed.runtime.config import Config, option_fields
from tokenspeed.runtime.protocol.message import Message
from tokenspeed.server.control import ControlApp

DOCS = Path(__file__).parent

FLAGS_HEAD = """\
# Flags of `ts serve`

`make docs` writes this page from `tokenspeed.runtime.config`. `ts serve --help` tells the same.

```
ts serve MODEL [options]
```

`MODEL` may also be given as `--model MODEL`. A flag of the form `--x / --no-x` is a switch. Names that other engines
give to the same thing are taken too. Every other flag of `smg launch` is passed on to the gateway, apart from those
that `ts serve` has to set itself, which are refused with the reason; `smg launch --help` tells them.
"""

CONTROL_HEAD = """\
# Control API

`make docs` writes this page from the routes of `tokenspeed.server.control`.

Each engine has a control address of its own, on the loopback device unless `--rl-control-host` says otherwise; the log
of `ts serve` tells it, `--rl-control-port` fixes its port. The gateway passes the same calls on to every engine that a
selector matches, as `/v1/rl/engine/<call>?selector=engine=tokenspeed`, where the server was started with `--enable-rl`
or `--allow-reload-forward`; there the server's `--api-key` is asked for. The control address itself asks for no key:
who can reach it controls the engine.

Bodies are JSON objects; a body that is left out is an empty one. Every answer is JSON, apart from the metrics. A call
that fails answers with `success` false, a `code`, and one sentence in `message`: with status 400 for what cannot be
done, also while the engine starts or stops, with 404 and 405 for what is not there. `/health` has 503 in place of 400.
"""


def flags() -> str:
    """The page of the flags, by group."""
    parts = [FLAGS_HEAD]
    defaults = Config()
    for name, options in groupby(option_fields(), key=itemgetter(0)):
        group = type(getattr(defaults, name))
        hints = get_type_hints(group)
        parts.append(f"## {(group.__doc__ or '').splitlines()[0].rstrip('.')}\n")
        parts.append("| flag | default | what it does |\n|---|---|---|")
        parts.extend(_flag_row(option, hints[option.name]) for _, option in options)
        parts.append("")
    return "\n".join(parts)


def _flag_row(option: Field[Any], hint: Any) -> str:
    flag, metadata = f"--{option.name.replace('_', '-')}", option.metadata
    if option.type in (bool, "bool"):
        spelling = f"`{flag}` / `--no-{flag[2:]}`"
    else:
        values = "{" + ",".join(metadata["choices"]) + "}" if metadata["choices"] else metadata["metavar"]
        many = " ..." if get_origin(_without_none(hint)) is tuple else ""
        spelling = f"`{flag} {values}{many}`"
    text = metadata["help"]
    for names, words in ((metadata["aliases"], "also"), (metadata["negations"], "its opposite also")):
        if names:
            text += f"; {words} {', '.join(f'`{name}`' for name in names)}"
    return f"| {spelling} | {_default(option)} | {text} |"


def _default(option: Field[Any]) -> str:
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    return "" if option.default in (None, "") else f"`{option.default}`"


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        return next(part for part in get_args(hint) if part is not type(None))
    return hint


def control_api() -> str:
    """The page of the control calls, in the order of the routes."""
    parts = [CONTROL_HEAD]
    # Only the table of routes is asked for; no handler is called.
    app = ControlApp(None, None, None, dict, allow_reload=True).build()  # type: ignore[arg-type]
    for route in app.routes:
        assert isinstance(route, Route)
        methods = " or ".join(sorted((route.methods or set()) - {"HEAD"}))
        parts.append(f"## `{methods} {route.path}`\n")
        parts.append(_text(route.endpoint, f"{methods} {route.path}"))
        body = _body(route.endpoint)
        if body is not None:
            parts.append("\n| field | type | default | |\n|---|---|---|---|")
            parts.extend(_field_rows(body))
        parts.append("")
    return "\n".join(parts)


def _text(handler: Callable[..., Any], call: str) -> str:
    text = inspect.getdoc(handler)
    if not text:
        sys.exit(f"{call} has no docstring, which docs/control-api.md needs")
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False)


def _body(handler: Callable[..., Any]) -> type[msgspec.Struct] | None:
    """The struct that a handler reads the body into: the one in its code that is no message to the ranks."""
    module = inspect.getmodule(handler)
    named = (getattr(module, name, None) for name in handler.__code__.co_names)
    structs = (kind for kind in named if isinstance(kind, type) and issubclass(kind, msgspec.Struct))
    return next((struct for struct in structs if not issubclass(struct, Message)), None)


def _field_rows(body: type[msgspec.Struct]) -> Iterator[str]:
    texts = _field_texts(body)
    for field in msgspec.structs.fields(body):
        default = "required" if field.required else f"`{msgspec.json.encode(field.default).decode()}`"
        yield f"| `{field.name}` | {_type_text(field.type)} | {default} | {texts[field.name]} |"


def _field_texts(body: type[msgspec.Struct]) -> dict[str, str]:
    """What stands under each field in the source."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(body))).body
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
    for statement, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            said = below.value if isinstance(below, ast.Expr) else None
            text = said.value if isinstance(said, ast.Constant) else ""
            texts[statement.target.id] = " ".join(str(text).split())
    missing = [field.name for field in msgspec.structs.fields(body) if not texts.get(field.name)]
    if missing:
        sys.exit(f"{body.__name__} says nothing of {', '.join(missing)}, which docs/control-api.md needs")
    return texts


def _type_text(hint: Any) -> str:
    """The type as JSON has it."""
    plain = _without_none(hint)
    origin, arguments = get_origin(plain), get_args(plain)
    if origin is tuple:
        item = _type_text(arguments[0])
        return f"list of {item if item.startswith('`') else f'{item}s'}"
    if arguments:
        return ", ".join(f"`{choice}`" for choice in arguments)
    return {str: "string", int: "integer", float: "number", bool: "boolean"}.get(plain, "object")


PAGES: dict[str, Callable[[], str]] = {"flags.md": flags, "control-api.md": control_api}


def main() -> None:
    """Write every page."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
