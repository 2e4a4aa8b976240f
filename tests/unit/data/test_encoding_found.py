"""Files of other encodings than UTF-8 are read in their own, or refused; none silently in another."""

# ruff: noqa: RUF001 (letters of many scripts)

import gzip
import json

import pytest

from fullshard.errors import DataError
from fullshard.program.data.reading.encoding import find_encoding

TEXTS = {
    "zh": (
        "我的卡还没有到",
        "如何关闭账户",
        "余额是多少",
        "转账需要多久",
        "为什么付款被拒绝",
        "请帮我修改密码",
        "退款什么时候到账",
        "在哪里可以查看账单",
    ),
    "zht": (
        "我的卡還沒有到",
        "如何關閉帳戶",
        "餘額是多少",
        "轉帳需要多久",
        "為什麼付款被拒絕",
        "請幫我修改密碼",
        "退款什麼時候到帳",
        "在哪裡可以查看帳單",
    ),
    "ko": (
        "카드가 아직 도착하지 않았어요",
        "계좌를 어떻게 해지하나요",
        "잔액이 얼마인가요",
        "송금은 얼마나 걸리나요",
        "비밀번호를 바꿔 주세요",
    ),
    "ja": (
        "カードがまだ届きません",
        "口座を閉じるにはどうすればよいですか",
        "残高はいくらですか",
        "振込にはどのくらいかかりますか",
    ),
    "ru": (
        "Моя карта ещё не пришла",
        "Как закрыть счёт?",
        "Какой у меня остаток",
        "Сколько идёт перевод",
        "Почему отклонён платёж",
        "Измените пароль",
    ),
    "de": (
        "Meine Karte ist noch nicht da",
        "Wie schließe ich mein Konto?",
        "Wie hoch ist mein Guthaben für März?",
        "Warum wurde die Überweisung abgelehnt?",
    ),
    "fr": (
        "Ma carte n'est pas encore arrivée",
        "Où est mon relevé ?",
        "Pourquoi le paiement a-t-il été refusé ?",
        "Ça ne marche pas à l'étranger",
        "Bientôt fermé",
    ),
    "pl": (
        "Moja karta jeszcze nie dotarła",
        "Jak zamknąć konto?",
        "Dlaczego płatność została odrzucona?",
        "Proszę zmienić hasło",
        "Gdzie są źródła?",
    ),
    "cs": (
        "Moje karta ještě nedorazila",
        "Jak zrušit účet?",
        "Proč byla platba zamítnuta?",
        "Žádám o změnu hesla",
        "Kdy přijdou peníze na účet?",
    ),
    "el": (
        "Η κάρτα μου δεν έφτασε ακόμα",
        "Πώς κλείνω τον λογαριασμό μου;",
        "Γιατί απορρίφθηκε η πληρωμή;",
        "Πόσο κοστίζει η μεταφορά;",
    ),
}
CODECS = (
    *(("zh", one) for one in ("gb18030", "gb2312")),
    *(("zht", one) for one in ("big5", "cp950")),
    *(("ko", one) for one in ("euc-kr", "cp949")),
    *(("ja", one) for one in ("shift-jis", "cp932", "euc-jp", "iso2022-jp")),
    *(("ru", one) for one in ("koi8-r", "windows-1251", "cp866", "iso-8859-5", "mac-cyrillic")),
    *(("de", one) for one in ("windows-1252", "iso-8859-15", "mac-roman")),
    *(("fr", one) for one in ("windows-1252", "iso-8859-1", "mac-roman")),
    *(("pl", one) for one in ("windows-1250", "iso-8859-2")),
    *(("cs", one) for one in ("windows-1250", "iso-8859-2")),
    ("el", "windows-1253"),
    *(("ru", one) for one in ("utf-16", "utf-16-le", "utf-16-be", "utf-32")),
)


def table(language, rows=200):
    texts = TEXTS[language]
    return "text,label\n" + "".join(f"{texts[i * 7 % len(texts)]} {i},{'abc'[i % 3]}\n" for i in range(rows))


@pytest.mark.parametrize(("language", "codec"), CODECS)
@pytest.mark.parametrize("form", ["csv", "jsonl.gz"])
def test_two_hundred_rows_are_read_in_their_encoding(language, codec, form, tmp_path):
    text = table(language)
    if form != "csv":
        rows = [line.split(",") for line in text.splitlines()]
        text = "".join(json.dumps(dict(zip(rows[0], row, strict=True)), ensure_ascii=False) + "\n" for row in rows[1:])
    path, content = tmp_path / f"a.{form}", text.encode(codec)
    path.write_bytes(content if form == "csv" else gzip.compress(content))
    found = find_encoding(path)
    assert content.decode(found.name) == text
    assert found.problem is None
    if found.others:  # another one fits as well, so it is shown
        assert f"{found.others[0][0]} would be" in found.note("data.encoding")


@pytest.mark.parametrize(("language", "codec"), CODECS)
@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_are_read_rightly_or_said_or_refused(language, codec, rows, tmp_path):
    text = table(language, rows)
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode(codec))
    try:
        found = find_encoding(path)
    except DataError:
        return
    assert found.others or text.encode(codec).decode(found.name) == text


def test_curly_quotes_in_an_english_table_are_windows_1252(tmp_path):
    rows = [f"I don’t know what row {i} says" for i in range(200)]
    (tmp_path / "a.csv").write_text("text\n" + "\n".join(rows), encoding="windows-1252")
    found = find_encoding(tmp_path / "a.csv")
    assert (found.name, found.example) == ("windows-1252", rows[0])


def test_what_fits_no_encoding_is_refused_with_lines_to_choose_from(tmp_path):
    rows = b"".join(b"row %d \xf5\xff\x98\xfe\xd7 x\n" % i for i in range(30))
    (tmp_path / "a.csv").write_bytes(b"text\n" + rows)
    with pytest.raises(DataError, match=r"Which of these lines is right\?\n  \S+: 'row 0 ") as error:
        find_encoding(tmp_path / "a.csv")
    assert str(error.value).count("row 0") >= 2


def test_a_line_of_another_encoding_far_into_the_file_is_named_with_its_bytes(tmp_path):
    lines = table("zh", 40_000).splitlines()
    content = [line.encode("gb18030") for line in lines]
    content[33_332] = b"\xff\xff," + content[33_332]
    (tmp_path / "a.csv").write_bytes(b"\n".join(content))
    found = find_encoding(tmp_path / "a.csv")
    assert found.name == "gb18030"
    assert "1 of 40,001 lines" in found.problem
    assert "line 33,333: its bytes ff" in found.problem


def test_letters_that_first_come_late_decide(tmp_path):
    rows = [f"row {i},a\n" for i in range(50_000)] + [f"Карта {i} ещё не пришла,b\n" for i in range(50)]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(rows), encoding="koi8-r")
    assert find_encoding(tmp_path / "a.csv").name == "koi8-r"


@pytest.mark.parametrize("codec", ["windows-1252", "gb18030", "windows-1251"])
def test_a_few_lines_of_utf_8_among_others_are_refused(codec, tmp_path):
    language, other = {"windows-1252": ("de", "Köln"), "gb18030": ("zh", "账户"), "windows-1251": ("ru", "счёт")}[codec]
    content = [line.encode(codec) for line in table(language).splitlines()]
    content[60] = f"{other},a".encode()
    (tmp_path / "a.csv").write_bytes(b"\n".join(content))
    found = find_encoding(tmp_path / "a.csv")
    assert "of 201 lines cannot be read" in found.problem
