"""Text to token ids and back, and conversations to prompts, by the files beside the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

from tokenspeed.errors import ModelError, RequestError

Message = Mapping[str, Any]


class Tokenizer:
    """The model's tokenizer.json with the chat template of its tokenizer_config.json or chat_template.jinja."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self) -> None:
        """Read the files.

        Raises:
            RequestError: when the model has no tokenizer.json.
            ModelError: when a file is damaged.
        """
        path = self._directory / "tokenizer.json"
        if not path.is_file():
            raise RequestError(f"text needs {path}, which does not exist; give token ids")
        try:
            self.backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises no other type
            raise ModelError(f"{path} cannot be read ({error}); download it again") from error
        self._settings = self._read_settings()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with what the tokenizer puts around a whole text unless told otherwise."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        **variables: Any,
    ) -> str:
        """The text that the chat template makes of a conversation.

        Raises:
            RequestError: when there is no template, or when it refuses the conversation.
        """
        template = chat_template or self._template(has_tools=bool(tools))
        special = {name: _text(value) for name, value in self._settings.items() if name.endswith("_token")}
        try:
            text: str = (
                _environment()
                .from_string(template)
                .render(
                    **special,
                    **variables,
                    messages=[dict(message) for message in messages],
                    add_generation_prompt=add_generation_prompt,
                    tools=list(tools) if tools else None,
                )
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RequestError(f"the chat template refuses the conversation: {error}") from error
        return text

    def _template(self, *, has_tools: bool) -> str:
        file = self._directory / "chat_template.jinja"
        template = file.read_text(encoding="utf-8") if file.is_file() else self._settings.get("chat_template")
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("tool_use" if has_tools else "default") or named.get("default")
        if not isinstance(template, str):
            raise RequestError(f"{self._directory} has no chat template; give one as chat_template, or use generate")
        return template

    def _read_settings(self) -> dict[str, Any]:
        path = self._directory / "tokenizer_config.json"
        if not path.is_file():
            return {}
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read ({error}); download it again") from error
        if not isinstance(settings, dict):
            raise ModelError(f"{path} holds no JSON object; download it again")
        return settings


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for: the environment of transformers' `apply_chat_template`."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    """Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _text(token: Any) -> Any:
    return token["content"] if isinstance(token, dict) and "content" in token else token
