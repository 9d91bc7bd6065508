"""Conversations become the prompts that transformers makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.errors import ModelError, RequestError
from tokenspeed.offline.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "What is <1 & 2>?"}, {"role": "assistant", "content": "Three."}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": 'says "é" & <tags>'}}]
TEMPLATES = {
    "own": None,
    "blocks": "{% for m in messages %}\n  {% if m.role == 'user' %}\nU:{{ m['content'] }}\n  {% endif %}\n{% endfor %}",
    "loop control": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "tools": "{{ bos_token }}{% for t in tools or [] %}{{ t | tojson }}{{ t | tojson(indent=2) }}{% endfor %}",
    "variables": "{{ style | default('plain') }}{% if add_generation_prompt %}>{% endif %}{{ eos_token }}",
}


def prompt(tokenizer: Tokenizer, template: str | None, **options: Any) -> str:
    settings: dict[str, Any] = {"add_generation_prompt": True, "tools": TOOLS, **options}
    return tokenizer.chat_prompt(CHAT, chat_template=template, **settings)


def test_templates_render_as_transformers_renders_them(tokenizer: Tokenizer, tokenizer_dir: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tokenizer_dir)
    for name, template in TEMPLATES.items():
        for generation in (True, False):
            options = {"add_generation_prompt": generation, "style": "terse"}
            theirs = reference.apply_chat_template(CHAT, tools=TOOLS, chat_template=template, tokenize=False, **options)
            assert prompt(tokenizer, template, **options) == theirs, name


def test_a_template_may_refuse_a_conversation(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        prompt(tokenizer, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="chat template refuses"):
        prompt(tokenizer, "{{ messages[0].content + 1 }}")
    with pytest.raises(RequestError, match="chat template refuses"):
        prompt(tokenizer, "{% for")


def test_a_template_cannot_reach_into_python(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError):
        prompt(tokenizer, "{{ messages.__class__.__mro__ }}")


def test_the_template_of_a_file_of_its_own_goes_first(tokenizer_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tokenizer_dir, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("from the file")
    assert prompt(opened(tmp_path / "model"), None) == "from the file"


def test_a_model_may_have_several_templates(tokenizer_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tokenizer_dir, tmp_path / "model")
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert prompt(opened(tmp_path / "model"), None) == "with tools"
    assert prompt(opened(tmp_path / "model"), None, tools=None) == "plain"


def test_missing_and_damaged_files_are_told(tokenizer_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not exist; give token ids"):
        opened(tmp_path)
    shutil.copytree(tokenizer_dir, tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(RequestError, match="no chat template"):
        prompt(opened(tmp_path / "model"), None)
    (tmp_path / "model" / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config.json cannot be read"):
        opened(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read"):
        opened(tmp_path / "model")


def opened(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer(directory)
    tokenizer.open()
    return tokenizer
