"""Runs functions once for a key, by claims of a server of oncegate.

::

    from oncegate.functions import Client

    client = Client("http://127.0.0.1:8081", scope="nightly", token_file="/run/secrets/oncegate")

    @client.once(key="day")
    def report(day: str) -> int:
        return write_pages(day)

    report("2026-11-29")  # runs, or returns the result of the call that did, in whatever process

A function that raises an error is released, and the next call tries again; :class:`oncegate.DeadLetter` gives up for
good. Without the server, nothing runs: the call raises :class:`Unavailable`.
"""

from __future__ import annotations

import asyncio
import base64
import contextvars
import functools
import inspect
import json
import logging
import os
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Callable, Dict, Generator, Iterable, List, Optional, Tuple, Type, TypeVar, Union, cast
from urllib.parse import urlsplit

from oncegate._outcome import DeadLetter, Later, Retry

__all__ = ["Attempt", "Busy", "Client", "Error", "GivenUp", "LeaseLost", "Mismatch", "OutcomeUnknown", "Refused",
           "ResultLost", "Unavailable", "current_attempt"]

#: The delays before a request without an answer, or for a busy key, is sent again, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
#: The longest wait at the server for a result, in seconds.
_LONGEST_WAIT = 20.0
#: The parts of a lease after which it is extended, and for which it must not be used any more at its end.
_EXTENDS, _MARGINS = 3, 6
#: The answers that may be other ones later: the caller has reached a limit, and the store does not answer.
_AGAIN = (0, 408, 429, 502, 503, 504)

_log = logging.getLogger("oncegate")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Post = Tuple[str, Dict[str, Any], float]
_Steps = Generator[Union[_Post, float], Tuple[int, Dict[str, Any]], Any]


class Error(Exception):
    """Why a call has no result."""


class Unavailable(Error):
    """The server or its store did not answer the claim in time: nothing was run."""


class Refused(Error):
    """The server refuses the request until the token, the scope, the key or a setting is another one."""


class Busy(Error):
    """Another call has the key, or its next attempt is not due: nothing was run. ``retry_in`` is in seconds."""

    def __init__(self, retry_in: float) -> None:
        super().__init__(f"another call has the key, or its next attempt is not due: call again in {retry_in:.3f} s")
        self.retry_in = retry_in


class GivenUp(Error):
    """No attempt follows: one has failed for good, or all are used up."""


class Mismatch(Error):
    """The key is known with other arguments."""


class LeaseLost(Error):
    """The claim was lost while the function ran: another process may have taken over. What it did is not recorded."""


class OutcomeUnknown(Error):
    """The function has run, and the server did not confirm it in time: call again to learn what is recorded."""


class ResultLost(Error):
    """The work is done, and its result was not kept."""


class Attempt:
    """A run of a function under its claim. ``number`` counts from 1. If ``recovered``, an earlier attempt ended without
    an outcome: ask downstream whether its effect has happened. ``cancelled`` is set when the claim is lost."""

    def __init__(self, answer: Dict[str, Any], sent_at: float) -> None:
        self.number: int = answer["attempt"]
        self.recovered: bool = answer["recovered"]
        self.fencing_token: Optional[int] = answer.get("fencing_token")
        self.cancelled = threading.Event()
        self._claim: str = answer["claim"]
        self._lease: float = answer["lease_ms"] / 1000
        self._when_lost: Callable[[], None] = lambda: None
        self._extended(sent_at)

    def check(self) -> None:
        """Raises :class:`LeaseLost` if the claim is lost: for functions that work in steps."""
        if not self._is_safe(time.monotonic()):
            self._lose()
        if self.cancelled.is_set():
            raise LeaseLost("the claim was lost: another process may have taken over")

    def _extended(self, sent_at: float) -> None:
        self._valid_until = sent_at + self._lease
        self._extend_at = sent_at + self._lease / _EXTENDS

    def _is_safe(self, now: float) -> bool:
        return now < self._valid_until - self._lease / _MARGINS

    def _lose(self) -> None:
        if not self.cancelled.is_set():
            self.cancelled.set()
            self._when_lost()


