"""The wordings of a question: templates, the careful spelling and the careless ones."""

from __future__ import annotations

import random
import re

CHINESE_CHARACTER = re.compile(r"[\u4e00-\u9fff]")
CHINESE_QUESTION_MARK = "\uff1f"
CHINESE_MARKS = "\uff1f\uff01"  # question mark and exclamation mark

EITHER = (
    "{}", "explain {}", "explain {} to me", "explain {} to me like I'm new", "explain {} briefly",
    "explain {} like I'm five", "explain {} in simple terms", "please explain {}",
    "can you explain {}", "could you explain {}", "can you explain {} to me", "{} explained",
    "describe {}", "please describe {}", "describe {} briefly", "can you describe {}",
    "tell me about {}", "can you tell me about {}", "please tell me about {}", "teach me about {}",
    "tell me something about {}", "what can you tell me about {}", "what do you know about {}",
    "define {}", "definition of {}", "{} definition", "give me a definition of {}",
    "what does {} mean", "meaning of {}", "{} meaning", "what is meant by {}", "what is {}",
    "give me a short explanation of {}", "give me an explanation of {}",
    "a short explanation of {}", "give a brief overview of {}", "help me understand {}",
    "I don't understand {}", "I want to understand {}",
    "I'd like to learn about {}", "I have a question about {}", "walk me through {}",
    "how would you define {}", "give me some background on {}", "the short version of {}",
    "give me a summary of {}", "an introduction to {}", "what is the main idea of {}",
    "what is so special about {}", "what is the story behind {}", "any thoughts on {}",
)  # fmt: skip
SINGULAR = (
    *EITHER, "what's {}", "whats {}", "what is {} exactly", "what exactly is {}",
    "what is {} about", "why do we need {}", "what is the purpose of {}",
    "what is {} used for", "how does {} work",
    "I want to know what {} is", "tell me what {} is", "do you know what {} is", "what is {} for",
    "what is the idea behind {}", "why is {} useful", "why is {} important", "what is {} good for",
    "how is {} defined", "please tell me what {} is",
)  # fmt: skip
PLURAL = (
    *EITHER, "what are {}", "what exactly are {}", "what are {} exactly", "what do {} mean",
    "I want to know what {} are", "tell me what {} are", "do you know what {} are",
    "what are {} for", "what are {} used for", "why are {} useful", "why are {} important",
)  # fmt: skip
DIFFERENCE = (
    "what is the difference between {} and {}", "what's the difference between {} and {}",
    "whats the difference between {} and {}", "difference between {} and {}",
    "the difference between {} and {}", "differences between {} and {}",
    "what are the differences between {} and {}", "explain the difference between {} and {}",
    "can you explain the difference between {} and {}", "tell me the difference between {} and {}",
    "how do {} and {} differ", "how are {} and {} different", "{} vs {}", "{} versus {}",
    "{} or {}", "compare {} and {}", "compare {} with {}", "comparison of {} and {}",
    "explain {} and {}", "is {} the same as {}",
)  # fmt: skip
CHINESE = (
    "{}是怎么工作的", "{}怎么工作", "什么是{}呢",
    "什么是{}", "{}是什么", "解释一下{}", "介绍一下{}", "请解释{}", "{}是什么意思",
    "{}是怎样工作的", "请告诉我什么是{}", "{}", "讲讲{}", "什么叫{}", "{}的定义是什么",
    "为我解释{}", "请介绍一下{}", "简单介绍一下{}", "能介绍一下{}吗", "到底什么是{}",
)  # fmt: skip
# Never trained with any topic:
UNSEEN_SINGULAR = (
    "could you tell me what {} is", "how would you explain {} to a beginner",
    "what should I know about {}", "please give me the basics of {}",
)  # fmt: skip
UNSEEN_PLURAL = (
    "could you tell me what {} are", "how would you explain {} to a beginner",
    "what should I know about {}", "please give me the basics of {}",
)  # fmt: skip
UNSEEN_DIFFERENCE = (
    "how does {} differ from {}", "what distinguishes {} from {}", "{} compared to {}",
)  # fmt: skip
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
    "quick question: ",
    "sorry, ",
    "for an interview: ",
    "my professor asked me: ",
    "as a student, ",
    "I read a blog post, ",
    "thanks, and ",
)
SUFFIXES = (
    " please",
    ", please",
    " in simple words",
    " briefly",
    " in short",
    " in LLM serving",
    " in a few sentences",
    " in one sentence",
    " in plain English",
    " step by step",
    " with an example",
    " as simply as possible",
    " to a colleague",
    " to my boss",
    " to a child",
    " for my homework",
    " for an exam",
    " for a presentation",
    " for someone who is not an engineer",
    " without any math",
    ", I am confused",
    " again",
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
    if draw < 0.38:
        return canonical(question)
    if draw < 0.46:
        question = generator.choice(PREFIXES) + question
    elif draw < 0.58 and question[-1] not in "?!.,":
        question += generator.choice(SUFFIXES)
    elif draw < 0.80:
        question = question.lower()
    elif draw < 0.82:
        return question.upper()
    elif draw < 0.86:
        question = " ".join(word[0].upper() + word[1:] for word in question.split(" "))
    if generator.random() < 0.5:
        question = question[0].upper() + question[1:]
    return (
        question + generator.choice(("", "?", "?", ".")) if question[-1] not in "?!." else question
    )
