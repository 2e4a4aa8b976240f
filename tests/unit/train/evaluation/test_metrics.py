"""Scores and baselines against values worked out by hand and by the packages called directly, in any script."""

# ruff: noqa: RUF001
import importlib
import itertools
import math
import random
import string
import unicodedata

import pytest
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import corpus_bleu, corpus_chrf

from fullshard.errors import ConfigError
from fullshard.program import metrics
from fullshard.program.metrics import (
    METRICS,
    OTHER,
    Metric,
    baselines,
    bleu_words,
    counted_words,
    describe_words,
    format_metric,
    higher_is_better,
    is_better,
    lead,
    needs_text,
    require_packages,
    row_scores,
    score,
)

TEXTS = ["the cat sat on the mat. it slept.", "a dog ran", "no rain today in the north of the country"]
REFERENCES = [
    ("a cat sat on the mat. it was asleep.", "the cat slept on a mat"),
    ("the dog ran away",),
    ("today there is no rain", "no rain in the north today", "the country is dry"),
]
ONE = [right[:1] for right in REFERENCES]


def one(metric, predictions, references, **options):
    return score([metric], predictions, references, **options).values[metric]


def test_exact_match_ignores_only_white_space():
    predictions = ["card arrival", " card  arrival\n", "Card arrival", "card_arrival"]
    assert one("exact_match", predictions, [("card arrival",)] * 4) == 0.5


def test_of_several_references_any_is_an_exact_match():
    assert one("exact_match", ["a", "b", "c"], [("x", "a"), ("b",), ("a", "b")]) == pytest.approx(2 / 3)


def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence():
    # Common subsequence "the sat" (2 words): precision 2/2, recall 2/3, F = 0.8. The second pair shares nothing.
    assert one("rougeL", ["the sat", "x"], [("the cat sat",), ("y",)]) == pytest.approx(0.4)


def test_rouge_l_stems():
    assert one("rougeL", ["cats running"], [("cat runs",)]) == pytest.approx(1.0)


@pytest.mark.parametrize("references", [ONE, REFERENCES], ids=["one", "several"])
def test_rouge_is_what_rouge_score_gives_for_the_best_reference(references):
    names = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(names, use_stemmer=True)
    found = score(names, TEXTS, references).values
    for name in names:
        best = [
            max(scorer.score(right, text)[name].fmeasure for right in rights)
            for text, rights in zip(TEXTS, references, strict=True)
        ]
        assert found[name] == pytest.approx(sum(best) / 3, abs=1e-12)
    assert found["rouge1"] > found["rouge2"]


def test_for_rouge_lsum_a_sentence_is_a_line():
    scorer = RougeScorer(["rougeLsum"], use_stemmer=True)
    text, reference = "It slept. The cat sat!", "The cat sat.\nIt slept well."
    expected = scorer.score("The cat sat.\nIt slept well.", "It slept.\nThe cat sat!")["rougeLsum"].fmeasure
    found = score(["rougeLsum", "rougeL"], [text], [(reference,)]).values
    assert found["rougeLsum"] == pytest.approx(expected, abs=1e-12)
    assert found["rougeL"] < expected


def test_bleu_and_chrf_are_sacrebleus_over_the_whole_set_divided_by_100():
    texts, references = TEXTS * 2, ONE * 2
    streams = [[right[0] for right in references]]
    found = score(["bleu", "chrf"], texts, references).values
    assert found["bleu"] == pytest.approx(corpus_bleu(texts, streams).score / 100, abs=1e-12)
    assert found["chrf"] == pytest.approx(corpus_chrf(texts, streams).score / 100, abs=1e-12)
    assert 0 < found["bleu"] < 1


def test_bleu_and_chrf_take_rows_with_different_numbers_of_references():
    streams = [[right[i] if i < len(right) else "" for right in REFERENCES] for i in range(3)]
    found = score(["bleu", "chrf"], TEXTS, REFERENCES).values
    assert found["bleu"] == pytest.approx(corpus_bleu(TEXTS, streams).score / 100, abs=1e-12)
    assert found["chrf"] == pytest.approx(corpus_chrf(TEXTS, streams).score / 100, abs=1e-12)
    assert found["chrf"] > one("chrf", TEXTS, ONE)