_current: contextvars.ContextVar[Attempt] = contextvars.ContextVar("oncegate_attempt")


def current_attempt() -> Attempt:
    """The attempt of the function that calls it. Raises ``LookupError`` outside of one."""
    return _current.get()


class _Done:
    def __init__(self, result: Any) -> None:
        self.result = result


class _Http:
    """Sends requests, with a connection for each thread."""

    def __init__(self, url: str, token: Callable[[], str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the URL of the server is {url!r}; it is one like http://127.0.0.1:8081")
        self._connect: Callable[..., HTTPConnection] = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._place = (parts.hostname, parts.port)
        self._prefix, self._token, self._local = parts.path.rstrip("/"), token, threading.local()

    def post(self, path: str, body: Dict[str, Any], timeout: float) -> Tuple[int, Dict[str, Any]]:
        """The status and the answer; the status 0 if there is none."""
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._token()}"}
        connection: Optional[HTTPConnection] = getattr(self._local, "connection", None)
        try:
            if connection is None or getattr(self._local, "pid", 0) != os.getpid():
                connection = self._connect(*self._place)
                self._local.connection, self._local.pid = connection, os.getpid()
            connection.timeout = timeout
            if connection.sock is not None:
                connection.sock.settimeout(timeout)
            connection.request("POST", self._prefix + path, json.dumps(body), headers)
            response: HTTPResponse = connection.getresponse()
            status, text = response.status, response.read()
            answer = json.loads(text)
            return (status, answer) if isinstance(answer, dict) else (0, {})
        except (OSError, HTTPException, ValueError) as error:
            if connection is not None:
                connection.close()
            self._local.connection = None
            return 0, {"detail": f"{type(error).__name__}: {error}"}


class _Heartbeats:
    """Extends all claims of a client from one thread, which a function that computes does not hold up."""

    def __init__(self, http: _Http) -> None:
        self._http, self._changed = http, threading.Condition()
        self._held: List[Attempt] = []
        self._thread: Optional[threading.Thread] = None
        self._pid, self._closed = 0, False

    def add(self, attempt: Attempt) -> None:
        with self._changed:
            if self._pid != os.getpid():  # a thread does not survive a fork, and neither do the parent's claims
                self._held, self._thread, self._pid = [], None, os.getpid()
            self._held.append(attempt)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="oncegate-heartbeats", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def remove(self, attempt: Attempt) -> None:
        with self._changed:
            self._held = [held for held in self._held if held is not attempt]
            self._changed.notify_all()

    def close(self, timeout: float) -> bool:
        """Waits for what runs; then there are no heartbeats any more. Returns whether all has ended."""
        with self._changed:
            ended = self._changed.wait_for(lambda: not self._held or self._pid != os.getpid(), timeout)
            self._closed = True
            self._changed.notify_all()
        return ended

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                for attempt in self._held:
                    if not attempt._is_safe(now):
                        attempt._lose()
                if self._closed:
                    return
                due = [held for held in self._held if held._extend_at <= now][:1000]
                if not due:
                    next_at = min((held._extend_at for held in self._held), default=now + 3600)
                    self._changed.wait(max(0.001, next_at - now))
                    continue
            shortest = min(held._lease for held in due)
            claims = {"claims": [held._claim for held in due]}
            status, answer = self._http.post("/v1/claims/extend", claims, max(0.05, shortest / _EXTENDS))
            answers = answer.get("claims") if status == 200 else None
            with self._changed:
                for held, extended in zip(due, answers or [{}] * len(due)):
                    state = extended.get("state", "unknown")
                    if state == "extended":
                        held._extended(now)
                    elif state == "unknown":
                        held._extend_at = time.monotonic() + held._lease / 20
                    else:
                        held._extend_at = float("inf")
                        held._lose()


class Client:
    """A client of a server of oncegate. It is safe to share among threads, and after a fork.

    ``url`` and ``token`` are ``ONCEGATE_URL`` and ``ONCEGATE_TOKEN`` by default; ``token_file`` is read for each request,
    so the token may be rotated. ``patience`` is how long a claim that is not answered is repeated before
    :class:`Unavailable`, and ``settle`` how long the outcome of a function is before :class:`OutcomeUnknown`, in seconds.
    """

    def __init__(self, url: Optional[str] = None, *, scope: str, token: Optional[str] = None,
                 token_file: Optional[str] = None, patience: float = 10.0, settle: float = 300.0) -> None:
        url = url or os.environ.get("ONCEGATE_URL")
        token = token or os.environ.get("ONCEGATE_TOKEN")
        if not url or not (token or token_file):
            raise ValueError("the client needs the URL of the server and a token: set ONCEGATE_URL and ONCEGATE_TOKEN")
        self._scope, self._patience, self._settle = scope, patience, settle
        self._token, self._token_file, self._closed = token, token_file, False
        self._http = _Http(url, self._read_token)
        self._heartbeats = _Heartbeats(self._http)
        self._executor: Optional[ThreadPoolExecutor] = None

    def _read_token(self) -> str:
        if self._token_file is None:
            return cast(str, self._token)
        with open(self._token_file, encoding="utf-8") as file:
            return next((line.strip() for line in file if line.strip()), "")

    def once(self, *, key: Union[str, Iterable[str], Callable[..., Any]], function: Optional[str] = None,
             wait: Optional[float] = None, lease: Optional[float] = None, retention: Optional[float] = None,
             permanent: Tuple[Type[Exception], ...] = (), decode: Callable[[Any], Any] = lambda result: result,
             ) -> Callable[[_Function], _Function]:
        """Makes a function, or a coroutine function, run once for each key.

        ``key`` is the name of an argument, several names, or a function of the arguments that returns what is JSON.
        ``function`` is a part of the key: the name of the function by default, so name it before you rename it. ``wait``
        is how many seconds a call waits for one that runs: as long as it takes by default, and 0 for :class:`Busy` at
        once. ``lease`` and ``retention``, in seconds, are those of the scope by default. ``permanent`` has the errors
        that no other attempt would change. ``decode`` is given the result of an earlier call, as JSON has it.
        """
        names = [key] if isinstance(key, str) else None if callable(key) else list(key)

        def decorate(work: _Function) -> _Function:
            signature = inspect.signature(work)
            if names is not None and not set(names) <= set(signature.parameters):
                raise TypeError(f"the key {names} names no arguments of {work.__name__}{signature}")

            def request(args: Any, kwargs: Any) -> Dict[str, Any]:
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                found = key(*args, **kwargs) if callable(key) else {name: bound.arguments[name] for name in names or ()}
                return self._request(found, function or work.__name__, None, lease, retention)

            @functools.wraps(work)
            def run(*args: Any, **kwargs: Any) -> Any:
                return self._run(request(args, kwargs), wait, lambda _: work(*args, **kwargs), permanent, decode)

            @functools.wraps(work)
            async def run_async(*args: Any, **kwargs: Any) -> Any:
                call = functools.partial(work, *args, **kwargs)
                return await self._run_async(request(args, kwargs), wait, lambda _: call(), permanent, decode)

            return cast(_Function, run_async if inspect.iscoroutinefunction(work) else run)

        return decorate

    def run(self, key: Any, work: Callable[[Attempt], Any], *, function: Optional[str] = None, arguments: Any = None,
            wait: Optional[float] = None, lease: Optional[float] = None, retention: Optional[float] = None,
            permanent: Tuple[Type[Exception], ...] = ()) -> Any:
        """Calls ``work`` with its attempt, once for the key, and returns its result; see :meth:`once`. The same key with
        other ``arguments`` is a :class:`Mismatch`. With a coroutine function, the call is to be awaited."""
        request = self._request(key, function, arguments, lease, retention)
        run = self._run_async if inspect.iscoroutinefunction(work) else self._run
        return run(request, wait, work, permanent, lambda result: result)

    def close(self, timeout: float = 30.0) -> bool:
        """Waits up to ``timeout`` seconds for what runs, and ends the heartbeats. Returns whether all has ended."""
        self._closed = True
        ended = self._heartbeats.close(timeout)
        if self._executor is not None:
            self._executor.shutdown(wait=False)
        return ended

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _request(self, key: Any, function: Optional[str], arguments: Any, lease: Optional[float],
                 retention: Optional[float]) -> Dict[str, Any]:
        request = {"scope": self._scope, "key": key, "function": function, "arguments": arguments,
                   "lease_ms": lease and round(lease * 1000), "retention_ms": retention and round(retention * 1000)}
        return {name: value for name, value in request.items() if value is not None or name == "key"}

    def _claiming(self, request: Dict[str, Any], wait: Optional[float], waits_there: bool) -> _Steps:
        if self._closed:
            raise Unavailable("the client is closed: nothing was run")
        began = answered_at = time.monotonic()
        nonce, pause = str(uuid.uuid4()), _FIRST_PAUSE
        while True:
            left = _LONGEST_WAIT if wait is None else max(0.0, began + wait - time.monotonic())
            there = min(left, _LONGEST_WAIT) if waits_there else 0.0
            sent_at = time.monotonic()
            body = {**request, "nonce": nonce, "wait_ms": round(there * 1000)}
            status, answer = yield "/v1/claims", body, there + self._patience
            if status == 201:
                return Attempt(answer, sent_at)
            if status == 200:
                return _Done(_result_of(answer))
            state, detail = answer.get("state"), answer.get("detail", f"HTTP status {status}")
            if state == "given-up":
                raise GivenUp(answer.get("reason", detail))
            if state == "mismatch":
                raise Mismatch(detail)
            if state == "busy":
                retry_in = answer["retry_in_ms"] / 1000
                answered_at = time.monotonic()
                if wait is not None and time.monotonic() + min(retry_in, _FIRST_PAUSE) >= began + wait:
                    raise Busy(retry_in)
                yield min(retry_in, pause)
                pause = min(pause * 2, _LONGEST_PAUSE / 2)
            elif status not in _AGAIN:
                raise Refused(f"{state or status}: {detail}")
            elif time.monotonic() - answered_at >= self._patience:
                raise Unavailable(f"nothing was run, because the claim was not answered: {detail}")
            else:
                # It may have been granted: the same nonce gets the same grant.
                yield pause
                pause = min(pause * 2, _LONGEST_PAUSE)

    def _ending(self, path: str, body: Dict[str, Any], patience: float) -> _Steps:
        """Repeats the end of a claim until its outcome is known: the status, 0 if it stays unknown, and the answer."""
        began, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            status, answer = yield path, body, 10.0
            if status not in _AGAIN:
                return status, answer
            if time.monotonic() - began >= patience:
                return 0, answer
            yield pause
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _completing(self, attempt: Attempt, result: Any) -> _Steps:
        form = {"result": result}
        if isinstance(result, (bytes, bytearray)):
            form = {"result_base64": base64.b64encode(result).decode()}
        try:
            json.dumps(form)
        except (TypeError, ValueError) as error:
            _log.warning("the work is recorded without its result, which is no JSON: %s", error)
            form = {"without_result": True}
        status, answer = yield from self._ending("/v1/claims/complete", {"claim": attempt._claim, **form}, self._settle)
        if status == 413:
            _log.warning("the work is recorded without its result, which is too large")
            form = {"without_result": True}
            body = {"claim": attempt._claim, **form}
            status, answer = yield from self._ending("/v1/claims/complete", body, self._settle)
        if status == 200:
            return
        if answer.get("state") == "lease-lost":
            raise LeaseLost("the function has run, and another process has taken over: its result counts")
        raise OutcomeUnknown(f"the function has run, and that is not recorded: {answer.get('detail')}")

    def _failing(self, attempt: Attempt, error: Exception, permanent: Tuple[Type[Exception], ...]) -> _Steps:
        body: Dict[str, Any] = {"claim": attempt._claim, "reason": f"{type(error).__name__}: {error}"[:1000]}
        path = "/v1/claims/release"
        if isinstance(error, (DeadLetter,) + permanent):
            path = "/v1/claims/fail"
        elif isinstance(error, (Retry, Later)):
            body["counted"] = isinstance(error, Retry)
            if error.delay is not None:
                body["retry_in_ms"] = round(error.delay * 1000)
        status, answer = yield from self._ending(path, body, self._patience)
        if status != 200:
            _log.warning("the failed attempt was not released, so its lease lapses: %s", answer.get("detail"))

    def _run(self, request: Dict[str, Any], wait: Optional[float], work: Callable[[Attempt], Any],
             permanent: Tuple[Type[Exception], ...], decode: Callable[[Any], Any]) -> Any:
        attempt = self._drive(self._claiming(request, wait, True))
        if isinstance(attempt, _Done):
            return decode(attempt.result)
        self._heartbeats.add(attempt)
        context = _current.set(attempt)
        try:
            try:
                result = work(attempt)
            except LeaseLost:
                raise
            except Exception as error:
                self._drive(self._failing(attempt, error, permanent))
                raise
            self._drive(self._completing(attempt, result))
            return result
        finally:
            _current.reset(context)
            self._heartbeats.remove(attempt)

    async def _run_async(self, request: Dict[str, Any], wait: Optional[float], work: Callable[[Attempt], Any],
                         permanent: Tuple[Type[Exception], ...], decode: Callable[[Any], Any]) -> Any:
        attempt = await self._drive_async(self._claiming(request, wait, False))
        if isinstance(attempt, _Done):
            return decode(attempt.result)
        loop, context = asyncio.get_running_loop(), _current.set(attempt)
        task = asyncio.ensure_future(work(attempt))
        _current.reset(context)
        attempt._when_lost = lambda: cast(Any, loop.call_soon_threadsafe(task.cancel))
        self._heartbeats.add(attempt)
        try:
            try:
                result = await task
            except asyncio.CancelledError:
                if attempt.cancelled.is_set():
                    raise LeaseLost("the claim was lost, and the function was cancelled") from None
                task.cancel()
                raise
            except LeaseLost:
                raise
            except Exception as error:
                await self._drive_async(self._failing(attempt, error, permanent))
                raise
            await self._drive_async(self._completing(attempt, result))
            return result
        finally:
            self._heartbeats.remove(attempt)

    def _drive(self, steps: _Steps) -> Any:
        answer: Tuple[int, Dict[str, Any]] = (0, {})
        try:
            step = next(steps)
            while True:
                if isinstance(step, float):
                    time.sleep(step)
                else:
                    answer = self._http.post(*step)
                step = steps.send(answer)
        except StopIteration as end:
            return end.value

    async def _drive_async(self, steps: _Steps) -> Any:
        answer: Tuple[int, Dict[str, Any]] = (0, {})
        if self._executor is None:
            self._executor = ThreadPoolExecutor(16, "oncegate")
        try:
            step = next(steps)
            while True:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    loop = asyncio.get_running_loop()
                    answer = await loop.run_in_executor(self._executor, self._http.post, *step)
                step = steps.send(answer)
        except StopIteration as end:
            return end.value


def _result_of(answer: Dict[str, Any]) -> Any:
    if "result_lost" in answer:
        raise ResultLost(f"the work is done, and its result is lost: {answer['result_lost']}")
    if "result_base64" in answer:
        return base64.b64decode(answer["result_base64"])
    return answer.get("result")
