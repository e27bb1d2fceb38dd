"""The loops around a handler: they take messages and cancellations from `oncegate run`, and answer."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Set, Tuple

from oncegate._answers import Answer, completed, of_all, of_each, reply
from oncegate._message import Message, parse
from oncegate._streams import Streams

#: The version of the protocol, see `docs/RUN.md` of oncegate.
PROTOCOL = 1

#: The messages of one line of the protocol, by their ids: several when the line is a batch.
Messages = Dict[str, Message]


@dataclass(frozen=True)
class Call:
    """A handler as the loops call it: for one message, or for a batch."""

    handler: Callable[..., Any]
    in_batches: bool

    def begin(self, messages: Messages) -> Any:
        """Calls the handler. A coroutine function returns its coroutine."""
        if self.in_batches:
            return self.handler(list(messages.values()))
        (message,) = messages.values()
        return self.handler(message)

    def answers(self, returned: Any, messages: Messages) -> List[Answer]:
        """The answers that the value returned by the handler means, in the order of the messages."""
        return of_each(returned, len(messages)) if self.in_batches else [completed(returned)]


def _taken(line: Mapping[str, Any]) -> Messages:
    """The messages of a line; none when it is another kind of line, which this version need not know."""
    kind = line.get("type")
    lines = [line] if kind == "message" else line["messages"] if kind == "batch" else []
    return {line["id"]: parse(line) for line in lines}


def _say_ready(streams: Streams, call: Call, max_in_flight: int, ahead: int = 0) -> None:
    batches = {"batches": True} if call.in_batches else {}
    takes_ahead = {"ahead": ahead} if ahead else {}
    streams.write({"type": "ready", "v": PROTOCOL, "max_in_flight": max_in_flight, **takes_ahead, **batches})


def _reply_all(streams: Streams, messages: Messages, answers: List[Answer]) -> None:
    for id, answer in zip(messages, answers):
        reply(streams, id, answer)


class ThreadLoop:
    """Handlers on threads. The main thread reads, so that it sees a cancellation while they work.

    Messages that are taken ahead wait here until a thread has answered an earlier one, and begin in their order.
    """

    def __init__(self, call: Call, streams: Streams) -> None:
        self._call = call
        self._streams = streams
        self._in_flight: Messages = {}
        #: The messages of single lines that may not have begun.
        self._waiting: Dict[str, Future[None]] = {}
        self._lock = threading.Lock()

    def run(self, max_in_flight: int, ahead: int) -> None:
        # Leaving the block waits for the handlers.
        with ThreadPoolExecutor(max_in_flight, thread_name_prefix="oncegate") as threads:
            _say_ready(self._streams, self._call, max_in_flight, ahead)
            for line in self._streams.read():
                messages = _taken(line)
                kind = line.get("type")
                if messages:
                    # Under the lock: the handler may have ended before its future is noted.
                    with self._lock:
                        self._in_flight.update(messages)
                        handling = threads.submit(self._handle, messages)
                        if kind == "message":
                            self._waiting[line["id"]] = handling
                elif kind == "cancel":
                    if not self._give_back(line["id"]):
                        self._cancel(line["id"])
                elif kind == "recall":
                    self._give_back(line["id"])
            # oncegate stops or has ended: nothing more begins.
            for id in list(self._waiting):
                self._give_back(id)

    def _give_back(self, id: str) -> bool:
        """Answers a message that has not begun, and lets it never begin. Returns whether it has not begun."""
        with self._lock:
            handling = self._waiting.get(id)
            if handling is None or not handling.cancel():
                return False
            del self._waiting[id], self._in_flight[id]
        reply(self._streams, id, {"outcome": "not-run"})
        return True

    def _cancel(self, id: str) -> None:
        with self._lock:
            message = self._in_flight.get(id)
        if message is not None:
            message.cancelled.set()

    def _handle(self, messages: Messages) -> None:
        try:
            answers = self._call.answers(self._call.begin(messages), messages)
        # SystemExit, too: a thread that ends without an answer would block the message until its time is up.
        except BaseException as error:
            answers = of_all(error, len(messages))
        with self._lock:
            for id in messages:
                del self._in_flight[id]
                self._waiting.pop(id, None)
        _reply_all(self._streams, messages, answers)


class AsyncLoop:
    """Handlers as tasks of one event loop. A thread reads."""

    def __init__(self, call: Call, streams: Streams) -> None:
        self._call = call
        self._streams = streams
        #: Each message has those of its line with it, and their task.
        self._in_flight: Dict[str, Tuple[Messages, asyncio.Task[List[Answer]]]] = {}
        self._replies: Set[asyncio.Task[None]] = set()

    async def run(self, max_in_flight: int) -> None:
        loop = asyncio.get_running_loop()
        _say_ready(self._streams, self._call, max_in_flight)
        await loop.run_in_executor(None, self._read, loop)
        while self._replies:
            await asyncio.wait(self._replies)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        for line in self._streams.read():
            loop.call_soon_threadsafe(self._take, line)

    def _take(self, line: Mapping[str, Any]) -> None:
        messages = _taken(line)
        if messages:
            handling = asyncio.ensure_future(self._handle(messages))
            self._in_flight.update((id, (messages, handling)) for id in messages)
            replies = asyncio.ensure_future(self._reply(messages, handling))
            self._replies.add(replies)
            replies.add_done_callback(self._replies.discard)
        elif line.get("type") == "cancel" and line["id"] in self._in_flight:
            messages, handling = self._in_flight[line["id"]]
            messages[line["id"]].cancelled.set()
            # The others of a batch go on until the last one of them is cancelled.
            if all(message.cancelled.is_set() for message in messages.values()):
                handling.cancel()

    async def _handle(self, messages: Messages) -> List[Answer]:
        try:
            return self._call.answers(await self._call.begin(messages), messages)
        except asyncio.CancelledError:
            raise
        # SystemExit, too: it would end the loop with every other message in it.
        except BaseException as error:
            return of_all(error, len(messages))

    async def _reply(self, messages: Messages, handling: asyncio.Task[List[Answer]]) -> None:
        """A task of its own: a task that is cancelled before its first step runs no line of its body."""
        try:
            answers = await handling
        except asyncio.CancelledError as error:
            answers = of_all(error, len(messages))
        for id in messages:
            del self._in_flight[id]
        _reply_all(self._streams, messages, answers)
