from __future__ import annotations

from pathlib import Path

import pytest

from tokenspeed.errors import ModelError
from tokenspeed.modelname import HubId, locate


def test_a_path_that_exists_is_a_path_even_if_it_looks_like_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("org/name") == tmp_path / "org" / "name"
    assert locate("org/other") == HubId("org/other")
    assert locate("org/other", "main") == HubId("org/other")


def test_the_bundled_model_has_a_name() -> None:
    assert locate("smollm2") is None


@pytest.mark.parametrize(
    "model", ["nowhere", "/no/where", "./org/name", "a/b/c", "org/", "org/model.gguf", "smollm", "org/n\0", "x" * 5000]
)
def test_what_is_nowhere_is_refused(model: str) -> None:
    with pytest.raises(ModelError, match=r"does not exist; name|cannot be read"):
        locate(model)


def test_no_model() -> None:
    with pytest.raises(ModelError, match="no model is given"):
        locate("")


@pytest.mark.parametrize("model", ["smollm2", "."])
def test_only_hub_ids_have_revisions(model: str) -> None:
    with pytest.raises(ModelError, match="--revision is for hub ids"):
        locate(model, "main")
