"""The edits themselves: they fit the sources as they are, and follow from the seed alone."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from tests.fuzz.features import FEATURES, Feature, make
from tests.fuzz.program import Edit, Kinds, Program
from tests.fuzz.sources import Sources

KINDS = Kinds(ranks=2, graphs=True, deadly=0.1)


def first(count: int, skip: int = 0) -> list[Edit]:
    return list(islice(Program(1, KINDS).edits(), skip, skip + count))


def compile_all(sources: Sources) -> None:
    for module, text in sources.texts.items():
        compile(text, module, "exec", dont_inherit=True)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_fits_the_sources(feature: Feature) -> None:
    made = [make({feature.name: value}) for value in feature.values]
    for sources in made:
        compile_all(sources)
        assert sources != Sources()
    assert all(one != other for index, one in enumerate(made) for other in made[:index])


def test_all_features_go_together() -> None:
    compile_all(make({feature.name: feature.values[-1] for feature in FEATURES}))


def test_edits_follow_from_the_seed() -> None:
    edits = first(60)
    assert [edit.diff() for edit in first(10, skip=50)] == [edit.diff() for edit in edits[50:]]
    for edit, following in pairwise(edits):
        assert edit.modules
        assert following.before == edit.after
        if edit.expect == "commit":
            compile_all(edit.during)
    share = [edit.expect for edit in edits].count("fail") / len(edits)
    assert 0.3 <= share <= 0.7


def test_an_overlay_is_written_as_the_sources_are(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for edit in first(20):
        edit.during.write(tmp_path)
        found = {path: path.read_bytes() for path in tmp_path.rglob("*.py")}
        assert sorted(found.values()) == sorted(
            t.encode("utf-8", "surrogateescape") for t in edit.during.texts.values()
        )
