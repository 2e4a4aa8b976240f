"""Columns are recognised where one known pair is there, and named by the user where not."""

import pytest
import yaml

from fullshard.errors import ConfigError, DataError
from fullshard.program.data import SourceSpec
from fullshard.program.data.reading.columns import KNOWN_SHAPES, choose, choose_sources, parse_template
from fullshard.program.data.reading.row import Row


def example(columns, cells=None, **options):
    recipe = choose(SourceSpec(**options), columns, "t.csv")
    return recipe.example(Row(1, cells or {name: f"<{name}>" for name in columns}))


def refusal(columns, **options):
    with pytest.raises(DataError) as caught:
        choose(SourceSpec(**options), columns, "t.csv")
    return str(caught.value)


@pytest.mark.parametrize("shape", KNOWN_SHAPES, ids=lambda shape: "-".join([*shape[0], shape[1]]))
def test_every_known_shape_is_recognised_among_other_columns(shape):
    sources, target = shape
    recipe = choose(SourceSpec(), ["id", target.title(), *sources], "t.csv")
    assert (recipe.sources, recipe.target) == (sources, target.title())
    listed = " and ".join(map(repr, sources))
    assert recipe.notes == (f"t.csv: source is {listed}, target is {target.title()!r}, chosen by name.",)


def test_columns_that_are_given_are_no_news():
    assert choose(SourceSpec(source_column="a", target_column="b"), ["a", "b"], "t.csv").notes == ()


def test_more_than_one_known_pair_is_refused_with_the_pairs():
    text = refusal(["text", "label", "category"])
    assert "more than one pair fits (text -> label; text -> category)" in text
    assert "Its columns: 'text', 'label', 'category'." in text
    assert "Set data.source_column and data.target_column, or data.template" in text
    assert text.endswith("\ndata:\n  source_column: text\n  target_column: label")


def test_unknown_columns_are_refused_with_the_remedy():
    assert "no pair is known by name. Its columns: 'a', 'b', 'c'. Set data.source_column" in refusal(["a", "b", "c"])
    assert "set data.format: wikihow" in refusal(["headline", "title", "text"])


def test_half_of_a_pair_is_given_and_the_other_half_recognised():
    assert example(["text", "label", "body"], source_column="body").references == ("<label>",)
    assert example(["text", "label", "summary", "body"], source_column="text", target_column="body").source == "<text>"
    assert example(["article", "summary", "gist"], target_column="gist").source == "<article>"
    assert example(["text", "note", "label"], target_column="label").source == "<text>"
    assert "more than one" in refusal(["text", "label", "category"], source_column="text")
    assert "more than one" in refusal(["text", "document", "gist"], target_column="gist")


@pytest.mark.parametrize(
    "columns", [["Satz (DE)", "Ja: nein", "# 2"], ["Satz", "yes", "2"], ["1.5", "x", 'a"b '], ["Wert-", "b", "~"]]
)
def test_the_refusal_has_lines_for_the_run_file_that_name_the_tables_columns(columns):
    lines = refusal(columns).split("with your choice:\n")[1]
    assert yaml.safe_load(lines) == {"data": {"source_column": columns[0], "target_column": columns[-1]}}
    lines = refusal(columns, template=f"{{{columns[0]}}}").split("with your choice:\n")[1]
    assert list(yaml.safe_load(lines)["data"]) == ["target_column"]


def test_the_lines_prefer_names_that_are_known():
    assert refusal(["id", "Label", "Satz"]).endswith("\n  source_column: id\n  target_column: Label")
    assert refusal(["id", "Klasse", "Text"]).endswith("\n  source_column: Text\n  target_column: Klasse")
    assert refusal(["id", "note", "gist"], source_column="note").endswith(
        "\n  source_column: note\n  target_column: gist"
    )


def test_of_two_columns_without_known_names_the_first_is_the_source():
    recipe = choose(SourceSpec(), ["Satz", "Klasse"], "t.csv")
    assert (recipe.sources, recipe.target) == (("Satz",), "Klasse")
    assert recipe.notes == (
        "t.csv: source is 'Satz', target is 'Klasse', the first and the second of two columns; to choose "
        "otherwise, set data.source_column and data.target_column.",
    )
    assert choose_sources(SourceSpec(), ["Satz", "Klasse"], "t.csv").sources == ("Satz",)


def test_of_two_columns_the_one_that_is_not_given_is_the_other_one():
    for given in ("Satz", "Klasse"):
        other = {"Satz": "Klasse", "Klasse": "Satz"}[given]
        assert example(["Satz", "Klasse"], source_column=given).references == (f"<{other}>",)
        assert example(["Satz", "Klasse"], target_column=given).source == f"<{other}>"
        assert choose_sources(SourceSpec(target_column=given), ["Satz", "Klasse"], "t.csv").sources == (other,)


def test_a_known_source_is_followed_by_its_target():
    recipe = choose(SourceSpec(), ["Text", "team"], "rows.csv")
    assert (recipe.sources, recipe.target) == (("Text",), "team")
    assert "the first and the second of two columns" in recipe.notes[0]


def test_two_columns_with_one_known_name_are_not_guessed():
    assert "no pair is known" in refusal(["id", "text"])
    assert "no pair is known" in refusal(["label", "Satz"])


def test_a_name_that_is_there_twice_is_refused_even_when_recognised():
    assert "has 2 columns named 'text'" in refusal(["text", "label", "text"])
    assert "has no column 'x'" in refusal(["text", "label"], source_column="x")
    assert "has no column 'x'" in refusal(["text", "label"], target_column="x")


def test_instructions_with_and_without_input():
    columns = ["instruction", "input", "output"]
    assert example(columns).source == "<instruction>\n\n<input>"
    for empty in ("", None):
        assert example(columns, {"instruction": "do", "input": empty, "output": "x"}).source == "do"
    assert example(columns, {"instruction": "do", "output": "x"}).source == "do"


def test_questions_with_and_without_context():
    columns = ["question", "context", "answer"]
    assert example(columns).source == "question: <question> context: <context>"
    assert example(columns, {"question": "why", "context": "", "answer": "x"}).source == "why"


def test_a_template_is_filled_with_cells_as_they_are():
    template = "question: {question} {{context}}: {context}{question}"
    filled = example(
        ["question", "context", "answer"],
        {"question": "a\nb {x}", "context": ["1.", "2."], "answer": "c"},
        template=template,
    )
    assert filled.source == "question: a\nb {x} {context}: 1. 2.a\nb {x}"
    assert filled.references == ("c",)


def test_a_template_with_unknown_columns_lists_those_that_exist():
    assert refusal(["a", "label"], template="{b}") == "t.csv has no column 'b'. Its columns: 'a', 'label'."


def test_a_template_may_name_any_column_but_nothing_else():
    assert parse_template("{my column} {a.b}")[0] == ("my column", "a.b")
    for template in ("{}", "{a!r}", "{a:>5}", "{a", "a}", "no column", ""):
        with pytest.raises(ConfigError, match=r"data\.template"):
            parse_template(template)
