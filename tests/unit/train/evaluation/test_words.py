"""Metrics of text in any script: a repeated text scores 1, another one what the packages give for its words."""

# ruff: noqa: RUF001
import itertools
import math
import random
import string
import unicodedata

import pytest
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import corpus_bleu

from fullshard.program.metrics import baselines, bleu_words, counted_words, describe_words, lead, score

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
METRICS = ("exact_match", "accuracy", *ROUGE, "bleu", "chrf")

# A reference, and another text with some of its words.
TEXTS = {
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


def one(metric, predictions, references):
    return score([metric], predictions, references).values[metric]


def coded(texts):
    """The texts with each word replaced by one of a to z; words are separated by blanks."""
    names = map("".join, itertools.product("bcdfg", repeat=3))
    code = {word: name for word, name in zip(dict.fromkeys(" ".join(texts).split()), names, strict=False)}
    return [" ".join(code[word] for word in text.split()) for text in texts]


def plain(text):
    """Lower case, without the marks of sentences."""
    return "".join(" " if character in ".,।。، " else character for character in text.lower())


@pytest.mark.parametrize("language", [*TEXTS, *CHARACTERS])
@pytest.mark.parametrize("metric", METRICS)
def test_a_text_repeated_exactly_scores_1_and_another_one_less(language, metric):
    text, other = (TEXTS | CHARACTERS)[language]
    assert one(metric, [text], [(text,)]) == pytest.approx(1, abs=1e-9)
    assert one(metric, [other], [(text,)]) < 0.9
    assert one(metric, [other], [(text, other)]) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("language", [*TEXTS, *CHARACTERS])
def test_rouge_is_that_of_rouge_score_for_the_same_words_in_a_to_z(language):
    pair = (TEXTS | CHARACTERS)[language]
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
    assert counted_words(METRICS, references) == {}


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


@pytest.mark.parametrize("metric", METRICS)
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
