"""WikiHow's two files as their authors ship them."""

import pytest

from fullshard.errors import DataError
from fullshard.program.data import SourceSpec, fingerprint, read_split
from fullshard.program.data.reading.wikihow import title_key

ARTICLE = "Line one of the article.\n\n, Line two of it...\n, and three.,\n" + "word " * 20


def row(*cells):
    return ",".join('"' + cell.replace('"', '""') + '"' for cell in cells) + "\n"


def write_all(directory, titles, extra=""):
    path = directory / "wikihowAll.csv"
    rows = [row("\nDo this.,\nDo that.", title, ARTICLE) for title in titles]
    path.write_text('"headline","title","text"\n' + "".join(rows) + extra, encoding="utf-8", newline="")
    return SourceSpec(train_file=path, format="wikihow")


def write_lists(directory, **lists):
    for name, titles in lists.items():
        (directory / f"all_{name}.txt").write_text(
            "".join(title_key(title) + "\n" for title in titles), encoding="utf-8"
        )


def test_commas_between_lines_are_mended_as_by_the_authors(tmp_path):
    spec = write_all(tmp_path, [f"How to Do {n}" for n in range(100)])
    example = read_split(spec, "train").examples[0]
    assert example.references == ("\nDo this.\nDo that.",)
    assert example.source == "Line one of the article.\n Line two of it.\n and three.,\n" + "word " * 20


def test_titles_are_split_by_the_authors_lists(tmp_path):
    titles = [
        "How to Sell Fine Art",
        "How to Use The Roost Café!",
        "How to Fold 3",
        "How to Be Left Out",
        "How to Test",
    ]
    spec = write_all(tmp_path, titles)
    write_lists(tmp_path, train=titles[:1] + titles[2:3], val=titles[1:2], test=titles[4:])
    table = read_split(spec, "train")
    assert len(table.examples) == 2
    assert len(read_split(spec, "validation").examples) == 1
    assert table.notes == (
        f"{spec.train_file}: split by the authors' title lists. Of 5 rows: 2 train, 1 validation, "
        "1 in none of the lists, 1 test.",
    )


def test_half_of_the_lists_is_refused(tmp_path):
    spec = write_all(tmp_path, ["How to A"])
    write_lists(tmp_path, train=["How to A"], test=[])
    with pytest.raises(DataError, match=r"all_train.txt and all_test.txt, but no all_val.txt"):
        read_split(spec, "train")


def test_rows_are_left_out_and_counted_by_reason(tmp_path):
    extra = (
        row("Too long for it. " * 5, "How to B", "Short text. " * 5)
        + row("Only", "two")
        + row("a", "b", "c", "d")
        + row("", "How to C", ARTICLE)
        + row("Do.", "", ARTICLE)
        + '"an "odd" quote","How to D","'
        + ARTICLE
        + '"\n'
    )
    spec = write_all(tmp_path, ["How to A"], extra)
    write_lists(tmp_path, train=["How to A", "How to D"], val=["How to E"])
    table = read_split(spec, "train")
    assert [example.target for example in table.examples] == ["\nDo this.\nDo that.", 'an odd" quote"']
    assert table.notes[0].endswith(
        "Of 7 rows: 2 train, 1 left out whose summary is not shorter than 3/4 of the article, "
        "2 left out with a wrong number of cells, 2 left out without headline, text or title."
    )
    with pytest.raises(DataError, match="At least one row is needed"):
        read_split(spec, "validation")


@pytest.mark.parametrize(("letters", "kept"), [(74, 1), (75, 0)])
def test_a_summary_is_kept_when_shorter_than_three_quarters_of_the_article(tmp_path, letters, kept):
    spec = write_all(tmp_path, ["How to A"], row("s" * letters, "How to B", "t" * 100))
    write_lists(tmp_path, train=["How to A", "How to B"], val=[])
    assert len(read_split(spec, "train").examples) == 1 + kept


def test_bytes_that_are_no_text_count_as_bad_rows(tmp_path):
    spec = write_all(tmp_path, ["How to A", "How to B"])
    write_lists(tmp_path, train=["How to A", "How to B"], val=[])
    spec.train_file.write_bytes(spec.train_file.read_bytes().replace(b"Line one", b"L\xefne one", 1))
    with pytest.raises(DataError, match="1 of 2 rows cannot be used"):
        read_split(spec, "train")
    lenient = SourceSpec(train_file=spec.train_file, format="wikihow", max_bad_rows=1)
    assert len(read_split(lenient, "train").examples) == 1


def test_sections_of_one_article_stay_on_one_side_of_the_hash_split(tmp_path):
    path = tmp_path / "wikihowSep.csv"
    rows = [
        row("Overview.", f"\nStep {part} of {n}.", ARTICLE + f"{n}.{part}", "Steps", f"How to Do {n}")
        for n in range(60)
        for part in range(3)
    ]
    path.write_text("overview,headline,text,sectionLabel,title\n" + "".join(rows), newline="")
    spec = SourceSpec(train_file=path, format="wikihow")
    sides = {split: read_split(spec, split) for split in ("train", "validation")}
    titles = {
        split: {example.source.rpartition(" ")[2].split(".")[0] for example in table.examples}
        for split, table in sides.items()
    }
    assert not titles["train"] & titles["validation"]
    assert len(sides["train"].examples) + len(sides["validation"].examples) == 180
    assert len(titles["validation"]) * 3 == len(sides["validation"].examples)
    assert "0.05 of the titles are held out by hash" in sides["train"].notes[0]
    more = SourceSpec(train_file=path, format="wikihow", validation_fraction=0.5)
    assert len(read_split(more, "validation").examples) > len(sides["validation"].examples)


def test_two_files_are_two_splits(tmp_path):
    spec = write_all(tmp_path, ["How to A"])
    both = SourceSpec(train_file=spec.train_file, validation_file=spec.train_file, format="wikihow")
    assert len(read_split(both, "train").examples) == len(read_split(both, "validation").examples) == 1
    with pytest.raises(DataError, match="leaves 1 rows for training and 0 held out"):
        read_split(spec, "train")


@pytest.mark.parametrize("content", ["headline,text\na,b\n", "a,b,c\n1,2,3\n", ""])
def test_other_files_are_not_taken_for_wikihow(tmp_path, content):
    path = tmp_path / "wikihowAll.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=r"is empty|is not the authors' WikiHow file"):
        read_split(SourceSpec(train_file=path, format="wikihow"), "train")


def test_the_fingerprint_knows_the_lists(tmp_path):
    spec = write_all(tmp_path, ["How to A"])
    before = fingerprint(spec, "train")
    assert before != fingerprint(spec, "validation")
    write_lists(tmp_path, train=["How to A"], val=[])
    assert fingerprint(spec, "train") != before
