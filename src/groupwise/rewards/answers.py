"""Finding the answer in a text, in linear time."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from operator import itemgetter

from groupwise.rewards.final_message import final_message

LONGEST_ANSWER = 2_000
"""Characters.  A longer one is compared as text only: nothing that is still an answer is that long,
much that is hostile is.
"""
LONGEST_BARE = 100
"""Characters of a text without a marked answer that may itself be the answer."""
PROSE = 3
"""Words of an unmarked text; one that has more is prose, whatever numbers stand in it."""
QUOTES = "\"'“”„‟‘’‚‛«»‹›"
MINUS = str.maketrans(dict.fromkeys("−﹣－‒", "-"))
"""Characters that mean a minus sign."""
_DOUBLE = dict.fromkeys("“”„‟«»", '"')
_SINGLE = dict.fromkeys("‘’‚‛‹›", "'")
_QUOTES_ALIKE = str.maketrans(_DOUBLE | _SINGLE)

_LINE_ENDS = re.compile(r"\r\n?|[\v\f\x85\u2028\u2029]")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_DEPTH = {"{": 1, "}": -1}
_BARE = r"(?:[-+.(\d]|\\[dt]?frac|\\sqrt|\\pi|[A-Za-z](?![A-Za-z]))[^\s$]*"
_BOXES = re.compile(rf"\\(?:f?boxed|fbox)(?:\s*\{{|(?:\s+|(?=[-\d]))(?P<bare>{_BARE}))")
"""With braces, or as TeX has it without: `\\boxed 5`, up to the next space."""
_GAP = r"(?:[\s$]|\\q?quad|\\[,; ()\[\]])*"
_BETWEEN_BOXES = re.compile(
    rf"{_GAP}(?:[,;]|[,;]?\s*(?:and|or|\\text\s*\{{\s*,?\s*(?:and|or)\s*\}})){_GAP}", re.IGNORECASE
)
APART = 50
"""Characters between boxes of one set of answers."""
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_MENTION = re.compile(r"answers?|(?:correct|right|best) (?:option|choice|solution)", re.IGNORECASE)
MENTIONS = 100
"""Mentions of an answer that are looked at, from the end."""
_PHRASE = re.compile(
    rf"(?:{_MENTION.pattern})"
    r"[*_`\"']{0,3}(?:\s(?:to|for|of)\s[^\n.:=?]{1,80}?)?[*_`\"']{0,3}\s*"
    r"(?:(?:is|are|was|(?:would|must|should|will)"
    r" be|equals)\b(?!\s+(?:in)?correct\b)|[:=]|(?=\$|\\[(\[]))"
    r"[*_]{0,3}(?:\s+(?:then|thus|therefore|simply|just|clearly|indeed|now)\b,?)?\s*[:=]?\s*",
    re.IGNORECASE,
)
_HEADING = re.compile(
    r"^[ \t>#*_]*(?:the )?(?:final )?answer[ \t*_:#]*\n\s*", re.IGNORECASE | re.MULTILINE
)
_ASIDE = re.compile(
    r"\s*[,;(\u2013\u2014]\s*(?:not|because|since|as|which|so|where|when|rounded|i\.e\.|that"
    r" is|hence)\b|\s+(?:because|since)\b",
    re.IGNORECASE,
)
"""Where an answer ends and the words about it begin."""
_SENTENCE = re.compile(r"[.!?][*_]{0,3}\s+(?=\S)|<\||</s>")
_TAKEN_BACK = re.compile(r"(?:no|wait|actually|sorry)\b\s*[-,.:!\u2013\u2014]", re.IGNORECASE)
"""Begins the sentence that takes an answer back: No, 41."""
_FINISHED = re.compile(r"\n|[.!?][*_`]{0,3}\s")
_CLOSED = re.compile(r"([*_`])[.!?]+$")
_BOLD_SIDE = re.compile(r"(=\s*)\*\*([^*]+)\*\*(?=[.!?]*$)")
"""A side of an equation in bold: 17 + 25 = **42**."""
_DISPLAYS = {"\\[": "\\]", "$$": "$$", "```": "```"}
_SPAN = re.compile(r"\$\$?[^$]+\$\$?|\\\((?:[^\\]|\\(?!\)))+\\\)")
_VERB = re.compile(r"(?<=[\w$)}])\s+(?:is|are|was|equals)\s*:?\s+")
_SO = re.compile(
    r"^(?:(?:so|thus|then|hence|therefore|sure)\b[\s,:.!]*)+(?=[^\n=]*=)", re.IGNORECASE
)
"""Words before an equation: So 17 + 25 = 42."""
_BETWEEN_SPANS = re.compile(r"[\s,;]*(?:and|or)?[\s,;]*", re.IGNORECASE)
_WORD = re.compile(r"(?<!\\)\b[^\W\d_]{2,}")
_FENCE = re.compile(r"```\w*\n([^`]*)```")
_FIGURE = re.compile(r"\d")
_WORDS_OF_LATEX = re.compile(r"\\(?:text\w*|begin|end|mathrm|operatorname)\{[^{}]*\}")
_NO_PROSE = {"and", "or", "about", "approximately"}
_NO_PROSE |= {
    "sqrt",
    "pi",
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "log",
    "ln",
    "exp",
    "arcsin",
    "arccos",
    "arctan",
}
_COMPOUND = {"per", "square", "cubic", "sq", "cu"}
"""Words of a unit that has several."""
_NEGATION = re.compile(r"\b(?:not|no|never|neither)\b|n['’]t\b", re.IGNORECASE)

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_ANY_NUMBER = re.compile(
    rf"(?<![\d.])([-+]?)\s?\$?\s?((?:{_NUMBER})(?:[eE][-+]?\d{{1,3}}(?![\w.]))?)"
    r"(?:/(\d{1,12})(?![\d/.]))?"
)


def alike(text: str) -> str:
    """Return the same text for all ways to write line ends, quotes, accents and minus signs."""
    text = _LINE_ENDS.sub("\n", text).translate(_QUOTES_ALIKE).translate(MINUS)
    return unicodedata.normalize("NFC", text)


def boxes(text: str) -> Iterator[tuple[int, int, str, bool]]:
    r"""Yield start, end and content of every `\boxed{...}` in order, and whether it is closed.

    >>> [content for _, _, content, _ in boxes(r"\boxed{1}, then \boxed{\frac{1}{2}}")]
    ['1', '\\frac{1}{2}']
    """
    end = 0
    for match in _BOXES.finditer(text):
        if match.start() < end:
            continue  # a box inside a box
        if match["bare"]:
            content = match["bare"].rstrip(".,;:!?").removesuffix(r"\)").removesuffix(r"\]")
            end = match.start("bare") + len(content)
            yield match.start(), end, content, end < len(text)
            continue
        depth, end = 1, len(text)
        for brace in _BRACES.finditer(text, match.end()):
            depth += _DEPTH.get(brace.group(), 0)
            if depth == 0:
                end = brace.end()
                break
        closed = depth == 0
        content = text[match.end() : end]
        yield match.start(), end, content[:-1] if closed else content, closed


def find_answer(text: str, *, cut: bool = False) -> str | None:
    r"""Return the final answer that a completion gives, as text; None if it gives none.

    It is looked for in the final message.  A marked answer comes first: the last of `\boxed{}`
    (several in a row, joined by commas or "and", are one set of answers), `####` and `<answer>`;
    else what follows the last "answer is", "answer:" or heading "Answer"; else a last line that is
    all bold or code.  Without a mark the whole text is the answer if it is one line of at most 100
    characters and a handful of words.

    An answer that is said as a question, or that the next sentence takes back, is none.

    cut: the completion ended at the token limit.  Then only a marked answer is one.  A box or tag
        that is not closed is none.  Nor is what is said in the last sentence: "The answer is 4" may
        have gone on to 42.

    >>> find_answer(r"<think>maybe \boxed{3}</think> It is \boxed{4}.")
    '4'
    >>> find_answer("2 + 2 = 4\n#### 4"), find_answer("So the answer is $x = 4$.")
    ('4', '$x = 4$')
    >>> find_answer("**Answer: 42**"), find_answer("42, not 41."), find_answer("Let me see.\nHm.")
    ('42', '42', None)
    >>> find_answer("The answer is 42? No, 41.") is None
    True
    >>> find_answer("The answer is 4", cut=True), find_answer("The answer is 42. So", cut=True)
    (None, '42')
    """
    text = final_message(_LINE_ENDS.sub("\n", text))
    answer = marked(text, cut=cut)
    if answer is not None:
        return answer.rstrip(" .\t\r\n").strip() or None
    answer = statement(_finished(text) if cut else text)
    if answer is not None:
        return tidy(clause(answer)) or None
    text = text.strip()
    fence = _FENCE.fullmatch(text)
    if fence is not None:
        text = fence.group(1).strip()
    last = text.rsplit("\n", 1)[-1].strip()
    if len(last) > 2 and last.rstrip(".!")[-1:] == last[0] and last[0] in "*_`":
        return tidy(last) or None
    if cut or len(text) > LONGEST_BARE or "\n" in text:
        return None
    text = _SO.sub("", _without_aside(text))
    if _is_prose(text):
        return None
    return tidy(text) or None


def _finished(text: str) -> str:
    """A truncated text, up to the end of its last whole sentence or line."""
    end = 0
    for match in _FINISHED.finditer(text):
        end = match.end()
    return text[:end]


def _is_prose(text: str) -> bool:
    """Whether an unmarked text only mentions numbers: words before the first figure, or more of
    them behind it than a unit has.
    """
    text = _WORDS_OF_LATEX.sub("", text)
    words = [word for word in _WORD.finditer(text) if word.group().lower() not in _NO_PROSE]
    figure = _FIGURE.search(text)
    if figure is None or not words:
        return len(words) > PROSE
    unit = 3 if _COMPOUND & {word.group().lower() for word in words} else 1
    return words[0].start() < figure.start() or len(words) > unit


def find_gold(text: str) -> str | None:
    r"""Return the answer that a data row gives: what its last `####`, `\boxed{}` or `<answer>`
    holds, else all of it.

    >>> find_gold("He pays <<3*4=12>>12 dollars.\n#### 1,012"), find_gold(r" \frac{1}{2}")
    ('1,012', '\\frac{1}{2}')
    """
    text = _LINE_ENDS.sub("\n", text)
    answer = marked(text)
    if answer is None:
        answer = text
    return answer.strip() or None


def marked(text: str, *, cut: bool = False) -> str | None:
    """Return the answer that stands in a box, in an `<answer>` tag or behind `####`, whichever
    comes last; None if none is there.
    """
    boxed, tagged = _boxed(text, cut), _tagged(text, cut)
    hashed = _hashed(_finished(text) if cut else text)
    return max(boxed, hashed, tagged, key=itemgetter(0))[1]


def _boxed(text: str, cut: bool) -> tuple[int, str | None]:
    """Where the last box begins, and what it and the boxes joined to it hold; -1: nowhere."""
    usable = [box for box in boxes(text) if box[3] or not cut]
    if not usable:
        return -1, None
    begin, _, answer, _ = usable.pop()
    inner = next(boxes(answer), None)
    if inner is not None and answer.strip() == answer[inner[0] : inner[1]]:
        answer = inner[2]  # a box that holds nothing but a box
    joined_from = begin
    for start, end, content, _ in reversed(usable):
        if joined_from - end > APART or not _BETWEEN_BOXES.fullmatch(text, end, joined_from):
            break
        answer = f"{content}, {answer}"
        joined_from = start
    return begin, answer


def _hashed(text: str) -> tuple[int, str | None]:
    """Where the last `####` stands and the answer behind it; -1: nowhere.  As a heading of prose it
    has none.
    """
    place = text.rfind("####")
    line, _, below = text[max(place, 0) :].lstrip("#").strip().partition("\n")
    if place < 0 or (line[:1].isalpha() and below.strip() and statement(line + "\n") is None):
        return -1, None
    line = _first_line(text[place:].lstrip("#"))
    inner = statement(line)
    if inner is None:
        return place, line
    return place, inner


def _tagged(text: str, cut: bool) -> tuple[int, str | None]:
    """Where the last `<answer>` stands and what it says; -1: nowhere."""
    start, end, closed = -1, len(text), False
    for mark in _TAG.finditer(text):
        if not mark.group(1):
            start, end, closed = mark.end(), len(text), False
        elif start >= 0 and not closed:
            end, closed = mark.start(), True
    if start < 0 or (cut and not closed):
        return -1, None
    inner = statement(text[start:end].strip())
    if inner is None:
        return start, tidy(text[start:end])
    return start, tidy(clause(inner))


def statement(text: str) -> str | None:
    """Return what follows the last "answer is", "answer:" or heading "Answer" that something
    follows, up to the end of the line.

    None if it is a question, or if the next sentence takes it back.

    >>> statement("The answer is 41. The answer is 42."), statement("The answer is 42? No, 41.")
    ('42.', None)
    """
    ends = {heading.end() for heading in _HEADING.finditer(text)}
    mentions = list(_MENTION.finditer(text))
    for mention in mentions[-MENTIONS:]:
        phrase = _PHRASE.match(text, mention.start())
        if phrase is not None:
            ends.add(phrase.end())
    for end in sorted(ends, reverse=True):
        answer = _first_line(text[end:])
        if answer.strip(" .*_`"):
            return None if _is_taken_back(answer) else answer
    return None


def _is_taken_back(answer: str) -> bool:
    """Return True for a question, and where the next sentence says otherwise."""
    sentence = _SENTENCE.search(answer)
    end = len(answer) if sentence is None else sentence.end()
    asks = answer[:end].rstrip(" *_`").endswith("?")
    return asks or _TAKEN_BACK.match(answer, end) is not None


def _first_line(text: str) -> str:
    """The first line; of a formula or code that is displayed over several lines all of it."""
    text = text.strip()
    for opening, closing in _DISPLAYS.items():
        if text.startswith(opening):
            inside, mark, _ = text[len(opening) :].partition(closing)
            if mark:
                return inside.strip()
    return text.split("\n", 1)[0]


def clause(text: str) -> str:
    r"""Return the answer alone: without reasons and later sentences, and without words around
    formulas.

    >>> clause("42, not 41."), clause("the expression $2x + 1$.")
    ('42', '$2x + 1$')
    >>> clause("$3$ or $4$. I hope so"), clause("not $42$")
    ('$3$ or $4$', 'not $42$')
    """
    if len(text) > LONGEST_ANSWER:
        return text
    text = _without_aside(text)
    sentence = _SENTENCE.search(text)
    if sentence:
        text = text[: sentence.start()]
    verbs = list(_VERB.finditer(text))
    if verbs and not _NEGATION.match(text, verbs[-1].end()):
        text = text[verbs[-1].end() :]
    spans = list(_SPAN.finditer(text))
    before = text[: spans[0].start()] if spans else ""
    if not _WORD.search(before) or _NEGATION.search(before):
        return text
    end = spans[0].end()
    for span in spans[1:]:
        if not _BETWEEN_SPANS.fullmatch(text, end, span.start()):
            break
        end = span.end()
    return text[spans[0].start() : end]


def _without_aside(text: str) -> str:
    aside = _ASIDE.search(text)
    if aside and text[: aside.start()].strip():
        return text[: aside.start()]
    return text


def tidy(text: str) -> str:
    """Return a text without the marks of Markdown, quotes and the full stop around it.

    >>> tidy("**42**."), tidy("`42`"), tidy("“Paris”.")
    ('42', '42', 'Paris')
    """
    text = _BOLD_SIDE.sub(r"\1\2", text.strip())
    text = _CLOSED.sub(r"\1", text).lstrip("*_`").rstrip("*_` .\t\n")
    if text.endswith("}") and text.count("{") < text.count("}"):  # of {"answer": 42}
        text = text[:-1].rstrip()
    if len(text) > 1 and text[0] in QUOTES and text[-1] in QUOTES:
        text = text[1:-1].strip(" .")
    return text.strip()


def last_number(text: str) -> Decimal | Fraction | None:
    """Return the final number of a text: in its marked answer if it has one, else the last number
    written.

    >>> last_number("She has 3 bags.\\n#### 1,234"), last_number("that makes $12.50.")
    (Decimal('1234'), Decimal('12.50'))
    """
    answer = marked(text)
    if answer is None:
        answer = text
    numbers = _ANY_NUMBER.findall(answer.translate(MINUS))
    if not numbers:
        return None
    sign, digits, below = numbers[-1]
    number = Decimal(sign + digits.replace(",", ""))
    if not below:
        return number
    if not int(below) or number % int(below) == 0:
        return Decimal(below)  # 48/2 is two numbers
    return Fraction(number) / int(below)


def final_number(text: str, *, cut: bool = False) -> Decimal | Fraction | None:
    """`last_number` of the answer that a text gives, if that holds one, else of what follows its
    thinking.  cut: as in `find_answer`.

    >>> final_number("The answer is 42, not 41."), final_number("It is 6 * 7 = 42, I think.")
    (Decimal('42'), Decimal('42'))
    >>> final_number("42", cut=True) is None
    True
    """
    answer = find_answer(text, cut=cut)
    number = None
    if answer is not None:
        if _NEGATION.match(answer):
            return None
        number = last_number(answer)
    if number is None and not cut:
        return last_number(final_message(text))
    return number
