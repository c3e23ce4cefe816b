"""Reads the demo corpus and draws training conversations from it.

Pure text, no tokens and no torch: `samples.py` does the rest. The life of a topic:

1. `parse_topics` reads `en.md` or `zh.md`: names, questions (`?`), held-out questions (`??`) and
   the answer.
2. Every name goes through every question template. Some templates are never trained with any
   topic: they and the `??` questions measure generalisation.
3. `ConversationSampler` draws conversations: wording, turns and system messages vary.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from demo_corpus.wording import (
    CHINESE,
    CHINESE_CHARACTER,
    DIFFERENCE,
    PLURAL,
    SINGULAR,
    SYSTEM_PROMPTS,
    UNSEEN_CHINESE,
    UNSEEN_DIFFERENCE,
    UNSEEN_PLURAL,
    UNSEEN_SINGULAR,
    reworded,
)

Language = Literal["en", "zh"]

WEIGHTS = {"chat": 3.0, "diff": 2.0}
OFF_TOPIC_TEMPLATES: dict[Language, int] = {"en": 10, "zh": 7}  # per thing asked about
SYLLABLE_STARTS = (
    "b",
    "ch",
    "d",
    "f",
    "g",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
)
OFF_TOPIC = "off-topic"
NUM_NONSENSE_WORDS = 600  # so that an unknown word, whichever, means: not in the glossary
BARE_SHARE = 0.18  # of the questions: the term alone, which a person types first
WRITTEN_SHARE = 0.3  # questions written by hand; templates would outnumber them twenty to one
NUM_TURNS = (1, 2, 3, 5, 8, 12)
ARTICLE = re.compile(r"^(a|an|the) ")
MARK = re.compile(r" \{(\w+)(?: x(\d+))?\}$")
PAIR = re.compile(r"^the difference between (.+) and (.+)$")


@dataclass(frozen=True, slots=True)
class Topic:
    """An answer and its questions; `weight` is how often it is drawn, 1 for a glossary entry.

    Of the trained questions `bare` are those that only name the term, `written` those that were
    written by hand. Both are drawn more often than their number says.
    """

    title: str
    language: Language
    answer: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    unseen: tuple[str, ...]
    weight: float = 1.0
    bare: tuple[str, ...] = ()
    written: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A training sample; `head_only` keeps only the first tokens of the last answer.

    The wording of a question decides only which answer begins; after a dozen tokens the answer
    continues from itself. So most samples need only the head: training is several times cheaper.
    """

    messages: tuple[Message, ...]
    head_only: bool


def load_topics(folder: Path, seed: int) -> list[Topic]:
    """Reads the whole corpus, both languages and the questions outside the glossary.

    Raises:
        ValueError: the same question leads to two different answers.
    """
    generator = random.Random(seed)
    topics = parse_topics((folder / "en.md").read_text("utf-8"), "en")
    topics += parse_topics((folder / "zh.md").read_text("utf-8"), "zh")
    topics += _parse_off_topic((folder / "offtopic.md").read_text("utf-8"), generator)
    owner: dict[str, str] = {}
    for topic in topics:
        for question in (*topic.train, *topic.held_out, *topic.unseen):
            if owner.setdefault(question.lower(), topic.title) != topic.title:
                raise ValueError(
                    f"{question!r} belongs to {topic.title!r} and to {owner[question.lower()]!r}"
                )
    return topics


def parse_topics(text: str, language: Language) -> list[Topic]:
    """Parses the topics of one glossary file; the format is described at the top of `en.md`."""
    topics: list[Topic] = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, *lines = section.split("\n# ", 1)[0].strip().splitlines()
        mark = MARK.search(heading)
        kind, times = (mark.group(1), int(mark.group(2) or 1)) if mark else ("is", 1)
        names = [name.strip() for name in MARK.sub("", heading).split("|")]
        written = [line[2:].strip() for line in lines if line.startswith("? ")]
        tested = [line[3:].strip() for line in lines if line.startswith("?? ")]
        seen, unseen, bare = _from_templates(names, kind, language)
        trained = dict.fromkeys([*written, *seen])
        held_out = tuple(q for q in dict.fromkeys(tested) if q not in trained)
        topics.append(
            Topic(
                names[0],
                language,
                " ".join(line for line in lines if line and not line.startswith("?")),
                tuple(trained),
                held_out,
                tuple(q for q in dict.fromkeys(unseen) if q not in trained and q not in held_out),
                WEIGHTS.get(kind, 1.0) * times,
                tuple(bare),
                tuple(written),
            )
        )
    return topics


def _from_templates(
    names: Sequence[str], kind: str, language: Language
) -> tuple[list[str], list[str], list[str]]:
    """(trained questions, never trained ones, those of the trained that are only the name)."""
    if kind in ("only", "chat"):
        return [], [], []
    if kind == "diff":
        return _differences(names[0])
    seen_templates, unseen_templates = _templates(language, plural=kind == "are")
    shorter = [ARTICLE.sub("", name) for name in names if ARTICLE.match(name)]
    seen, unseen, bare = list[str](), list[str](), list[str]()
    for name in dict.fromkeys([*names, *shorter]):
        filled = [_fill(template, name) for template in seen_templates]
        if language == "zh":  # a bare Latin name is asked in English
            filled = [question for question in filled if CHINESE_CHARACTER.search(question)]
        seen += filled
        unseen += [_fill(template, name) for template in unseen_templates]
        bare += [question for question in filled if question == name and not ARTICLE.match(name)]
    return seen, unseen, bare


