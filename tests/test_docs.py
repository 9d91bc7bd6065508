"""The documents tell what is there: generated pages are current, links lead somewhere, flags and targets exist."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tokenspeed.cli.main import COMMANDS, module_of
from tokenspeed.cli.parser import Parser
from tokenspeed.gateway.smg_flags import gateway_flags

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]

OTHERS = {"--x", "--no-x", "--help", "--version", "--data", "--gpus", "--rm", "--profile-from-start"}
"""Flags of other programs that the documents use."""


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current() -> None:
    for name, page in generator().PAGES.items():
        assert (ROOT / "docs" / name).read_text() == page(), f"docs/{name} is out of date; run `make docs`"


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def known_flags() -> set[str]:
    flags = {name for flag in gateway_flags() for name in flag.names} | OTHERS
    for command in COMMANDS:
        module = importlib.import_module(module_of(command))
        parser = Parser(prog=f"ts {command}", description="")
        module.configure(parser)
        flags |= _flags_of(parser)
    for script in [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")]:
        flags |= set(re.findall(r'"(--[a-z][a-z0-9-]+)"', script.read_text()))
    return flags


def _flags_of(parser: Parser) -> set[str]:
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action.choices, dict):  # subcommands
            found = found.union(*(_flags_of(below) for below in action.choices.values()))
    return found


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(path: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" not in link:
            yield link


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    for link in links(ROOT / name):
        file, _, anchor = link.partition("#")
        target = (ROOT / name).parent / file if file else ROOT / name
        assert target.exists(), f"{name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{name} links to {link}"


@pytest.mark.parametrize("name", NAMES)
def test_flags_and_commands_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    known = known_flags()
    unknown = {flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text) if flag not in known}
    # Pages of errors quote wrong flags, and say so; benchmarks and other programs have flags of their own.
    quoted = set(re.findall(r"there is no flag (--[a-z0-9-]+)", text)) | {"--profile-from-start"}
    quoted |= {
        flag for path in ROOT.glob("benchmarks/*.py") for flag in re.findall(r'"(--[a-z0-9-]+)"', path.read_text())
    }
    assert unknown <= quoted, f"{name} names {sorted(unknown - quoted)}"
    commands = {command.partition(" ")[0] for command in COMMANDS}
    assert set(re.findall(r"(?<![\w/-])ts ([a-z][a-z-]+)", text)) <= commands, name
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets(), name


def test_ci_and_pre_commit_call_targets_of_the_makefile() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    runs = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    runs += [hook["entry"] for repository in hooks["repos"] for hook in repository["hooks"]]
    dockerfile = (ROOT / "Dockerfile").read_text()
    runs += re.findall(
        r"\bmake [a-z-]+", re.sub(r"^#.*$", "", dockerfile, flags=re.MULTILINE).replace("install --", "")
    )
    assert len(runs) >= 5
    for run in runs:
        program, target, *_ = run.split()
        assert program == "make" and target in targets(), run


def test_ci_runs_on_every_python_that_is_promised() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python-version"] == ["3.11", "3.12"]
