"""Bodies of the OpenAI completion APIs: what they may hold and what it means here.

A field that is not understood is refused, never ignored: a client that asks for tools or
for four answers should not get one plain answer.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

_MOST_STOPS = 16
# Fields of both APIs that go to the sampler: name there, name here.
_SAMPLING = {
    "top_p": "top_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
}
_COMMON = {
    *_SAMPLING,
    *("model", "temperature", "seed", "stop", "stream", "stream_options"),
    *("logit_bias", "user", "n", "max_tokens", "logprobs", "speculate", "timeout"),
}
_COMPLETION = _COMMON | {"prompt", "echo", "suffix", "best_of"}
_CHAT = _COMMON | {
    *("messages", "max_completion_tokens", "top_logprobs", "response_format"),
    *("tools", "tool_choice", "store", "metadata"),
}
# Values other than these would change the answer.
_ONLY: dict[str, tuple] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "top_logprobs": (None, 0),
}


class Refused(ValueError):
    """A request that cannot be served as it is; ``param`` is the field at fault."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


@dataclasses.dataclass(frozen=True)
class Call:
    """A body that was understood.

    Attributes:
      chat: which of the two APIs.  prompt: text or ids.
      options: for ``Engine.prepare``.
      log_prob, stream, usage_chunk: what the answer should hold.
      speculate, seconds: for ``Engine.submit``.
      id: of the answer.  created: seconds since 1970.
    """

    chat: bool
    prompt: str | list[int]
    options: dict[str, Any]
    log_prob: bool
    stream: bool
    usage_chunk: bool
    speculate: bool
    seconds: float | None
    id: str
    created: int


def completion(body: Mapping[str, Any], most_tokens: int) -> Call:
    """A body of ``/v1/completions``.

    Raises:
      Refused: a field is unknown, missing, of the wrong type, or asks for what is not
        there; numbers out of range are left to ``Engine.prepare``.
    """
    _known(body, _COMPLETION)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not _is_int(prompt[0]):
        prompt = prompt[0]  # a list of one prompt
    is_ids = isinstance(prompt, list) and all(map(_is_int, prompt))
    if not (isinstance(prompt, str) or is_ids):
        raise Refused("prompt must be one text or one list of token ids", "prompt")
    logprobs = body.get("logprobs")
    if logprobs not in (None, False, 0):
        raise Refused(
            f"logprobs = {logprobs!r}; log-probabilities of alternatives are not "
            "recorded, use 0 for those of the tokens",
            "logprobs",
        )
    wanted = logprobs is not None and logprobs is not False
    options = {"chat": False, "max_new_tokens": _budget(body, 16, most_tokens)}
    return _call(body, False, prompt, options, wanted)


def chat(body: Mapping[str, Any], most_tokens: int, template: Callable) -> Call:
    """A body of ``/v1/chat/completions``.

    Args:
      body: the JSON object.  most_tokens: limit of new tokens.
      template: from messages to token ids.

    Raises:
      Refused: as ``completion``.
    """
    _known(body, _CHAT)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list that is not empty", "messages")
    prompt = template([_message(m, i) for i, m in enumerate(messages)])
    logprobs = body.get("logprobs")
    if not (logprobs is None or isinstance(logprobs, bool)):
        raise Refused("logprobs must be true or false", "logprobs")
    options = {"max_new_tokens": _budget(body, most_tokens, most_tokens)}
    return _call(body, True, prompt, options, bool(logprobs))


def _call(body, is_chat: bool, prompt, options: dict, log_prob: bool) -> Call:
    for theirs, ours in _SAMPLING.items():
        if body.get(theirs) is not None:
            options[ours] = body[theirs]
    temperature, seed = body.get("temperature"), body.get("seed")
    options["temperature"] = 1.0 if temperature is None else temperature
    options["seed"] = secrets.randbits(63) if seed is None else seed
    options["stop"] = _stops(body.get("stop"))
    if body.get("logit_bias"):
        options["logit_bias"] = _bias(body["logit_bias"])
    stream_options = body.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise Refused("stream_options must be an object", "stream_options")
    return Call(
        chat=is_chat,
        prompt=prompt,
        options=options,
        log_prob=log_prob,
        stream=_flag(body, "stream", False),
        usage_chunk=bool(stream_options.get("include_usage")),
        speculate=_flag(body, "speculate", True),
        seconds=_seconds(body.get("timeout")),
        id=("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12),
        created=int(time.time()),
    )


def _known(body: Mapping[str, Any], fields: set[str]) -> None:
    for name, value in body.items():
        if name not in fields:
            raise Refused(f"unknown field {name!r}; known: {sorted(fields)}", name)
        if name in _ONLY and value not in _ONLY[name]:
            raise Refused(f"{name} = {value!r} is not supported; leave it out", name)


def _message(message: Any, place: int) -> dict:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("system", "user", "assistant", "developer"):
        raise Refused(
            f"message {place} has role {role!r}; use system, user or assistant",
            "messages",
        )
    content = message.get("content")
    if isinstance(content, list) and all(
        isinstance(p, dict) and p.get("type") == "text" for p in content
    ):
        content = "".join(str(p.get("text", "")) for p in content)
    if not isinstance(content, str):
        raise Refused(f"message {place} needs text as its content", "messages")
    return {"role": "system" if role == "developer" else role, "content": content}


def _budget(body: Mapping[str, Any], default: int, most: int) -> int:
    given = [
        body[n]
        for n in ("max_completion_tokens", "max_tokens")
        if body.get(n) is not None
    ]
    value = given[0] if given else min(default, most)
    if not _is_int(value) or not 1 <= value <= most:
        raise Refused(
            f"max_tokens is {value!r}; it must be an integer from 1 to {most}",
            "max_tokens",
        )
    return value


def _stops(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else (stop or [])
    fits = isinstance(stops, list) and all(isinstance(s, str) and s for s in stops)
    if not fits or len(stops) > _MOST_STOPS:
        raise Refused(
            f"stop must be a text or a list of up to {_MOST_STOPS} texts, none empty",
            "stop",
        )
    return stops


def _bias(given: Any) -> dict[int, float]:
    try:
        bias = {int(k): float(v) for k, v in given.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise Refused(
            "logit_bias must map token ids to numbers", "logit_bias"
        ) from error
    if not all(-100 <= v <= 100 for v in bias.values()):
        raise Refused("values of logit_bias must lie in [-100, 100]", "logit_bias")
    # The API's -100 means a ban.
    return {k: -math.inf if v == -100 else v for k, v in bias.items()}


def _flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if not (value is None or isinstance(value, bool)):
        raise Refused(f"{name} must be true or false", name)
    return default if value is None else value


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise Refused(f"timeout is {value!r}; give seconds above 0", "timeout")
    return float(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
