"""Answers of the OpenAI completion APIs, whole and in pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from jspec.serve.protocol import Call
from jspec.serve.request import Piece, Result

# Why a request ended here, and what the API calls it.
FINISH = {"eos": "stop", "stop": "stop", "length": "length", "deadline": "length"}


def whole(call: Call, model: str, result: Result, name: Callable[[int], str]) -> dict:
    """The answer to a request that was not streamed."""
    log_prob = None
    if call.log_prob:
        log_prob = _log_probs(call, result.tokens, result.log_prob or [], name)
    choice: dict = {"index": 0, "finish_reason": FINISH[result.finish_reason]}
    if call.chat:
        choice["message"] = {
            "role": "assistant",
            "content": result.text,
            "refusal": None,
        }
    else:
        choice["text"] = result.text
    choice["logprobs"] = log_prob
    kind = "chat.completion" if call.chat else "text_completion"
    return _envelope(call, model, kind, [choice]) | {"usage": usage(result)}


def chunk(call: Call, model: str, piece: Piece, name: Callable[[int], str]) -> str:
    """One event of a stream."""
    reason = piece.finish_reason and FINISH[piece.finish_reason]
    log_prob = None
    if call.log_prob and piece.tokens:
        log_prob = _log_probs(call, piece.tokens, piece.log_prob or [], name)
    choice: dict = {"index": 0, "finish_reason": reason, "logprobs": log_prob}
    if call.chat:
        choice["delta"] = {"role": "assistant", "content": piece.text}
    else:
        choice["text"] = piece.text
    return event(_envelope(call, model, _streamed(call), [choice]))


def last_chunk(call: Call, model: str, result: Result) -> str:
    """The event with the usage, which has no choice."""
    return event(_envelope(call, model, _streamed(call), []) | {"usage": usage(result)})


def event(fields: dict) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(fields, ensure_ascii=False)}\n\n"


def error(message: str, kind: str, param: str | None = None) -> dict:
    """The body of an answer that is none."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def usage(result: Result) -> dict:
    """Token counts after every cut, and what drafting did."""
    counts = result.stats
    prompt, new = result.prompt_tokens, len(result.tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": result.shared},
        "completion_tokens_details": {
            "accepted_prediction_tokens": counts.accepted,
            "rejected_prediction_tokens": max(counts.proposed - counts.accepted, 0),
        },
        "speculation": {
            "rounds": counts.rounds,
            "drafted_rounds": counts.drafted_rounds,
            "proposed": counts.proposed,
            "accepted": counts.accepted,
            "tau": counts.tau,
        },
    }


def _streamed(call: Call) -> str:
    return "chat.completion.chunk" if call.chat else "text_completion"


def _envelope(call: Call, model: str, kind: str, choices: list) -> dict:
    return {
        "id": call.id,
        "object": kind,
        "created": call.created,
        "model": model,
        "choices": choices,
    }


def _log_probs(call: Call, tokens: Sequence[int], values: Sequence[float], name):
    names = [name(t) for t in tokens]
    if not call.chat:
        return {
            "tokens": names,
            "token_logprobs": list(values),
            "top_logprobs": None,
            "text_offset": None,
        }
    content = [
        {"token": n, "logprob": v, "bytes": list(n.encode()), "top_logprobs": []}
        for n, v in zip(names, values, strict=True)
    ]
    return {"content": content, "refusal": None}
