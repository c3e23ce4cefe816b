"""From conversations to batches: the tokenizer, the chat format, token ids and labels."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_corpus.corpus import OFF_TOPIC, Conversation, ConversationSampler, Message, Topic
from demo_corpus.wording import canonical

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, START_OF_MESSAGE, END_OF_MESSAGE = range(3)
VOCAB_SIZE = 4096
HEAD_TOKENS = 12  # of an answer: enough to tell it from every other answer
TEXT_SHARE, TEXT_WEIGHT = 0.06, 0.5
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids, the label of each position (its NEXT token, or IGNORED), the loss weight."""

    token_ids: list[int]
    labels: list[int]
    weight: float


def train_tokenizer(topics: Sequence[Topic]) -> Tokenizer:
    """Trains byte-level BPE on answers and trained questions; special tokens get ids 0 to 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    questions: list[str] = []
    for topic in topics:
        # Words outside the glossary stay in pieces, so that unknown ones look like known ones.
        off_topic = topic.title.startswith(OFF_TOPIC)
        questions += topic.written if off_topic else topic.train
    texts = (
        [topic.answer for topic in topics] * 4
        + [canonical(q) for q in questions]
        + [q.lower() for q in questions]
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_message(tokenizer: Tokenizer, message: Message) -> tuple[list[int], list[int]]:
    """Token ids of one message as the chat template renders it: (role header, content and end)."""
    header = [START_OF_MESSAGE, *tokenizer.encode(f"{message.role}\n").ids]
    return header, [*tokenizer.encode(message.content).ids, END_OF_MESSAGE]


def encode_conversation(tokenizer: Tokenizer, conversation: Conversation) -> Sample:
    """Encodes a conversation with labels on the assistant's contents and end tokens."""
    newline = tokenizer.encode("\n").ids
    token_ids: list[int] = []
    is_target: list[bool] = []
    last = len(conversation.messages) - 1
    for index, message in enumerate(conversation.messages):
        header, content = encode_message(tokenizer, message)
        if index == last and conversation.head_only:
            content = content[:HEAD_TOKENS]
        token_ids += header + content
        is_target += [False] * len(header) + [message.role == "assistant"] * len(content)
        if index != last:
            token_ids += newline
            is_target += [False] * len(newline)
    labels = [
        token if target else IGNORED for token, target in zip(token_ids, is_target, strict=True)
    ]
    return Sample(token_ids[:-1], labels[1:], weight=1.0)


def batches(
    tokenizer: Tokenizer, topics: Sequence[Topic], batch_tokens: int, seed: int
) -> Iterator[list[Sample]]:
    """Endless random batches of samples of similar length, `batch_tokens` padded tokens each."""
    generator = random.Random(seed)
    sampler = ConversationSampler(topics, generator)
    while True:
        pool: list[Sample] = []
        for _ in range(1500):
            if generator.random() < TEXT_SHARE:
                token_ids = [*tokenizer.encode(sampler.draw_text()).ids, END_OF_TEXT]
                pool.append(Sample(token_ids[:-1], token_ids[1:], weight=TEXT_WEIGHT))
            else:
                pool.append(encode_conversation(tokenizer, sampler.draw()))
        yield from _grouped(pool, batch_tokens, generator)


def answer_batches(
    tokenizer: Tokenizer, topics: Sequence[Topic], batch_tokens: int, seed: int
) -> Iterator[list[Sample]]:
    """Endless random batches as those of `batches`: each answer once a round, whole, behind one of
    its questions."""
    generator = random.Random(seed)
    while True:
        pool: list[Sample] = []
        for topic in topics:
            question = generator.choice((*topic.train, *topic.bare, *topic.written))
            messages = (Message("user", question), Message("assistant", topic.answer))
            pool.append(encode_conversation(tokenizer, Conversation(messages, head_only=False)))
        yield from _grouped(pool, batch_tokens, generator)


def _grouped(
    pool: list[Sample], batch_tokens: int, generator: random.Random
) -> Iterator[list[Sample]]:
    """Return the samples of `pool` in random batches of similar length. Sorts `pool`."""
    pool.sort(key=lambda sample: len(sample.token_ids))
    grouped: list[list[Sample]] = [[]]
    for sample in pool:
        if (len(grouped[-1]) + 1) * len(sample.token_ids) > batch_tokens:
            grouped.append([])
        grouped[-1].append(sample)
    generator.shuffle(grouped)
    return (batch for batch in grouped if batch)


def padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    """Rows padded on the right, int64 [rows, longest]; causal attention never sees the padding."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])
