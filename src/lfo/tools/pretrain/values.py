"""Values that texts name - words, numbers, codes, dates, names of several words - and others of the same shape."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import Any

VALUE = re.compile(r"[^\W_]+(?:[-'./:_@][^\W_]+)*")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w])")
_BETWEEN = re.compile(r"\s+")
COMMON = 0.6  # a word in more than this share of the texts is wording
RARE = 0.25  # a code or a capitalised word in at most this share of the openings is a name,
RARE_WORD = 0.1  # any other word in at most this one
MOST_WORDS = 4  # of a value
MOST_NOISE = 0.7  # share of words of a reworded text that change, at most
MOVED = 0.6  # share of reworded texts whose parts change places
_SYLLABLES = (
    *("ba", "ce", "di", "fo", "gu", "la", "me", "ni", "ro", "su", "ta", "ve", "ki", "po", "tu", "ran", "bel", "cor"),
    *("den", "fin", "gal", "hod", "jun", "kar", "lim", "mor", "nel", "pex", "quil", "sar", "tov", "wen"),
)


def words_in(text: str) -> list[str]:
    """
    >>> words_in("Form B-17, please: it costs 12.50 on 2031-04-02.")
    ['Form', 'B-17', 'please', 'it', 'costs', '12.50', 'on', '2031-04-02']
    """
    return VALUE.findall(text)


def names(text: str, value: Any) -> bool:
    """Whether a text names a value, or each item of a list.

    >>> names("It takes Heron and a red label.", "red"), names("It is shared.", "red"), names("A, C", ["C", "A"])
    (True, False, True)
    """
    if isinstance(value, list):
        return bool(value) and all(names(text, each) for each in value)
    return re.search(rf"(?<!\w){re.escape(str(value))}(?!\w)", text) is not None


def wording(texts: Sequence[str], *, share: float = COMMON) -> frozenset[str]:
    """Return the words that more than this share of the texts contain."""
    counts = Counter(word for text in texts for word in set(words_in(text)))
    return frozenset(word for word, count in counts.items() if count > share * len(texts))


def runs(text: str, wanted: Callable[[str], bool]) -> list[str]:
    """Return the longest pieces of the text whose words are all wanted, with only spaces between them.

    >>> runs("Ticket of Ada Adams about a phone.", {"Ada", "Adams", "phone"}.__contains__)
    ['Ada Adams', 'phone']
    """
    found: list[str] = []
    end = None
    for match in VALUE.finditer(text):
        if not wanted(match[0]):
            end = None
            continue
        joined = end is not None and _BETWEEN.fullmatch(text[end : match.start()]) is not None
        if joined and len(found[-1].split()) < MOST_WORDS:
            found[-1] = f"{found[-1]} {match[0]}"
        else:
            found.append(match[0])
        end = match.end()
    return found


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a value that is given: the first alternative that is not null."""
    alternatives = schema.get("anyOf") or schema.get("oneOf") or ()
    return next((each for each in alternatives if each.get("type") != "null"), schema)


def options(schema: Mapping[str, Any], text: str, *, known: Collection[str], common: Collection[str]) -> list[Any]:
    """Return the values that a text names and that fit the schema.

    Free words count only if they are new: not `known` from before, and if possible not `common` wording. Of a list, the
    words that stand in its description come first.
    """
    schema = resolved(schema)
    if "enum" in schema:
        return [each for each in schema["enum"] if names(text, each)]
    kind = schema.get("type", "string")
    if kind in ("integer", "number"):
        return _numbers(kind, text)
    if kind == "array":
        found = options(schema.get("items", {}), text, known=known, common=common)
        pairs = [[first, second] for first, second in pairwise(found)]
        described = [each for each in found if names(schema.get("description", ""), each)]
        every = [described, found, *pairs, *([each] for each in found)]
        return [each for index, each in enumerate(every) if each and each not in every[:index]]
    if kind != "string":
        return []
    new = [word for word in words_in(text) if word not in known]
    telling = [word for word in new if word not in common] or new
    return list(dict.fromkeys([*runs(text, set(telling).__contains__), *telling]))


def _numbers(kind: str, text: str) -> list[Any]:
    found = _NUMBER.findall(text)
    return [int(each) for each in found if "." not in each] if kind == "integer" else [float(each) for each in found]