def test_accuracy_comes_with_a_confusion_matrix():
    references = [("a",), ("a",), ("b",), ("c",), ("b",)]
    scores = score(["accuracy"], [" a", "b", "b", "what", "b"], references, labels=["b", "a"])
    assert scores.values == {"accuracy": pytest.approx(3 / 5)}
    confusion = scores.confusion
    assert confusion.labels == ("b", "a", "c")  # the training targets' order, then what only held-out rows have
    assert confusion.matrix() == [[2, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]]
    assert confusion.mistakes() == [("a", "b", 1), ("c", OTHER, 1)]


def test_of_several_right_labels_the_written_one_counts():
    confusion = score(["accuracy"], ["b", "c"], [("a", "b"), ("a", "b")], labels=["a", "b", "c"]).confusion
    assert confusion.cells == ((0, 2, 1), (1, 1, 1))


def test_only_accuracy_has_a_confusion_matrix():
    assert score(["exact_match"], ["a"], [("a",)], labels=["a"]).confusion is None


def test_predictions_and_references_must_pair_up():
    with pytest.raises(ValueError, match="1 predictions for 2 rows"):
        score(["exact_match"], ["a"], [("a",), ("b",)])


def test_values_come_in_the_order_asked_for_and_perplexity_needs_the_loss():
    names = ["rougeL", "exact_match", "perplexity", "accuracy", "rouge1"]
    assert list(score(names, ["a"], [("a",)]).values) == ["rougeL", "exact_match", "accuracy", "rouge1"]
    assert score(["perplexity"], [], [], loss=math.log(7)).values["perplexity"] == pytest.approx(7)
    assert score(["perplexity"], [], [], loss=1e4).values["perplexity"] == math.inf
    assert needs_text(["perplexity", "bleu"])
    assert not needs_text(["perplexity"])


def test_only_of_perplexity_the_lower_is_the_better():
    assert is_better("rougeL", 0.5, than=0.4)
    assert not is_better("rougeL", 0.5, than=0.5)
    assert is_better("perplexity", 3.0, than=4.0)
    assert not is_better("perplexity", 4.0, than=4.0)
    assert [higher_is_better(name) for name in ("bleu", "perplexity")] == [True, False]


def test_a_share_is_shown_in_percent_and_perplexity_as_a_number():
    assert format_metric("bleu", 0.2345) == "23.45%"
    assert format_metric("perplexity", 1234.5) == "1,234.500"


def test_majority_baseline_is_one_label_for_every_row():
    names = ["exact_match", "accuracy"]
    found = baselines(names, ["s"] * 4, [("a",), ("b",), ("b",), ("c", "b")], majority="b")
    assert {name: (each.name, each.value) for name, each in found.items()} == dict.fromkeys(names, ("always 'b'", 0.75))


def test_lead_baseline_is_each_rows_first_sentences():
    sources, references = ["The cat sat. The dog ran.", "Why? So."], [("the cat sat",), ("so",)]
    found = baselines(["rougeL", "perplexity"], sources, references, majority="t")
    assert found.keys() == {"rougeL"}
    assert found["rougeL"].name == "first sentence"
    assert found["rougeL"].value == pytest.approx(0.5)
    two = baselines(["rougeL", "chrf"], sources, references, majority="t", lead_sentences=2)
    assert two["rougeL"].name == two["chrf"].name == "first 2 sentences"
    assert two["rougeL"].value == pytest.approx((2 / 3 + 2 / 3) / 2)


def test_without_a_known_majority_there_is_no_such_baseline():
    assert baselines(["exact_match"], ["s"], [("a",)], majority=None) == {}


def test_a_metric_is_one_entry(monkeypatch):
    """Scores, baseline, direction, format and the record of how words are counted follow from it."""

    def shorter(names, predictions, references):
        return {name: [float(len(text)) for text in predictions] for name in names}

    own = Metric("length", "mean length", shorter, higher_is_better=False, shown="{:.0f}", words=lambda rows: "letters")
    monkeypatch.setattr(metrics, "METRICS", {**METRICS, "length": own})
    names = ["length", "exact_match"]
    assert score(names, ["abc", "a"], [("a",)] * 2).values == {"length": 2, "exact_match": 0.5}
    assert row_scores(names, ["abc", "a"], [("a",)] * 2)["length"] == [3, 1]
    found = baselines(names, ["ab. c"], [("a",)], majority="a")
    assert (found["length"].name, found["length"].value) == ("first sentence", 3)
    assert needs_text(["length"])
    assert is_better("length", 1.0, than=2.0)
    assert format_metric("length", 2.0) == "2"
    assert counted_words(names, [("a",)]) == {"length": "letters"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [(" One. Two.", "One."), ("v1.5 works", "v1.5 works"), ("Really?! Yes.", "Really?!"), ("no end", "no end")],
)
def test_first_sentence(text, expected):
    assert lead(text, 1) == expected