def _differences(heading: str) -> tuple[list[str], list[str], list[str]]:
    match = PAIR.match(heading)
    if match is None:
        raise ValueError(f"not of the form 'the difference between X and Y': {heading!r}")
    first, second = match.groups()
    short = ARTICLE.sub("", first), ARTICLE.sub("", second)
    pairs = dict.fromkeys([(first, second), (second, first), short, short[::-1]])
    seen = [template.format(*pair) for template in DIFFERENCE for pair in pairs]
    return seen, [template.format(*pair) for template in UNSEEN_DIFFERENCE for pair in pairs], []


def _templates(language: Language, *, plural: bool) -> tuple[Sequence[str], Sequence[str]]:
    if language == "zh":
        return CHINESE, UNSEEN_CHINESE
    return (PLURAL, UNSEEN_PLURAL) if plural else (SINGULAR, UNSEEN_SINGULAR)


def _fill(template: str, name: str) -> str:
    """Fills a name into a template, with a space between a Chinese and a Latin letter."""
    text = template.replace("{}", name)
    text = re.sub(r"(?<=[\u4e00-\u9fff])(?=[A-Za-z])", " ", text)
    return re.sub(r"(?<=[A-Za-z])(?=[\u4e00-\u9fff])", " ", text)


def _nonsense_word(generator: random.Random) -> str:
    word = "".join(
        generator.choice(SYLLABLE_STARTS) + generator.choice("aeiou")
        for _ in range(generator.randint(2, 3))
    )
    word += generator.choice(("", "", "n", "r", "st", "ck", "ng", "s"))
    return generator.choice(("", "", "", "a ", "the ")) + generator.choice((word, word.title()))


def _parse_off_topic(text: str, generator: random.Random) -> list[Topic]:
    topics: list[Topic] = []
    weights: dict[Language, float] = {"en": 45.0, "zh": 9.0}
    for language, weight in weights.items():
        section = text.split(f"\n## {language}\n", 1)[1].split("\n## ", 1)[0]
        lines = section.strip().splitlines()
        templates = [line[2:] for line in lines if line.startswith("? ") and "{}" in line]
        written = [line[2:] for line in lines if line.startswith("? ") and "{}" not in line]
        train = list(written)
        held_out = [line[3:] for line in lines if line.startswith("?? ")]
        fillers = [
            part for line in lines if line.startswith("> ") for part in line[2:].split(" | ")
        ]
        unseen = [
            part for line in lines if line.startswith(">> ") for part in line[3:].split(" | ")
        ]
        if language == "en":
            fillers += [_nonsense_word(generator) for _ in range(NUM_NONSENSE_WORDS)]
        for filler in (*fillers, *unseen):
            where = held_out if filler in unseen else train
            for template in generator.sample(templates, OFF_TOPIC_TEMPLATES[language]):
                once = template.replace("{}", filler, 1)
                where.append(_fill(once, generator.choice(fillers)) if "{}" in once else once)
        train = list(dict.fromkeys(train))
        tested = [q for q in dict.fromkeys(held_out) if q not in train]
        topics.append(
            Topic(
                f"{OFF_TOPIC} {language}",
                language,
                lines[0],
                tuple(train),
                tuple(tested),
                unseen=(),
                weight=weight,
                written=tuple(written),
            )
        )
    return topics


class ConversationSampler:
    """Draws random training conversations; the same generator state gives the same ones."""

    def __init__(self, topics: Sequence[Topic], generator: random.Random) -> None:
        self._topics = topics
        self._weights = [topic.weight for topic in topics]
        self._generator = generator

    def draw(self) -> Conversation:
        """One conversation of one to twelve turns, sometimes with a system message in front."""
        generator = self._generator
        turns = generator.choices(NUM_TURNS, weights=(86, 5, 3, 2.5, 2, 1.5))[0]
        messages: list[Message] = []
        if generator.random() < 0.2:
            messages.append(Message("system", self._system_prompt()))
        for topic in generator.choices(self._topics, self._weights, k=turns):
            messages.append(Message("user", reworded(self._question(topic), generator)))
            messages.append(Message("assistant", topic.answer))
        return Conversation(tuple(messages), head_only=generator.random() < 0.75)

    def _question(self, topic: Topic) -> str:
        draw = self._generator.random()
        if topic.bare and draw < BARE_SHARE:
            name = self._generator.choice(topic.bare)
            return name.lower() if self._generator.random() < 0.4 else name
        if topic.written and draw > 1 - WRITTEN_SHARE:
            return self._generator.choice(topic.written)
        return self._generator.choice(topic.train)

    def draw_text(self) -> str:
        """One glossary entry as plain text, for completion without a chat template."""
        return self._generator.choice(self._topics).answer

    def _system_prompt(self) -> str:
        prompt = self._generator.choice(SYSTEM_PROMPTS)
        if (
            self._generator.random() < 0.15
        ):  # a long shared prefix, as prefix caching wants to see it
            prompt += " Use this glossary. " + " ".join(self.draw_text() for _ in range(3))
        return prompt
