"""Runs a function for each message, and answers with its outcome."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Awaitable, Callable, Dict, Mapping, Optional, Set, Tuple, Union, overload

from oncegate._message import Message, parse
from oncegate._outcome import REASON_MAX_CHARS, DeadLetter, Retry
from oncegate._streams import Streams

Handler = Union[Callable[[Message], Any], Callable[[Message], Awaitable[Any]]]
Answer = Dict[str, Any]

#: The version of the protocol, see `docs/RUN.md` of oncegate.
PROTOCOL = 1
#: How many messages a coroutine function handles at a time, unless told otherwise.
ASYNC_IN_FLIGHT = 16


class Worker:
    """A handler with the loop around it. Calling it calls the handler, for tests."""

    def __init__(self, handler: Handler, *, max_in_flight: Optional[int] = None) -> None:
        self.is_async = inspect.iscoroutinefunction(handler)
        if max_in_flight is None:
            max_in_flight = ASYNC_IN_FLIGHT if self.is_async else 1
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; it is 1 or more")
        self.handler = handler
        self.max_in_flight = max_in_flight
        functools.update_wrapper(self, handler)

    def __call__(self, message: Message) -> Any:
        return self.handler(message)

    def run(self) -> None:
        """Handles messages until standard input ends and every message is answered."""
        if sys.stdin is not None and sys.stdin.isatty():
            sys.exit(
                "This is a worker of oncegate, which starts it: "
                f"oncegate run --handler-exec '{sys.executable} {sys.argv[0]}' …"
            )
        streams = Streams.take_over()
        if self.is_async:
            asyncio.run(_AsyncLoop(self.handler, streams).run(self.max_in_flight))
        else:
            _ThreadLoop(self.handler, streams).run(self.max_in_flight)


@overload
def worker(handler: Handler) -> Worker: ...
@overload
def worker(*, max_in_flight: Optional[int] = None) -> Callable[[Handler], Worker]: ...
def worker(
    handler: Optional[Handler] = None, *, max_in_flight: Optional[int] = None
) -> Union[Worker, Callable[[Handler], Worker]]:
    """Makes a worker of a function: ``@worker``, or ``@worker(max_in_flight=8)``.

    ``max_in_flight`` is how many messages each process handles at a time. A function runs on that many threads (1 by
    default); a coroutine function runs on one event loop (16 by default).
    """
    if handler is not None:
        return Worker(handler, max_in_flight=max_in_flight)
    return lambda handler: Worker(handler, max_in_flight=max_in_flight)


class _ThreadLoop:
    """Handlers on threads. The main thread reads, so that it sees a cancellation while they work."""

    def __init__(self, handler: Handler, streams: Streams) -> None:
        self._handler = handler
        self._streams = streams
        self._in_flight: Dict[str, Message] = {}
        self._lock = threading.Lock()

    def run(self, max_in_flight: int) -> None:
        # Leaving the block waits for the handlers.
        with ThreadPoolExecutor(max_in_flight, thread_name_prefix="oncegate") as threads:
            _say_ready(self._streams, max_in_flight)
            for line in self._streams.read():
                if line.get("type") == "message":
                    id, message = line["id"], parse(line)
                    with self._lock:
                        self._in_flight[id] = message
                    threads.submit(self._handle, id, message)
                elif line.get("type") == "cancel":
                    self._cancel(line["id"])

    def _cancel(self, id: str) -> None:
        with self._lock:
            message = self._in_flight.get(id)
        if message is not None:
            message.cancelled.set()

    def _handle(self, id: str, message: Message) -> None:
        try:
            answer = _completed(self._handler(message))
        # SystemExit, too: a thread that ends without an answer would block the message until its time is up.
        except BaseException as error:
            answer = _failed(error)
        with self._lock:
            del self._in_flight[id]
        _reply(self._streams, id, answer)


class _AsyncLoop:
    """Handlers as tasks of one event loop. A thread reads."""

    def __init__(self, handler: Handler, streams: Streams) -> None:
        self._handler = handler
        self._streams = streams
        self._in_flight: Dict[str, Tuple[Message, asyncio.Task[Answer]]] = {}
        self._replies: Set[asyncio.Task[None]] = set()

    async def run(self, max_in_flight: int) -> None:
        loop = asyncio.get_running_loop()
        _say_ready(self._streams, max_in_flight)
        await loop.run_in_executor(None, self._read, loop)
        while self._replies:
            await asyncio.wait(self._replies)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        for line in self._streams.read():
            loop.call_soon_threadsafe(self._take, line)

    def _take(self, line: Mapping[str, Any]) -> None:
        if line.get("type") == "message":
            id, message = line["id"], parse(line)
            handling = asyncio.ensure_future(self._handle(message))
            self._in_flight[id] = (message, handling)
            reply = asyncio.ensure_future(self._reply(id, handling))
            self._replies.add(reply)
            reply.add_done_callback(self._replies.discard)
        elif line.get("type") == "cancel" and line["id"] in self._in_flight:
            message, handling = self._in_flight[line["id"]]
            message.cancelled.set()
            handling.cancel()

    async def _handle(self, message: Message) -> Answer:
        try:
            return _completed(await self._handler(message))
        except asyncio.CancelledError:
            raise
        # SystemExit, too: it would end the loop with every other message in it.
        except BaseException as error:
            return _failed(error)

    async def _reply(self, id: str, handling: asyncio.Task[Answer]) -> None:
        """A task of its own: a task that is cancelled before its first step runs no line of its body."""
        try:
            answer = await handling
        except asyncio.CancelledError as error:
            answer = _failed(error)
        del self._in_flight[id]
        _reply(self._streams, id, answer)


def _say_ready(streams: Streams, max_in_flight: int) -> None:
    streams.write({"type": "ready", "v": PROTOCOL, "max_in_flight": max_in_flight})


def _completed(result: Any) -> Answer:
    if inspect.isawaitable(result):
        # The handler returns a coroutine without being a coroutine function: none of its body has run.
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError("the handler returned an awaitable; define it with `async def`")
    return {"outcome": "complete"} if result is None else {"outcome": "complete", "result": result}


def _failed(error: BaseException) -> Answer:
    if isinstance(error, DeadLetter):
        return {"outcome": "dead-letter", "reason": _sendable(error.reason)}
    if isinstance(error, Retry):
        answer: Answer = {"outcome": "retry", "reason": _sendable(error.reason)}
        return answer if error.delay is None else {**answer, "delay_ms": round(error.delay * 1000)}
    # It is answered, too: until then the message counts as one of `max_in_flight`.
    if isinstance(error, asyncio.CancelledError):
        return {"outcome": "retry", "reason": "cancelled"}
    traceback.print_exception(type(error), error, error.__traceback__)
    return {"outcome": "retry", "reason": _sendable(f"{type(error).__name__}: {error}")}


def _sendable(reason: str) -> str:
    """The beginning of a reason, without the lone surrogates that no JSON in UTF-8 can have."""
    return reason[:REASON_MAX_CHARS].encode("utf-8", "replace").decode()


def _reply(streams: Streams, id: str, answer: Answer) -> None:
    try:
        streams.write({"id": id, **answer})
    except (TypeError, ValueError) as error:
        # The effect has happened, so the message must not run again because of its result.
        print(f"the result cannot be kept, the message is completed without it: {error}", file=sys.stderr)
        streams.write({"id": id, "outcome": answer["outcome"]})
    except BrokenPipeError:
        # oncegate has ended or has given this process up; it takes no answer any more.
        pass