@pytest.mark.parametrize(("metric", "package"), [("chrf", "sacrebleu"), ("rouge2", "rouge-score")])
def test_a_missing_package_is_named_before_anything_is_computed(metric, package, monkeypatch):
    def missing(name):
        raise ImportError(name)

    require_packages([metric])
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        require_packages([metric])


ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
NAMES = ("exact_match", "accuracy", *ROUGE, "bleu", "chrf")

# A reference, and another text with some of its words.
LANGUAGES = {
    "russian": ("Кошка сидит на коврике. Она спит.", "Собака сидит на большом коврике."),
    "greek": ("Η γάτα κάθεται στο χαλί. Κοιμάται.", "Ο σκύλος κάθεται στο χαλί."),
    "arabic": ("القطة تجلس على السجادة. إنها نائمة.", "الكلب يجلس على السجادة الكبيرة."),
    "persian": ("گربه روی فرش می‌نشیند و می‌خوابد.", "سگ روی فرش می‌خوابد."),
    "hindi": ("बिल्ली चटाई पर बैठी है। वह सो रही है।", "कुत्ता चटाई पर बैठा है।"),
    "korean": ("고양이가 매트 위에 앉아 있다. 자고 있다.", "개가 매트 위에 앉아 있다."),
    "hebrew": ("החתול יושב על השטיח. הוא ישן.", "הכלב יושב על השטיח."),
    "french": ("Le café était fermé à Nîmes hier.", "Le café était ouvert à Nîmes."),
    "vietnamese": ("Con mèo đang ngồi trên tấm thảm.", "Con chó đang ngủ trên tấm thảm."),
}
CHARACTERS = {
    "chinese": ("猫坐在垫子上。它睡着了。", "狗坐在大垫子上睡了。"),
    "japanese": ("猫がマットの上に座っている。", "犬がマットの上で寝ている。"),
    "thai": ("แมวนอนบนเสื่อ", "หมานอนบนพื้น"),
}


def coded(texts):
    """The texts with each word replaced by one of a to z; words are separated by blanks."""
    names = map("".join, itertools.product("bcdfg", repeat=3))
    code = {word: name for word, name in zip(dict.fromkeys(" ".join(texts).split()), names, strict=False)}
    return [" ".join(code[word] for word in text.split()) for text in texts]


def plain(text):
    """Lower case, without the marks of sentences."""
    return "".join(" " if character in ".,।。، " else character for character in text.lower())


@pytest.mark.parametrize("language", [*LANGUAGES, *CHARACTERS])
@pytest.mark.parametrize("metric", NAMES)
def test_a_text_repeated_exactly_scores_1_and_another_one_less(language, metric):
    text, other = (LANGUAGES | CHARACTERS)[language]
    assert one(metric, [text], [(text,)]) == pytest.approx(1, abs=1e-9)
    assert one(metric, [other], [(text,)]) < 0.9
    assert one(metric, [other], [(text, other)]) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("language", [*LANGUAGES, *CHARACTERS])
def test_rouge_is_that_of_rouge_score_for_the_same_words_in_a_to_z(language):
    pair = (LANGUAGES | CHARACTERS)[language]
    spaced = [" ".join(text) if language == "chinese" else text for text in map(plain, pair)]
    if language in ("japanese", "thai"):  # a character with its marks is one
        spaced = ["".join(c if unicodedata.category(c)[0] == "M" else f" {c}" for c in text) for text in spaced]
    reference, text = coded(spaced)
    for name in ROUGE[:3]:
        expected = RougeScorer([name], use_stemmer=False).score(reference, text)[name].fmeasure
        assert 0 < expected < 1
        assert one(name, [pair[1]], [(pair[0],)]) == pytest.approx(expected, abs=1e-12)


def ascii_texts(count):
    draw = random.Random(5)
    pieces = [
        "running",
        "cats",
        "Don't",
        "e-mail",
        "a.b",
        "3.14",
        "the",
        "_x_",
        "&amp;",
        "(ok)",
        "ABC",
        "-\n",
        "!?",
        "\t",
    ]
    noise = ["".join(draw.choices(string.printable, k=9)) for _ in range(40)]
    return [" ".join(draw.choices(pieces + noise, k=draw.randint(4, 15))) for _ in range(count)]


