"""What a client of claims is made of: its errors, its attempts, its requests, and the thread of its heartbeats."""

from __future__ import annotations

import contextvars
import json
import os
import threading
import time
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Callable, Dict, List, Optional, Tuple
from urllib.parse import urlsplit

#: The parts of a lease after which it is extended, and for which it must not be used any more at its end.
_EXTENDS, _MARGINS = 3, 6


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
        self.claim: str = answer["claim"]
        self.lease: float = answer["lease_ms"] / 1000
        self.when_lost: Callable[[], None] = lambda: None
        self.extended(sent_at)

    def check(self) -> None:
        """Raises :class:`LeaseLost` if the claim is lost: for functions that work in steps."""
        if not self.is_safe(time.monotonic()):
            self.lose()
        if self.cancelled.is_set():
            raise LeaseLost("the claim was lost: another process may have taken over")

    def extended(self, sent_at: float) -> None:
        self.valid_until = sent_at + self.lease
        self.extend_at = sent_at + self.lease / _EXTENDS

    def is_safe(self, now: float) -> bool:
        return now < self.valid_until - self.lease / _MARGINS

    def lose(self) -> None:
        if not self.cancelled.is_set():
            self.cancelled.set()
            try:
                self.when_lost()
            except RuntimeError:
                pass  # its event loop is closed, and nothing of it runs any more


current: contextvars.ContextVar[Attempt] = contextvars.ContextVar("oncegate_attempt")


def current_attempt() -> Attempt:
    """The attempt of the function that calls it. Raises ``LookupError`` outside of one."""
    return current.get()


class Http:
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
        connection: Optional[HTTPConnection] = getattr(self._local, "connection", None)
        try:
            headers = {"content-type": "application/json", "authorization": f"Bearer {self._token()}"}
            if connection is None or getattr(self._local, "pid", 0) != os.getpid():
                connection = self._connect(*self._place)
                self._local.connection, self._local.pid = connection, os.getpid()
            connection.timeout = timeout
            if connection.sock is not None:
                connection.sock.settimeout(timeout)
            connection.request("POST", self._prefix + path, json.dumps(body), headers)
            response: HTTPResponse = connection.getresponse()
            status, text = response.status, response.read()
            try:
                answer = json.loads(text)
            except ValueError:
                answer = None
            if not isinstance(answer, dict):  # of something in between: only its refusal counts
                return (status if status >= 400 else 0), {"detail": f"HTTP status {status}"}
            return status, answer
        except (OSError, HTTPException, ValueError) as error:
            if connection is not None:
                connection.close()
            self._local.connection = None
            return 0, {"detail": f"{type(error).__name__}: {error}"}


class Heartbeats:
    """Extends all claims of a client from one thread, which a function that computes does not hold up."""

    def __init__(self, http: Http) -> None:
        self._http, self._changed = http, threading.Condition()
        self._held: List[Attempt] = []
        self._watcher: Optional[threading.Thread] = None
        self._thread: Optional[threading.Thread] = None
        self._pid, self._closed = os.getpid(), False

    def add(self, attempt: Attempt) -> bool:
        """``False``: the client is closed, and nothing would extend it."""
        with self._lock():
            if self._closed:
                return False
            self._held.append(attempt)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="oncegate-heartbeats", daemon=True)
                self._thread.start()
                self._watcher = threading.Thread(target=self._watch, name="oncegate-leases", daemon=True)
                self._watcher.start()
            self._changed.notify_all()
            return True

    def _lock(self) -> threading.Condition:
        if self._pid != os.getpid():  # a thread does not survive a fork, and neither do a lock and the parent's claims
            self._changed = threading.Condition()
            self._held, self._thread, self._pid = [], None, os.getpid()
        return self._changed

    def remove(self, attempt: Attempt) -> None:
        with self._lock():
            self._held = [held for held in self._held if held is not attempt]
            self._changed.notify_all()

    def close(self, timeout: float) -> bool:
        """Waits for what runs; then there are no heartbeats any more. Returns whether all has ended."""
        with self._lock():
            ended = self._changed.wait_for(lambda: not self._held, timeout)
            self._closed = True
            for attempt in self._held:  # nothing extends them any more
                attempt.lose()
            self._changed.notify_all()
        return ended

    def _watch(self) -> None:
        """Tells of a lease that is nearly over, also while a heartbeat has no answer."""
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                for attempt in self._held:
                    if not attempt.is_safe(now):
                        attempt.lose()
                ends = [held.valid_until - held.lease / _MARGINS for held in self._held if not held.cancelled.is_set()]
                self._changed.wait(max(0.001, min([now + 3600, *ends]) - now))

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                if self._closed:
                    return
                due = [held for held in self._held if held.extend_at <= now][:1000]
                if not due:
                    next_at = min([now + 3600, *(held.extend_at for held in self._held)])
                    self._changed.wait(max(0.001, next_at - now))
                    continue
            shortest = min(held.lease for held in due)
            claims = {"claims": [held.claim for held in due]}
            status, answer = self._http.post("/v1/claims/extend", claims, max(0.05, shortest / _EXTENDS))
            answers = answer.get("claims") if status == 200 else None
            with self._changed:
                answers = answers if isinstance(answers, list) and len(answers) == len(due) else [{}] * len(due)
                for held, extended in zip(due, answers):
                    state = extended.get("state", "unknown") if isinstance(extended, dict) else "unknown"
                    if state == "extended":
                        held.extended(now)
                    elif state == "unknown":
                        held.extend_at = time.monotonic() + held.lease / 20
                    else:
                        held.extend_at = float("inf")
                        held.lose()
