"""What `oncegate run` is told: the answers to messages, made of what a handler returns or raises."""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from typing import Any, Dict, List

from oncegate._outcome import REASON_MAX_CHARS, DeadLetter, Later, Retry
from oncegate._streams import Streams

Answer = Dict[str, Any]


def completed(result: Any) -> Answer:
    """The answer to a message whose handler has returned this."""
    _refuse_awaitable(result)
    return {"outcome": "complete"} if result is None else {"outcome": "complete", "result": result}


def failed(error: BaseException) -> Answer:
    """The answer to a message whose handler has raised this. A traceback is printed unless it is an outcome."""
    if isinstance(error, DeadLetter):
        return {"outcome": "dead-letter", "reason": _sendable(error.reason)}
    if isinstance(error, (Retry, Later)):
        outcome = "retry" if isinstance(error, Retry) else "later"
        answer: Answer = {"outcome": outcome, "reason": _sendable(error.reason)}
        return answer if error.delay is None else {**answer, "delay_ms": round(error.delay * 1000)}
    # It is answered, too: until then the message counts as one of `max_in_flight`.
    if isinstance(error, asyncio.CancelledError):
        return {"outcome": "retry", "reason": "cancelled"}
    traceback.print_exception(type(error), error, error.__traceback__)
    return {"outcome": "retry", "reason": _sendable(f"{type(error).__name__}: {_text(error)}")}


def of_all(error: BaseException, messages: int) -> List[Answer]:
    """The answers to so many messages whose handler has raised this.

    A dead letter that is raised for several messages gives none of them up: at most one of them is meant.
    """
    answer = failed(error)
    if messages > 1 and answer["outcome"] == "dead-letter":
        answer["outcome"] = "retry"
        advice = "each is tried again; to give up one of them, put the exception into the list that is returned"
        print(f"DeadLetter was raised for a batch of {messages} messages, {advice}", file=sys.stderr)
    return [answer] * messages


def of_each(outcomes: Any, messages: int) -> List[Answer]:
    """The answers to so many messages of a batch whose handler has returned this.

    Raises ``TypeError`` or ``ValueError`` when it is not a list with an outcome for each: no answer can be told from it.
    """
    if outcomes is None:
        return [completed(None)] * messages
    _refuse_awaitable(outcomes)
    if not isinstance(outcomes, (list, tuple)):
        wanted = "a list with an outcome for each message, or None when each is completed"
        raise TypeError(f"the handler returned a value of type {type(outcomes).__name__}; it returns {wanted}")
    if len(outcomes) != messages:
        raise ValueError(f"the handler returned {len(outcomes)} outcomes for {messages} messages")
    return [_of_one(outcome) for outcome in outcomes]


def _of_one(outcome: Any) -> Answer:
    if isinstance(outcome, BaseException):
        return failed(outcome)
    try:
        return completed(outcome)
    except TypeError as error:
        return failed(error)


def _refuse_awaitable(result: Any) -> None:
    """An awaitable that nothing has awaited is no result: none of its body has run."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError("the handler returned an awaitable; define it with `async def`, and await what it calls")


def _sendable(reason: object) -> str:
    """The beginning of a reason, without the lone surrogates that no JSON in UTF-8 can have."""
    return _text(reason)[:REASON_MAX_CHARS].encode("utf-8", "replace").decode()


def _text(value: object) -> str:
    """The value as text. A message without an answer would stay in flight, so its own code may not prevent one."""
    try:
        return str(value)
    except Exception as error:
        return f"its text cannot be made: {type(error).__name__}"


def reply(streams: Streams, id: str, answer: Answer) -> None:
    """Writes the answer to a message; without its result, when that is no JSON or too long."""
    try:
        streams.write({"id": id, **answer})
    except BrokenPipeError:
        # oncegate has ended or has given this process up; it takes no answer any more.
        pass
    # RecursionError, too, and what the code of the result's own types raises.
    except Exception as error:
        if "result" not in answer:
            raise
        # The effect has happened, so the message must not run again because of its result.
        print(f"the result cannot be kept, the message is completed without it: {_text(error)}", file=sys.stderr)
        reply(streams, id, {"outcome": answer["outcome"]})