def test_ascii_text_scores_as_before():
    texts, rights = ascii_texts(60), ascii_texts(120)[60:]
    rights = [f"{right} {text[: len(text) // 2]}" for right, text in zip(rights, texts, strict=True)]
    references = [(right,) for right in rights]
    scorer = RougeScorer(ROUGE[:3], use_stemmer=True)
    for name in ROUGE[:3]:
        each = [scorer.score(right, text)[name].fmeasure for right, text in zip(rights, texts, strict=True)]
        assert one(name, texts, references) == pytest.approx(sum(each) / len(each), abs=1e-12)
    assert one("bleu", texts, references) == pytest.approx(corpus_bleu(texts, [rights]).score / 100, abs=1e-12)
    assert counted_words(NAMES, references) == {}


@pytest.mark.parametrize(("language", "tokenizer"), [("chinese", "zh"), ("japanese", "char"), ("thai", "char")])
def test_bleu_is_sacrebleus_with_the_tokenizer_for_the_script(language, tokenizer):
    right, text = CHARACTERS[language]
    rights, texts = [right, right + text], [text, text + right]
    expected = corpus_bleu(texts, [rights], tokenize=tokenizer, force=True).score / 100
    assert 0 < expected < 1
    assert one("bleu", texts, [(one,) for one in rights]) == pytest.approx(expected, abs=1e-12)
    assert counted_words(["bleu"], [(right,)]) == {"bleu": f"sacrebleu's {tokenizer}"}


def test_each_row_of_a_mixture_has_its_own_words():
    pairs = [("a cat sat on the mat today", "the cat sat on a mat"), CHARACTERS["chinese"], CHARACTERS["thai"]]
    found = one("bleu", [text for _, text in pairs], [(right,) for right, _ in pairs])
    words = ("13a", "zh", "char")
    # The sums of n-grams over rows, from sacrebleu for each row alone.
    each = [corpus_bleu([text], [[right]], tokenize=name) for name, (right, text) in zip(words, pairs, strict=True)]
    counts, totals = (
        [sum(row) for row in zip(*rows, strict=True)]
        for rows in ([row.counts for row in each], [row.totals for row in each])
    )
    lengths = sum(row.sys_len for row in each), sum(row.ref_len for row in each)
    brevity = math.exp(min(0.0, 1 - lengths[1] / lengths[0]))
    product = math.prod(count / total for count, total in zip(counts, totals, strict=True))
    assert found == pytest.approx(brevity * product**0.25, abs=1e-9)
    assert [bleu_words([right]) for right, _ in pairs] == list(words)


@pytest.mark.parametrize("metric", NAMES)
def test_letters_of_two_characters_equal_those_of_one(metric):
    text = "Một quán cà phê ở Nîmes đã đóng cửa"
    apart = unicodedata.normalize("NFD", text)
    assert apart != text
    assert one(metric, [text], [(apart,)]) == pytest.approx(1, abs=1e-9)


def test_the_script_of_most_letters_decides_but_chinese_needs_only_one():
    assert bleu_words(["用 PyTorch FSDP 训练"]) == "zh"
    assert bleu_words(["an English sentence about ไทย"]) == "13a"
    assert bleu_words(["コーヒー and tea, please"]) == "13a"
    assert bleu_words(["我喜欢コーヒーとお茶"]) == "char"
    assert bleu_words(["Привет, мир"]) == bleu_words(["plain"]) == bleu_words(["naïve"]) == "13a"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("猫坐着。狗睡了。", "猫坐着。"),
        ("他说：“走吧！”明天见？好。", "他说：“走吧！”明天见？"),
        ("真的？！是。", "真的？！"),
        ("वह सोया। वह उठा।", "वह सोया।"),
        ("هل نام؟ نعم.", "هل نام؟"),
        ("v1.5 works。", "v1.5 works。"),
    ],
)
def test_the_first_sentence_ends_where_the_script_ends_it(text, expected):
    assert lead(text, 1) == expected
    assert lead(text, 9).replace(" ", "") == text.replace(" ", "")
    found = baselines(["rougeL"], [text], [(expected,)], majority=None)["rougeL"]
    assert found.value == pytest.approx(1)


def test_the_record_says_how_words_are_counted():
    references = [("plain",), ("a cat", "кошка")]
    found = counted_words(["exact_match", "rougeL", "rouge1", "bleu", "chrf"], references)
    assert found == dict.fromkeys(("rougeL", "rouge1"), "words of any script; characters in scripts without spaces")
    assert describe_words(found).count("words of any script") == 1
    assert counted_words(["rougeL", "bleu"], [("“quoted” – 5 €",)]) == {}
