"""The outcomes of a message other than "completed", as exceptions."""

from __future__ import annotations

from typing import Optional

#: The longest delay, in seconds: 365 days. `oncegate run` waits no longer than its own limit in any case.
DELAY_MAX_SECONDS = 365 * 24 * 3600.0
#: The longest reason that is sent, in characters. Reasons end up in logs and in headers of dead letters.
REASON_MAX_CHARS = 1024


class Retry(Exception):
    """The message is tried again.

    Any other exception than those of this module has the same outcome, with a traceback on standard error. ``delay`` is
    in seconds; without it the back-off of ``oncegate run`` decides. A retry counts as an attempt: after ``max_attempts``
    the message becomes a dead letter.
    """

    def __init__(self, reason: str, *, delay: Optional[float] = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.delay = _checked(delay)


class Later(Exception):
    """The message cannot be done yet, and is delivered again after ``delay`` seconds.

    It is no failure and counts as no attempt, so nothing but the handler ends it: compare the message's age with a limit
    of your own. Without a delay, ``oncegate run`` waits for its longest back-off.
    """

    def __init__(self, reason: str, *, delay: Optional[float] = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.delay = _checked(delay)


class DeadLetter(Exception):
    """The message is given up: it becomes a dead letter with this reason, and is acknowledged."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _checked(delay: Optional[float]) -> Optional[float]:
    if delay is not None and not 0 <= delay <= DELAY_MAX_SECONDS:
        raise ValueError(f"delay is {delay}; it is a number of seconds from 0 to {DELAY_MAX_SECONDS:.0f}")
    return delay
