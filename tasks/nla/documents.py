"""Documents made on the spot, for activations without a corpus."""

from __future__ import annotations

import dataclasses
import hashlib
import re

import numpy as np

from data import UserError, rng_of

# ------------------------------------------------------------------------------------------------ generated documents
WORDS = {
    "name": "Anna Ben Clara David Emma Felix Greta Henry Ida Jonas".split(),
    "number": "two three four five six seven eight nine".split(),
    "colour": "red blue green yellow black white brown pink".split(),
    "item": "lamps chairs books cups coats boats clocks drums kites ropes".split(),
    "place": "Paris Rome Oslo Cairo Lima Delhi Tokyo Boston".split(),
}
KIND = {word: kind for kind, words in WORDS.items() for word in words}
# The first part names every slot; the second repeats some, so that a state in it must know them to say what follows.
TEMPLATES = (
    ("bought", "{name} bought {number} {colour} {item} in {place}.",
     " Now the {colour} {item} from {place} belong to {name}."),
    ("lost", "In {place} {name} lost {number} {colour} {item}.",
     " The {number} {item} from {place} were {colour}, said {name}."),
    ("sent", "{name} took {number} {colour} {item} from {place}",
     " and sent the {colour} {item} back to {place} with {number} letters from {name}."),
    ("painted", "{number} {item} in {place} were painted {colour} by {name}.",
     " In {place} people like {name} and the {number} {colour} {item}."),
)


@dataclasses.dataclass(frozen=True)
class Document:
    """A text. Of a generated one also a caption, its slots (kind -> word), and `cuts`: the ends (in characters) of the
    words of its last part, where a position may be drawn, each with the kind of what follows."""

    text: str
    caption: str | None = None
    slots: dict[str, str] = dataclasses.field(default_factory=dict)
    cuts: dict[int, str] = dataclasses.field(default_factory=dict)

    @property
    def doc_id(self) -> str:
        """By content: the same text is the same document."""
        return hashlib.blake2b(self.text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()

    def caption_at(self, end: int) -> str | None:
        """The caption of the state after `text[:end]`, one of `cuts`: the last word, what follows, what was said."""
        if self.caption is None:
            return None
        last = re.findall("[A-Za-z]+", self.text[:end])[-1]
        return f"after {last}: {self.cuts[end]}; {self.caption}"


def documents(n: int, seed: int) -> list[Document]:
    """`n` different documents of one or two sentences: who did what with which things, and where."""
    found: dict[str, Document] = {}
    for i in range(20 * n):
        if len(found) == n:
            break
        document = draw_document(rng_of(seed, "document", i))
        found.setdefault(document.text, document)
    if len(found) < n:
        raise UserError(f"the generator has no {n} different documents; ask for fewer")
    return list(found.values())


def draw_document(rng: np.random.Generator) -> Document:
    """A template with every slot filled, its caption and its cuts."""
    verb, first, last = TEMPLATES[int(rng.integers(len(TEMPLATES)))]
    slots = {kind: words[int(rng.integers(len(words)))] for kind, words in WORDS.items()}
    start = len(first.format(**slots))
    text = (first + last).format(**slots)
    text = text[0].upper() + text[1:]
    cuts = {}
    for match in re.finditer(r"[A-Za-z]+", text):
        end = match.end()
        if end > start:
            word = re.match(r"[ ,]*([A-Za-z]*)", text[end:])[1]
            cuts[end] = KIND.get(word, word or "end")
    caption = "{name} {verb} {number} {colour} {item}, {place}".format(verb=verb, **slots)
    return Document(text, caption, slots, cuts)


def randomise_slots(text: str, seed: int, share: float = 1.0) -> str:
    """The text with content words of the generator (names, items, colours, places, numbers) each replaced by another
    one of its kind: every one, or each with probability `share`. The same word gets the same replacement throughout."""
    rng = rng_of(seed, "slots", text)
    swaps: dict[str, str] = {}

    def swap(match: re.Match) -> str:
        lower = match[0].lower()
        word = lower if lower in KIND else match[0]
        if word not in swaps:
            others = [other for other in WORDS[KIND[word]] if other != word]
            replaced = rng.random() < share
            swaps[word] = others[int(rng.integers(len(others)))] if replaced else word
        return swaps[word] if match[0] == word else swaps[word].capitalize()

    numbers = "|".join(word.capitalize() for word in WORDS["number"])  # a sentence may begin with one
    return re.sub(rf"\b(?:{'|'.join(KIND)}|{numbers})\b", swap, text)
