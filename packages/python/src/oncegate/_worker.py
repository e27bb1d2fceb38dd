"""Makes a worker of a function that handles messages, one at a time or in batches."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from typing import Any, Awaitable, Callable, List, Optional, Sequence, Union, overload

from oncegate._loops import AsyncLoop, Call, ThreadLoop
from oncegate._message import Message
from oncegate._streams import Streams

#: Handles one message. What it returns is kept as the result.
Handler = Union[Callable[[Message], Any], Callable[[Message], Awaitable[Any]]]
#: Handles a batch. It returns a list with an outcome for each message, or ``None`` when each is completed.
BatchHandler = Union[
    Callable[[List[Message]], Optional[Sequence[Any]]], Callable[[List[Message]], Awaitable[Optional[Sequence[Any]]]]
]

#: How many messages a function takes besides, unless told otherwise.
AHEAD = 16

#: How many messages, or batches, a coroutine function handles at a time, unless told otherwise.
ASYNC_IN_FLIGHT = 16


class _Runner:
    """What workers have in common: a function, and the loop around it."""

    def __init__(self, handler: Callable[..., Any], in_batches: bool, max_in_flight: Optional[int]) -> None:
        self.is_async = inspect.iscoroutinefunction(handler)
        if max_in_flight is None:
            max_in_flight = ASYNC_IN_FLIGHT if self.is_async else 1
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; it is 1 or more")
        self.max_in_flight = max_in_flight
        self.ahead = 0
        self._call = Call(handler, in_batches)

    def run(self) -> None:
        """Handles messages until standard input ends and every message is answered."""
        if sys.stdin is not None and sys.stdin.isatty():
            batches = " --batch-messages 100" if self._call.in_batches else ""
            sys.exit(
                "This is a worker of oncegate, which starts it: "
                f"oncegate run{batches} --handler-exec '{sys.executable} {sys.argv[0]}' …"
            )
        streams = Streams.take_over()
        if self.is_async:
            asyncio.run(AsyncLoop(self._call, streams).run(self.max_in_flight))
        else:
            ThreadLoop(self._call, streams).run(self.max_in_flight, self.ahead)


class Worker(_Runner):
    """A handler of single messages with the loop around it. Calling it calls the handler, for tests."""

    def __init__(
        self, handler: Handler, *, max_in_flight: Optional[int] = None, ahead: Optional[int] = None
    ) -> None:
        super().__init__(handler, False, max_in_flight)
        if ahead is None:
            ahead = 0 if self.is_async else AHEAD
        if ahead < 0 or (ahead and self.is_async):
            raise ValueError(f"ahead is {ahead}; it is 0 or more, and a coroutine function takes none ahead")
        self.ahead = ahead
        self.handler = handler
        functools.update_wrapper(self, handler)

    def __call__(self, message: Message) -> Any:
        return self.handler(message)


class BatchWorker(_Runner):
    """A handler of batches with the loop around it. Calling it calls the handler, for tests."""

    def __init__(self, handler: BatchHandler, *, max_in_flight: Optional[int] = None) -> None:
        super().__init__(handler, True, max_in_flight)
        self.handler = handler
        functools.update_wrapper(self, handler)

    def __call__(self, messages: List[Message]) -> Any:
        return self.handler(messages)


@overload
def worker(handler: Handler) -> Worker: ...
@overload
def worker(*, max_in_flight: Optional[int] = None, ahead: Optional[int] = None) -> Callable[[Handler], Worker]: ...
def worker(
    handler: Optional[Handler] = None, *, max_in_flight: Optional[int] = None, ahead: Optional[int] = None
) -> Union[Worker, Callable[[Handler], Worker]]:
    """Makes a worker of a function: ``@worker``, or ``@worker(max_in_flight=8)``.

    ``max_in_flight`` is how many messages each process handles at a time. A function runs on that many threads (1 by
    default); a coroutine function runs on one event loop (16 by default).

    ``ahead`` is how many messages more a function takes before it has answered those before them (16 by default). They
    come only while the function returns within milliseconds, and begin when a thread is free.
    """
    if handler is not None:
        return Worker(handler, max_in_flight=max_in_flight, ahead=ahead)
    return lambda handler: Worker(handler, max_in_flight=max_in_flight, ahead=ahead)


@overload
def batch_worker(handler: BatchHandler) -> BatchWorker: ...
@overload
def batch_worker(*, max_in_flight: Optional[int] = None) -> Callable[[BatchHandler], BatchWorker]: ...
def batch_worker(
    handler: Optional[BatchHandler] = None, *, max_in_flight: Optional[int] = None
) -> Union[BatchWorker, Callable[[BatchHandler], BatchWorker]]:
    """Makes a worker of a function that handles many messages in one call, for ``oncegate run --batch-messages``.

    The function gets a list of messages, and returns a list with an outcome for each, in the same order: a result, or
    an exception (:class:`Retry`, :class:`Later`, :class:`DeadLetter` or any other) that means what it means when a
    :func:`worker` raises it. ``None`` instead of the list completes each message without a result. When the function
    raises an exception, every message of the batch is tried again.

    ``max_in_flight`` counts batches. Without ``--batch-messages`` each message is a batch of one.
    """
    if handler is not None:
        return BatchWorker(handler, max_in_flight=max_in_flight)
    return lambda handler: BatchWorker(handler, max_in_flight=max_in_flight)