def alike(text: str, schema: Mapping[str, Any], random: Random) -> str:
    """Return a random value of the same shape: a number of as many digits, a word of about as many letters."""
    if re.fullmatch(r"-?\d+", text) and {"minimum", "maximum"} <= schema.keys():
        return str(random.randint(int(schema["minimum"]), int(schema["maximum"])))
    made = re.sub(r"\d+", lambda found: _digits(found[0], random), text)
    return re.sub(r"[^\W\d_]+", lambda found: _letters(found[0], random), made)


def _digits(old: str, random: Random) -> str:
    first = str(random.randint(0 if len(old) == 1 or old[0] == "0" else 1, 9))
    return first + "".join(str(random.randint(0, 9)) for _ in old[1:])


def _letters(old: str, random: Random) -> str:
    if len(old) == 1 or (len(old) <= 3 and old.isupper()):  # of a code
        new = "".join(random.choice("abcdefghijklmnopqrstuvwxyz") for _ in old)
    else:
        new = "".join(random.choice(_SYLLABLES) for _ in range(6))[: max(2, len(old) + random.choice((-1, 0, 0, 1, 2)))]
    return new.upper() if old.isupper() else new.capitalize() if old[0].isupper() else new


def swapped(value: Any, swap: Callable[[str], str]) -> Any:
    """Return a value of a call whose texts and numbers are swapped as in a text."""
    if isinstance(value, list):
        return [swapped(each, swap) for each in value]
    if isinstance(value, Mapping):
        return {swap(key): swapped(each, swap) for key, each in value.items()}
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return value
    return type(value)(swap(str(value)))


def swapper(swaps: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that swaps whole values in a text, all at once."""
    if not swaps:
        return lambda text: text
    longest_first = sorted(swaps, key=len, reverse=True)
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(each)}(?!\w)" for each in longest_first))
    return lambda text: pattern.sub(lambda found: swaps[found[0]], text)


def reworded(text: str, is_name: Callable[[str], bool], random: Random) -> str:
    """Return the text with some words left out, made up or moved; names stay, and neighbours among them together."""
    noise, units, joined = random.random() * MOST_NOISE, list[str](), False
    for piece in text.split():
        stays = any(map(is_name, words_in(piece)))
        if stays and joined:
            units[-1] += f" {piece}"
        elif stays or random.random() >= noise:
            units.append(piece)
        elif random.random() < 0.5:
            units.append(alike(piece, {}, random))
        joined = stays and piece[-1].isalnum()
    if random.random() < MOVED and len(units) > 1:
        cuts = sorted(random.sample(range(1, len(units)), min(random.randint(1, 3), len(units) - 1)))
        parts = [units[start:end] for start, end in pairwise([0, *cuts, len(units)])]
        units = [unit for part in random.sample(parts, len(parts)) for unit in part]
    return " ".join(units)


class Names:
    """The words of openings that few of them have: R6814 and Ada, but not Customer."""

    def __init__(self, openings: Sequence[str]) -> None:
        counts = Counter(word for text in openings for word in set(words_in(text)))
        self._wording = {word for word, count in counts.items() if count > max(1, _rare(word) * len(openings))}
        self._stock: dict[str, list[str]] = {}
        for word in sorted(counts.keys() - self._wording):
            self._stock.setdefault(_kind(word), []).append(word)

    def is_name(self, word: str) -> bool:
        return word not in self._wording

    def renaming(self, texts: Iterable[str], random: Random) -> Callable[[str], str]:
        """Return a function that gives some names of these texts others of the same shape, so that a base copies them
        instead of learning them by heart."""
        swaps = {}
        for name in sorted({word for text in texts for word in words_in(text) if self.is_name(word)}):
            if random.random() < (0.8 if any(map(str.isdigit, name)) else 0.5):
                others = self._stock.get(_kind(name), ())
                drawn = len(others) > 1 and name.isalpha() and random.random() < 0.6
                swaps[name] = random.choice(others) if drawn else alike(name, {}, random)
        return swapper(swaps)


def _kind(word: str) -> str:
    return "code" if any(map(str.isdigit, word)) else "word" if word.islower() else "Name"


def _rare(word: str) -> float:
    return RARE_WORD if _kind(word) == "word" else RARE


def looks_like_name(word: str) -> bool:
    """Whether a word has a capital or a digit."""
    return word[0].isupper() or any(map(str.isdigit, word))


def shape(value: Any) -> str:
    """Return of what kind of characters a value consists.

    >>> shape("Ada Adams"), shape("B-17"), shape(85)
    ('Aa Aa', 'A-9', '9')
    """
    lower = re.sub(r"[^\W\d_A-Z]+", "a", re.sub(r"[A-Z]+", "A", str(value)))
    return re.sub(r"\d+", "9", lower)
