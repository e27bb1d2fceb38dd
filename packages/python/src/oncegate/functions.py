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
import functools
import inspect
import json
import logging
import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, Generator, Iterable, Optional, Tuple, Type, TypeVar, Union, cast

from oncegate._claims import (
    Attempt,
    Busy,
    Error,
    GivenUp,
    Heartbeats,
    Http,
    LeaseLost,
    Mismatch,
    OutcomeUnknown,
    Refused,
    ResultLost,
    Unavailable,
    current,
    current_attempt,
)
from oncegate._outcome import DeadLetter, Later, Retry

__all__ = [
    "Attempt",
    "Busy",
    "Client",
    "Error",
    "GivenUp",
    "LeaseLost",
    "Mismatch",
    "OutcomeUnknown",
    "Refused",
    "ResultLost",
    "Unavailable",
    "current_attempt",
]

#: The delays before a request without an answer, or for a busy key, is sent again, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
#: The longest wait at the server for a result, in seconds.
_LONGEST_WAIT = 20.0
#: The answers that may be other ones later: the caller has reached a limit, and the store does not answer.
_AGAIN = (0, 408, 429, 502, 503, 504)
#: The same for the end of a claim: the work has happened, and a token that is rotated or a server that is moved comes back.
_AGAIN_AT_THE_END = _AGAIN + (401, 403, 404, 500)

_log = logging.getLogger("oncegate")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Post = Tuple[str, Dict[str, Any], float]
_Steps = Generator[Union[_Post, float], Tuple[int, Dict[str, Any]], Any]


class _Done:
    def __init__(self, result: Any) -> None:
        self.result = result


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
        self._http = Http(url, self._read_token)
        self._heartbeats = Heartbeats(self._http)
        self._executor: Optional[ThreadPoolExecutor] = None
        self._executor_pid = 0

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
        executor, self._executor = self._executor, None  # what still runs ends by the loop's own
        if executor is not None:
            executor.shutdown(wait=False)
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
        #: Before any request that may have been granted: a repeat gets the same grant, and not a new lease.
        since: Optional[float] = None
        while True:
            left = _LONGEST_WAIT if wait is None else max(0.0, began + wait - time.monotonic())
            there = min(left, _LONGEST_WAIT) if waits_there else 0.0
            sent_at = time.monotonic()
            since = sent_at if since is None else since
            body = {**request, "nonce": nonce, "wait_ms": round(there * 1000)}
            status, answer = yield "/v1/claims", body, there + self._patience
            state, detail = answer.get("state"), answer.get("detail", f"HTTP status {status}")
            if status == 200 and state == "completed":
                return _Done(_result_of(answer))
            if status == 201 and state == "granted":
                attempt = Attempt(answer, since)
                if time.monotonic() < attempt.extend_at:
                    return attempt
                # Much of its lease is over, by a wait or a lost answer: it begins under a fresh one.
                sent_at = time.monotonic()
                status, answer = yield "/v1/claims/extend", {"claims": [attempt.claim]}, self._patience
                state = answer["claims"][0]["state"] if status == 200 and answer.get("claims") else "unknown"
                if state == "extended":
                    attempt.extended(sent_at)
                    answered_at = time.monotonic()
                    if attempt.is_safe(time.monotonic()):
                        return attempt
                elif state != "unknown":  # another one has taken over, and nothing was run
                    nonce, since, answered_at = str(uuid.uuid4()), None, time.monotonic()
                status, detail = 0, "a claim was not confirmed in time"
            if state == "given-up":
                raise GivenUp(answer.get("reason", detail))
            if state == "mismatch":
                raise Mismatch(detail)
            if state == "busy":
                retry_in = answer["retry_in_ms"] / 1000
                answered_at, since = time.monotonic(), sent_at
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
            if status not in _AGAIN_AT_THE_END and (status != 200 or "state" in answer):
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
            json.dumps(form, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            _log.warning("the work is recorded without its result, which is no JSON: %s", error)
            form = {"without_result": True}
        status, answer = yield from self._ending("/v1/claims/complete", {"claim": attempt.claim, **form}, self._settle)
        if status in (400, 413):
            _log.warning("the work is recorded without its result, which is too large or no JSON")
            form = {"without_result": True}
            body = {"claim": attempt.claim, **form}
            status, answer = yield from self._ending("/v1/claims/complete", body, self._settle)
        if status == 200:
            return
        if answer.get("state") == "lease-lost":
            raise LeaseLost("the function has run, and another process has taken over: its result counts")
        raise OutcomeUnknown(f"the function has run, and that is not recorded: {answer.get('detail')}")

    def _failing(self, attempt: Attempt, error: Exception, permanent: Tuple[Type[Exception], ...]) -> _Steps:
        reason = f"{type(error).__name__}: {error}"[:1000].encode("utf-8", "replace").decode()
        body: Dict[str, Any] = {"claim": attempt.claim, "reason": reason}
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
        if not self._heartbeats.add(attempt):
            self._drive(self._returning(attempt))
            raise Unavailable("the client is closed: nothing was run")
        context = current.set(attempt)
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
            current.reset(context)
            self._heartbeats.remove(attempt)

    async def _run_async(self, request: Dict[str, Any], wait: Optional[float], work: Callable[[Attempt], Any],
                         permanent: Tuple[Type[Exception], ...], decode: Callable[[Any], Any]) -> Any:
        attempt = await self._drive_async(self._claiming(request, wait, False))
        if isinstance(attempt, _Done):
            return decode(attempt.result)
        loop, context = asyncio.get_running_loop(), current.set(attempt)
        task = asyncio.ensure_future(work(attempt))
        current.reset(context)
        attempt.when_lost = lambda: cast(Any, loop.call_soon_threadsafe(task.cancel))
        if not self._heartbeats.add(attempt):
            task.cancel()  # it has not begun
            await self._drive_async(self._returning(attempt))
            raise Unavailable("the client is closed: nothing was run")
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
                await self._to_the_end(self._failing(attempt, error, permanent))
                raise
            await self._to_the_end(self._completing(attempt, result))
            return result
        finally:
            self._heartbeats.remove(attempt)

    def _returning(self, attempt: Attempt) -> _Steps:
        body = {"claim": attempt.claim, "counted": False, "reason": "the client is closed"}
        yield from self._ending("/v1/claims/release", body, self._patience)

    async def _to_the_end(self, steps: _Steps) -> None:
        """What has happened is recorded, whatever becomes of the caller meanwhile."""
        ending = asyncio.ensure_future(self._drive_async(steps))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait([ending])
            raise

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
        if not self._closed and (self._executor is None or self._executor_pid != os.getpid()):  # threads do not survive a fork
            self._executor, self._executor_pid = ThreadPoolExecutor(16, "oncegate"), os.getpid()
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
