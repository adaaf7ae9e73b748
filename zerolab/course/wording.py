"""Put a diagnosis into sentences: capital letters, numbers of things, one colon at most, no words cut off.

A check composes its diagnosis of clauses: where it was seen, the mistake, the evidence. Here they become the
sentences that the reader reads.
"""

import re

# Names of the exercises' own arguments that are plain words: they keep their small letter.
_NAMES = {"f", "g", "psi", "flat", "numel", "own", "tensor"}
# What is no prose, from the outside to the inside. A colon in it separates no clauses.
_NO_PROSE = (
    r"\b\w+(?:Error|Exception|Interrupt|Exit): .*?(?= \(line |$)",  # what Python says of an exception
    r"stopped with \w+: .*?(?= \(line |$)",
    r"`[^`]*`",
    r"(?<!\w)'[^']*'(?!\w)",
    r"[(\[{][^()\[\]{}]*[)\]}]",
)
_MARK = re.compile("\0(\\d+)\0")


def capitalized(text: str) -> str:
    """Return a sentence with a capital letter, unless it begins with a name from the reader's code."""
    word = text.split(maxsplit=1)[0].rstrip(",:").removesuffix("'s") if text.strip() else ""
    is_name = word in _NAMES or not word.replace("-", "").isalpha()
    return text if is_name else f"{text[0].upper()}{text[1:]}"


def sentences(diagnosis: str) -> str:
    """Return a diagnosis as sentences, each with one colon at most, and each possible mistake in its own.

    A line that is indented is a row of a table, and stays as it is.
    """
    return "\n".join(line if line.startswith("  ") else _sentences(line) for line in diagnosis.split("\n"))


def _sentences(line: str) -> str:
    hidden: list[str] = []

    def hide(found: re.Match) -> str:
        hidden.append(found[0])
        return f"\0{len(hidden) - 1}\0"

    text = line
    for pattern in _NO_PROSE:
        while re.search(pattern, text):
            text = re.sub(pattern, hide, text)
    text = re.sub("[,;] or else ", ". or else ", text).replace("; ", ". ")
    said = [_one_colon(sentence) for sentence in re.split(r"(?<=[.?!]) ", text)]
    whole = " ".join(map(capitalized, re.split(r"(?<=[.?!]) ", " ".join(said))))
    while _MARK.search(whole):
        whole = _MARK.sub(lambda found: hidden[int(found[1])], whole)
    return whole


def ended(text: str) -> str:
    """Return the text with a full stop, if it has no mark at its end."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _one_colon(sentence: str) -> str:
    first, *rest = sentence.split(": ")
    return f"{first}: {'. '.join(rest)}" if rest else first


def count(number: int, thing: str) -> str:
    """Return the number of things in words: ``1 element``, ``2 elements``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def shortened(text: str, most: int = 60) -> str:
    """Return the text, cut after a whole word if it has more than `most` characters; brackets are closed."""
    if len(text) <= most:
        return text
    closing = {"{": "}", "[": "]", "(": ")"}.get(text[0], "")
    whole_words = text[: most - 1].rpartition(" ")[0] or text[: most - 1]
    return f"{whole_words.rstrip(',;: ')} …{closing}"
