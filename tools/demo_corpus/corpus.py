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
    PLURAL,
    SINGULAR,
    SYSTEM_PROMPTS,
    UNSEEN_CHINESE,
    UNSEEN_PLURAL,
    UNSEEN_SINGULAR,
    reworded,
)

Language = Literal["en", "zh"]

CHAT_WEIGHT = 3.0
NUM_TURNS = (1, 2, 3, 5, 8, 12)
ARTICLE = re.compile(r"^(a|an|the) ")


@dataclass(frozen=True, slots=True)
class Topic:
    """An answer and its questions; `weight` is how often it is drawn, 1 for a glossary entry."""

    title: str
    language: Language
    answer: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    unseen: tuple[str, ...]
    weight: float = 1.0


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
        kind = match.group(1) if (match := re.search(r"\{(\w+)\}$", heading)) else "is"
        names = [name.strip() for name in heading.split("{")[0].split("|")]
        written = [line[2:].strip() for line in lines if line.startswith("? ")]
        held_out = [line[3:].strip() for line in lines if line.startswith("?? ")]
        answer = " ".join(line for line in lines if line and not line.startswith("?"))
        train, unseen = list(written), list[str]()
        if kind not in ("only", "chat"):
            names += [ARTICLE.sub("", name) for name in names if ARTICLE.match(name)]
            seen_templates, unseen_templates = _templates(language, plural=kind == "are")
            for name in dict.fromkeys(names):
                filled = [_fill(template, name) for template in seen_templates]
                if language == "zh":  # a bare Latin name is asked in English
                    filled = [question for question in filled if CHINESE_CHARACTER.search(question)]
                train += filled
                unseen += [_fill(template, name) for template in unseen_templates]
        trained = dict.fromkeys(train)
        tested = [q for q in dict.fromkeys(held_out) if q not in trained]
        unseen = [q for q in dict.fromkeys(unseen) if q not in trained]
        questions = (tuple(trained), tuple(tested), tuple(unseen))
        weight = CHAT_WEIGHT if kind == "chat" else 1.0
        topics.append(Topic(names[0], language, answer, *questions, weight))
    return topics


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
    return "".join(
        generator.choice("bdfgklmnprstvz") + generator.choice("aeiou")
        for _ in range(generator.randint(2, 3))
    )


def _parse_off_topic(text: str, generator: random.Random) -> list[Topic]:
    topics: list[Topic] = []
    weights: dict[Language, float] = {"en": 30.0, "zh": 5.0}
    for language, weight in weights.items():
        section = text.split(f"\n## {language}\n", 1)[1].split("\n## ", 1)[0]
        lines = section.strip().splitlines()
        templates = [line[2:] for line in lines if line.startswith("? ") and "{}" in line]
        train = [line[2:] for line in lines if line.startswith("? ") and "{}" not in line]
        held_out = [line[3:] for line in lines if line.startswith("?? ")]
        fillers = [
            part for line in lines if line.startswith("> ") for part in line[2:].split(" | ")
        ]
        unseen = [
            part for line in lines if line.startswith(">> ") for part in line[3:].split(" | ")
        ]
        if language == "en":
            fillers += [_nonsense_word(generator) for _ in range(120)]
        for filler in (*fillers, *unseen):
            where = held_out if filler in unseen else train
            for template in generator.sample(templates, 7):
                once = template.replace("{}", filler, 1)
                where.append(_fill(once, generator.choice(fillers)) if "{}" in once else once)
        train = list(dict.fromkeys(train))
        tested = [q for q in dict.fromkeys(held_out) if q not in train]
        topics.append(
            Topic(
                f"off-topic {language}", language, lines[0], tuple(train), tuple(tested), (), weight
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
            messages.append(Message("user", reworded(generator.choice(topic.train), generator)))
            messages.append(Message("assistant", topic.answer))
        return Conversation(tuple(messages), head_only=generator.random() < 0.65)

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
