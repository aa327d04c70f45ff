"""Every column, role and matrix that a run can have is named and explained, in English and in Chinese."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyhead.analysis.roles_rules import RULES
from polyhead.cli.heads_picture import STYLES
from polyhead.inspection import Inspection, Settings
from polyhead.inspection.vocabulary import COLUMNS, RELATIONS, ROLES, Term, column_of, relation_of, role_of
from polyhead.observation.statistics import NAMES
from polyhead.workflows.inspecting import inspect_model
from tests.inspection.small_models import model_folder, text_folder

pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Inspection]:
    """Heads taken out, gradients, and every statistic there is."""
    folder: Path = tmp_path_factory.mktemp("runs")
    text = str(text_folder(folder / "text", documents=6, words=160))
    return [
        inspect_model(Settings(str(model_folder(folder / name, name)), text, context=48, statistics=statistics))
        for name, statistics in (("bert", None), ("llama", tuple(NAMES)))
    ]


def is_chinese(text: str) -> bool:
    return any("\u4e00" <= character <= "\u9fff" for character in text)


OF_VECTORS = {name: column_of(name, "representation") for name in COLUMNS}


@pytest.mark.parametrize(
    "terms", [COLUMNS, OF_VECTORS, RELATIONS, ROLES], ids=["columns", "of vectors", "relations", "roles"]
)
def test_every_entry_is_said_twice_and_no_label_stands_for_two(terms: dict[str, Term]):
    for name, term in terms.items():
        assert term.name == name
        for text in (term.label, term.about):
            assert text.en
            assert not is_chinese(text.en), name
            assert is_chinese(text.zh), name
        assert term.about.en.endswith(".")
        assert term.about.zh.endswith("。")
        assert len(term.label.en) <= 32, name
    for language in ("en", "zh"):
        labels = [term.label[language] for term in terms.values()]
        assert len(set(labels)) == len(labels)


def test_every_column_of_a_run_has_an_entry_and_no_entry_is_of_no_run(runs):
    there = {"tokens", *(name for run in runs for name in run.table.names)}
    there |= {name for run in runs for name in run.table.columns if name.endswith("_score")}
    assert sorted(there - set(COLUMNS)) == []
    # Only models with a learned sink have the first; here every token is a word, and no token is a pronoun.
    pronouns = {"agreement_score", "pronoun_score"}
    pronouns |= {f"pronoun_{cue}_score" for cue in ("gender", "number", "meaning")}
    assert set(COLUMNS) - there == {"learned_sink_mass", "word_share", *pronouns}


def test_every_matrix_of_a_run_has_an_entry_and_no_entry_is_of_no_run(runs):
    assert {name for run in runs for found in run.relations.values() for name in found} == set(RELATIONS)


def test_every_role_has_an_entry_with_letters_and_a_style():
    assert set(ROLES) == set(RULES)
    assert len({role.letters for role in ROLES.values()}) == len(ROLES)
    # In the same order, so that the terminal and the page name a head by the same role.
    assert list(ROLES) == list(STYLES)


def test_what_has_no_entry_goes_by_its_name():
    for found in (column_of("my_own"), relation_of("my_own"), role_of("my_own")):
        assert found.label.en in ("my own", "my_own")
        assert is_chinese(found.about.zh)
