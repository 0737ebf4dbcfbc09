"""Fields of the OpenAI API that this server knows and does not honour.

A value that means the default is accepted, since clients send it unasked; any other is refused with the reason. The
same table tells the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError


@dataclass(frozen=True)
class Refused:
    """`accepted`: the values that change nothing; null is always one of them."""

    reason: str
    accepted: tuple[Any, ...] = ()

    def allows(self, value: Any) -> bool:
        return value is None or any(type(value) in _kinds(known) and value == known for known in self.accepted)

    def schema(self) -> dict[str, Any]:
        return {"enum": [*self.accepted, None], "description": f"Not honoured: {self.reason}"}


def _kinds(known: Any) -> tuple[type, ...]:
    """1, 1.0 and true are equal in Python, but a number is not a truth value."""
    return (int, float) if type(known) in (int, float) else (type(known),)


_PENALTY = "there is no order of tokens on a canvas that a penalty could follow"
_BIAS = Refused("logits cannot be biased", ({},))
SHARED = {
    "frequency_penalty": Refused(_PENALTY, (0,)),
    "presence_penalty": Refused(_PENALTY, (0,)),
    "logit_bias": _BIAS,
    "service_tier": Refused("there is one tier", ("auto", "default")),
    "store": Refused("nothing is stored", (False,)),
    "metadata": Refused("nothing is stored", ({},)),
    "prompt_cache_key": Refused("prefixes are found by their tokens"),
    "safety_identifier": Refused("use `user`, which is written to the log"),
}
CHAT = SHARED | {
    "audio": Refused("the model reads and writes text"),
    "modalities": Refused("the model reads and writes text", (["text"],)),
    "response_format": Refused("no grammar holds the output; ask for the format in the prompt", ({"type": "text"},)),
    "prediction": Refused("use /v1/canvas/edit to start from a text"),
    "parallel_tool_calls": Refused("the model decides how many calls it makes", (True,)),
    "functions": Refused("use `tools`", ([],)),
    "function_call": Refused("use `tool_choice`"),
    "web_search_options": Refused("this server does not search"),
    "verbosity": Refused("ask for it in the prompt", ("medium",)),
}
COMPLETION = SHARED | {
    "best_of": Refused("use `n`, or /v1/canvas/infill with `candidates`", (1,)),
    "echo": Refused("the prompt is known to the caller", (False,)),
}
MESSAGE = {
    "refusal": Refused("the model has no refusals of its own"),
    "annotations": Refused("the model reads text", ([],)),
    "audio": Refused("the model reads text"),
    "function_call": Refused("use `tool_calls`"),
}
FUNCTION = {"strict": Refused("no grammar holds the arguments to their schema", (False,))}
STREAM = {"include_obfuscation": Refused("chunks are not padded", (False,))}


def without(table: Mapping[str, Refused], given: Any) -> Any:
    """The object less its refused fields; a value that asks for something raises."""
    if not isinstance(given, dict):
        return given
    for name in table.keys() & given.keys():
        if not table[name].allows(given[name]):
            raise PydanticCustomError(
                "not_honoured", "{field} is not honoured: {reason}", {"field": name, "reason": table[name].reason}
            )
    return {name: value for name, value in given.items() if name not in table}


def schema_of(table: Mapping[str, Refused]) -> Callable[[dict[str, Any]], None]:
    """For `json_schema_extra`: the refused fields stand in the document with the values that are accepted."""

    def extend(schema: dict[str, Any]) -> None:
        schema["properties"] |= {name: refused.schema() for name, refused in table.items()}

    return extend
