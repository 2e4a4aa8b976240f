"""The letters that languages are written with, and how many characters of a text none of them accounts for."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache

_ALPHABETS = {
    "Catalan": "àçèéíïòóúü",
    "Croatian": "čćđšž",
    "Czech": "áčďéěíňóřšťúůýž",
    "Danish": "æøåéü",
    "Dutch": "áàçèéêëíïóöúü",
    "Esperanto": "ĉĝĥĵŝŭ",
    "Estonian": "äöõüšž",
    "Finnish": "äöåšž",
    "French": "àâæçéèêëîïôœùûüÿ",
    "German": "äöüß",
    "Hungarian": "áéíóöőúüű",
    "Icelandic": "áðéíóúýþæö",
    "Italian": "àèéìíîòóùú",
    "Latvian": "āčēģīķļņšūž",
    "Lithuanian": "ąčęėįšųūž",
    "Maltese": "ċġħż",
    "Polish": "ąćęłńóśźż",
    "Portuguese": "áàâãçéêíóôõúü",
    "Romanian": "ăâîşţșț",
    "Slovak": "áäčďéíĺľňóôŕšťúýž",
    "Spanish": "áéíñóúü",
    "Swedish": "åäöé",
    "Turkish": "âçğıîöşûüİ",
    # windows-1258 writes some tones as characters of their own
    "Vietnamese": "àáâãèéêìíòóôõùúýăđĩũơưạảấầẩẫậắằẳẵặẹẻẽếềểễệỉịọỏốồổỗộớờởỡợụủứừửữựỳỵỷỹ\u0300\u0301\u0303\u0309\u0323",
    "Welsh": "âêîôûŵŷäëïöẅ",
    "Belarusian": "абвгдеёжзійклмнопрстуўфхцчшыьэюя",
    "Macedonian": "абвгдѓежзѕијклљмнњопрстќуфхцчџш",
    "Russian": "абвгдеёжзийклмнопрстуфхцчшщъыьэюя",
    "Serbian": "абвгдђежзијклљмнњопрстћуфхцчџш",
    "Ukrainian": "абвгґдеєжзиіїйклмнопрстуфхцчшщьюя",
    "Greek": "αβγδεζηθικλμνξοπρστυφχψωςάέήίόύώϊϋΐΰ",
    "Hebrew": "אבגדהוזחטיךכלםמןנסעףפץצקרשת",
    "Arabic": "ءآأؤإئابةتثجحخدذرزسشصضطظعغفقكلمنهوىيًٌٍَُِّْ،؛؟",
    "Persian": "ءآأؤئابتثجحخدذرزسشصضطظعغفقكلمنهويپچژکگی،؛؟\u200c",
    "Thai": "".join(map(chr, (*range(0x0E01, 0x0E3B), *range(0x0E3F, 0x0E5C)))),
}
"""Small letters beyond ASCII of languages that have encodings of single bytes."""

_MARKS = frozenset("‘’‚“”„†•…–—‹›«»°§€£¥©®™·¿¡ºª²³½¼¾µ×±№\u00a0，。、；：？！（）《》「」『』【】〈〉〔〕・ー～％")  # noqa: RUF001
_WIDE = range(0xFF10, 0xFF5B)
_INSIDE = frozenset("’–—…·°×")  # noqa: RUF001
"""Marks that may be between two letters, as an apostrophe; others there are likely letters that were read wrongly."""

_AFTER_NUMBERS = frozenset("²³½¼¾±")


def common(codec: str, leads: Iterable[int]) -> frozenset[str]:
    """Return the characters of two bytes whose first is one of ``leads``: where a standard has the frequent ones."""
    codes = (bytes((lead, trail)) for lead in leads for trail in range(0x40, 0xFF))
    return frozenset(one for code in codes for one in code.decode(codec, "ignore") if not one.isascii())


@cache
def _alphabets() -> dict[str, frozenset[str]]:
    capital = {name: [one.upper() for one in letters] for name, letters in _ALPHABETS.items()}
    found = {
        name: frozenset((*letters, *(one for one in capital[name] if len(one) == 1)))
        for name, letters in _ALPHABETS.items()
    }
    return found | {
        "simplified Chinese": common("gb2312", range(0xB0, 0xD8)),
        "traditional Chinese": common("big5", range(0xA4, 0xC7)),
        "Korean": common("euc_kr", range(0xB0, 0xC9)),
        "Japanese": common("euc_jp", range(0xB0, 0xD0)) | frozenset(map(chr, range(0x3041, 0x30FF))),
    }


def unexplained(text: str) -> Counter[str]:
    """Count the characters beyond ASCII that are neither marks nor letters of the language that explains the most.

    A letter counts as unexplained where none is written: a capital after a small one, or a letter of another script
    beside one of a to z. So does a mark between two letters, unless it is one that is written there.
    """
    letters: Counter[str] = Counter()
    odd: Counter[str] = Counter()
    for before, one, after in zip(" " + text, text, text[1:] + " ", strict=False):
        if one.isascii():
            continue
        if _is_odd(before, one, after):
            odd[one] += 1
        elif one not in _MARKS and ord(one) not in _WIDE:
            letters[one] += 1
    rests = (Counter({one: n for one, n in letters.items() if one not in known}) for known in _alphabets().values())
    return odd + min(rests, key=lambda rest: rest.total())


def _is_odd(before: str, one: str, after: str) -> bool:
    if one in _MARKS:
        if one in _AFTER_NUMBERS and (after.isalpha() or (before.isalpha() and before != "m")):  # of metres
            return True
        if one == "\u2019" and not before.isalpha() and after.isalpha() and not _is_latin(after):
            return True
        return one < "\u3000" and one not in _INSIDE and before.isalpha() and after.isalpha()
    if one.isupper() and before.islower():
        return True
    beside_ascii = any(near.isascii() and near.isalpha() for near in (before, after))
    return beside_ascii and one.isalpha() and one < "\u2e80" and not _is_latin(one)


@cache
def _is_latin(one: str) -> bool:
    return unicodedata.name(one, "").startswith("LATIN")
