"""Types with bounds for the fields of requests. msgspec checks bodies by these types, and makes
/openapi.json from them. The error messages for values out of bounds are in
router/api/openai/breaches.py.

There are two kinds of bounds. `Meta(ge=...)` and its like are checked when a body is parsed.
`_described` only adds to /openapi.json: whether such a value is allowed depends on another field,
on the server's options, or on the limits of 64 bits, and other code checks it.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta

from baton.guided.spec import BACKENDS, MAX_CHOICES
from baton.protocol.sampling import (
    BOUNDS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BIAS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_TOKEN_IDS,
)
from router.api.openai.prompt_options import MAX_BAD_WORD_CHARS
from router.config import MAX_LOGPROBS
from router.prompts.reader import MAX_TEMPLATE_CHARS
from router.request.request_ids import ID_PATTERN
from router.request.terms import MAX_SESSION_CHARS

MAX_NAME_CHARS: Final = 256  # of models, cache salts, tools, template parameters
MAX_BAD_WORDS: Final = 64
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024
PRIORITY_LIMIT: Final = 2**31 - 1
MAX_TOKEN_ID: Final = 2**31 - 1
BIASED_TOKEN: Final = "[0-9]{1,9}"


def _within(name: str) -> Meta:
    """Return the bounds of a numeric field of SamplingParams."""
    low, high = BOUNDS[name]
    return Meta(ge=low, le=high)


def _described(**schema: Any) -> Meta:
    return Meta(extra_json_schema=schema)


# ---- numbers ----

NumSamples = Annotated[int, _within("n")]
BestOf = Annotated[int, _within("best_of")]
Temperature = Annotated[float, _within("temperature")]
TopK = Annotated[int, _within("top_k")]
TopP = Annotated[float, Meta(gt=BOUNDS["top_p"][0], le=BOUNDS["top_p"][1])]
MinP = Annotated[float, _within("min_p")]
MinTokens = Annotated[int, _within("min_tokens")]
PresencePenalty = Annotated[float, _within("presence_penalty")]
FrequencyPenalty = Annotated[float, _within("frequency_penalty")]
RepetitionPenalty = Annotated[float, _within("repetition_penalty")]
LengthPenalty = Annotated[float, _within("length_penalty")]
Priority = Annotated[int, Meta(ge=-PRIORITY_LIMIT, le=PRIORITY_LIMIT)]
ThinkingBudget = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # -1 = no limit
AtLeastOne = Annotated[int, Meta(ge=1)]
Dimensions = Annotated[int, _described(minimum=1)]  # the model says which values are allowed
# Not checked here: 0 is allowed with an echo, and /v1/messages lowers a value that is too large.
MaxTokens = Annotated[
    int, _described(minimum=BOUNDS["max_tokens"][0], maximum=BOUNDS["max_tokens"][1])
]
MaxNewTokens = Annotated[int, _within("max_tokens")]
# The maximum is the default of --max-logprobs.
NumLogprobs = Annotated[int, _described(minimum=0, maximum=MAX_LOGPROBS)]
# All 64-bit integers, signed or unsigned. orjson reads no larger ones.
Seed = Annotated[int, _described(minimum=-(2**63), maximum=BOUNDS["seed"][1])]
# -1 = the model's context, which is also the maximum.
Truncation = Annotated[int, _described(**{"minimum": -1, "not": {"const": 0}})]

# ---- texts ----

Text = Annotated[str, Meta(min_length=1)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Session = Annotated[str, Meta(max_length=MAX_SESSION_CHARS)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
BadWord = Annotated[
    str,
    Meta(min_length=1),
    # At most MAX_BAD_WORD_CHARS after the white space at its beginning.
    _described(pattern=rf"^\s*\S[\s\S]{{0,{MAX_BAD_WORD_CHARS - 1}}}$"),
]
BadWords = Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)]
# The next types are checked by the code that uses the value.
RequestId = Annotated[str, _described(pattern=f"^{ID_PATTERN}$")]
GuidedBackend = Annotated[str, _described(enum=list(BACKENDS))]
Template = Annotated[
    str,
    _described(maxLength=MAX_TEMPLATE_CHARS, description="Only with --trust-request-chat-template"),
]
EarlyStopping = Annotated[bool | str, _described(enum=[True, False, "never"])]
NotEmpty = Annotated[str, _described(minLength=1)]
Choices = Annotated[list[NotEmpty], _described(minItems=1, maxItems=MAX_CHOICES)]

# ---- tokens ----

TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)]
AllowedTokenIds = Annotated[
    list[TokenId], Meta(min_length=1), Meta(max_length=MAX_ALLOWED_TOKEN_IDS)
]
LogprobTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_TOKEN_IDS)]
LogitBias = Annotated[
    dict[
        Annotated[str, _described(pattern=f"^{BIASED_TOKEN}$")],
        Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)],
    ],
    Meta(max_length=MAX_LOGIT_BIAS),
]
