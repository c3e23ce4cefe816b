"""Hooks for schemathesis: what is no failure, though replies differ from what schemas promise.

A body as described may be refused for what no schema can say, and for a few combinations of fields
that this one leaves out.
"""

from __future__ import annotations

import re

import schemathesis
from schemathesis import Case, Response
from schemathesis.core.failures import Failure

TOO_LONG = 414  # of a target: a refusal, though schemathesis does not count it as one
ACCEPTED, REJECTED = "ST201", "ST202"  # a body not as described; one as described
# They look at what a prompt is made of, and at nothing else of a body.
COUNTING = ("POST /v1/messages/count_tokens", "POST /v1/responses/input_tokens")
UNSAID = (
    # It depends on the model and its nodes.
    r"token ids must be below the vocabulary's size",
    r"is not served as a reranker",
    r"^the served model is no classifier",
    r"^input_type must be one of ",  # the names of its prompts
    r"this model's vectors cannot be shortened",
    r"dimensions?: must be |a number of dimensions that eight divides",
    r"(truncate_prompt|max)_tokens: -1, or 1 to \d+$",
    r"^documents: the chat template reads none",
    r"the model's maximum context length",
    r"characters are more than the limit for counting, \d+ contexts",
    r"sequences of one request are more than the \d+ that a decode node runs at once",
    # It depends on the server's options.
    r"\(--trust-request-chat-template\)$",
    # It depends on what is stored.
    r"there is no response '",
    r"only a response in the background can be",
    r"^after: there is no such item",
    # One field is compared with another.
    r"min_tokens must not exceed max_tokens",
    r"tokens are more than max_tokens$",
    r"best_of (\(\d+\) must not be below n|: which samples are best)",
    r"one text, or as many as there are in",
    r"another tool is called",
    r"there is no tool '",
    r"must be .* of one of tools$",
    # A text has a syntax of its own, a name is reserved, or no grammar can be made of it.
    r"^chat_template_kwargs\b",
    r"is not valid JSON|must be a JSON (object|schema)",
    r"^(structured_outputs\.|guided_(json|regex|grammar|choice)\b|response_format|text\.format|output_)",
    # 7.0 is an integer to schemas.
    r"Expected `int( \| null)?`, got `float`|: a number of more than 64 bits$",
    r"token ids are integers from 0 on|^prompt\[0\] must be a string or a list of token ids",
    # Combinations.
    r"tools cannot be combined with a structural_tag",
    r"cannot be used together|exclude each other",
    r"^messages must have content$",
)


@schemathesis.hook
def filter_failure(
    context: schemathesis.HookContext, failure: Failure, case: Case, response: Response
) -> bool:
    """Whether this is a failure."""
    if failure.code == ACCEPTED:
        return case.operation.label not in COUNTING and response.status_code != TOO_LONG
    if failure.code != REJECTED or response.status_code != 400:
        return True
    message = response.json()["error"]["message"]
    return not any(re.search(pattern, message) for pattern in UNSAID)
