"""What a server says of a CuTe DSL that is installed and does not work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tokenspeed.errors import ConfigError
from tokenspeed_kernel.cute_language import load_cute


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError"])
def test_a_dsl_that_cannot_be_imported_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cutlass"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "cutlass"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {error}('the driver is too old')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"^CuTe DSL cannot be loaded \(the driver is too old\); install "):
        load_cute()
