"""The wordings of a question: templates, the careful spelling and the careless ones."""

from __future__ import annotations

import random
import re

CHINESE_CHARACTER = re.compile(r"[\u4e00-\u9fff]")
CHINESE_QUESTION_MARK = "\uff1f"
CHINESE_MARKS = "\uff1f\uff01"  # question mark and exclamation mark

SINGULAR = (
    "whats {}", "why do we need {}", "what is the purpose of {}", "what is {} used for",
    "what is {}", "what's {}", "explain {}", "tell me about {}", "define {}", "what does {} mean",
    "how does {} work", "can you explain {}", "please explain {}", "describe {}", "{}",
    "what do you know about {}", "what is meant by {}", "give me a definition of {}",
    "I want to know what {} is", "tell me what {} is", "explain {} to me", "what is {} about",
)  # fmt: skip
PLURAL = (
    "what are {}", "explain {}", "tell me about {}", "define {}", "what does {} mean",
    "what do {} mean", "can you explain {}", "please explain {}", "describe {}", "{}",
    "what do you know about {}", "what is meant by {}", "what is {}",
    "give me a definition of {}", "I want to know what {} are", "tell me what {} are",
    "explain {} to me",
)  # fmt: skip
CHINESE = (
    "{}是怎么工作的", "{}怎么工作", "什么是{}呢",
    "什么是{}", "{}是什么", "解释一下{}", "介绍一下{}", "请解释{}", "{}是什么意思",
    "{}是怎样工作的", "请告诉我什么是{}", "{}", "讲讲{}", "什么叫{}", "{}的定义是什么",
    "为我解释{}",
)  # fmt: skip
UNSEEN_SINGULAR = (
    "could you tell me what {} is",
    "what exactly is {}",
    "give me a short explanation of {}",
)
UNSEEN_PLURAL = (
    "could you tell me what {} are",
    "what exactly are {}",
    "give me a short explanation of {}",
)
UNSEEN_CHINESE = ("能解释一下{}吗", "{}指的是什么")

ASKING = frozenset(
    (
        "what", "what's", "how", "why", "when", "which", "who", "where", "whose", "is", "are", "do",
        "whats",
        "does", "did", "can", "could", "should", "would", "am",
    )
)  # fmt: skip
TELLING = frozenset(
    (
        "explain", "tell", "define", "describe", "please", "give", "compare", "write", "recommend",
        "translate", "calculate", "list", "i", "introduce", "summarize",
    )
)  # fmt: skip
CHINESE_ASKING = ("什么", "吗", "怎", "哪", "谁", "如何", "几")
PREFIXES = (
    "can you tell me ",
    "do you know ",
    "could you explain ",
    "I wonder ",
    "hi, ",
    "hello, ",
    "hey, ",
    "ok, ",
    "and ",
    "so ",
    "now ",
    "please tell me: ",
    "question: ",
    "hello! ",
)
SUFFIXES = (
    " please",
    ", please",
    " in simple words",
    " briefly",
    " in short",
    " in LLM serving",
    " in a few sentences",
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Baton's demo model.",
    "You answer questions about LLM serving.",
    "Answer briefly and clearly.",
    "You are a helpful, honest and concise assistant. If you do not know the answer, say so.",
    "You are an expert for inference systems. Explain every term in a few sentences.",
    "You are a friendly tutor. The user is new to LLM serving and asks about its terms.",
)


def canonical(question: str) -> str:
    """Writes a question as a careful user would, with a capital letter and punctuation."""
    if CHINESE_CHARACTER.search(question):
        asks = (
            any(word in question for word in CHINESE_ASKING) and question[-1] not in CHINESE_MARKS
        )
        return question + CHINESE_QUESTION_MARK if asks else question
    first = question.split(" ", 1)[0].rstrip(",").lower()
    if question[-1] in "?!.," or (first not in ASKING and first not in TELLING):
        return question
    return question[0].upper() + question[1:] + ("?" if first in ASKING else ".")


def reworded(question: str, generator: random.Random) -> str:
    """Draws one way to type a question: letter case, punctuation and polite words vary."""
    if CHINESE_CHARACTER.search(question):
        ends = ("",) if question[-1] in CHINESE_MARKS else ("", "?", CHINESE_QUESTION_MARK)
        ending = generator.choice(ends)
        text = canonical(question) if generator.random() < 0.5 else question + ending
        return text.replace(" ", "") if generator.random() < 0.2 else text
    draw = generator.random()
    if draw < 0.45:
        return canonical(question)
    if draw < 0.55:
        question = generator.choice(PREFIXES) + question
    elif draw < 0.65 and question[-1] not in "?!.,":
        question += generator.choice(SUFFIXES)
    elif draw < 0.78:
        question = question.lower()
    elif draw < 0.80:
        return question.upper()
    if generator.random() < 0.5:
        question = question[0].upper() + question[1:]
    return (
        question + generator.choice(("", "?", "?", ".")) if question[-1] not in "?!." else question
    )
