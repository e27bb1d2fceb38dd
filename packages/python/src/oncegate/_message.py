"""A message, as a worker sees it."""

from __future__ import annotations

import base64
import json
import threading
from dataclasses import dataclass, field
from typing import Any, Mapping, Optional, Sequence, Tuple

from oncegate._outcome import DeadLetter

#: Where a message comes from: ``{"kafka": {"topic": "orders", "partition": 3, "offset": 42}}``,
#: or ``{"sqs": {"queue": "orders", "id": "…"}}``.
Origin = Mapping[str, Any]


@dataclass(frozen=True)
class Message:
    """One delivery of a message. Build one yourself to test a worker without ``oncegate run``."""

    #: The payload, unchanged; ``None`` for a tombstone, which has no payload at all.
    payload: Optional[bytes]
    #: Is the same in every attempt, and when the message is delivered twice. Pass it to the systems that you call.
    idempotency_key: str = "00000000-0000-0000-0000-000000000000"
    #: 1, 2, 3 …
    attempt: int = 1
    #: Whether an earlier attempt may have had an effect: ask downstream before repeating it, if that is possible.
    recovered: bool = False
    #: The lease in seconds. ``oncegate run`` extends it while the worker works.
    lease: float = 30.0
    #: The fencing token, with ``fenced = true``: a number that only grows per key.
    fencing_token: Optional[int] = None
    #: Where the message comes from.
    origin: Origin = field(default_factory=dict)
    #: The broker's key of the message.
    key: Optional[bytes] = None
    #: The headers in their order; names may repeat, and a value may be ``None``.
    headers: Sequence[Tuple[str, Optional[bytes]]] = ()
    #: How many headers were too large to be passed on.
    headers_left_out: int = 0
    #: Is set when the outcome no longer matters: another process has taken the message over, its time is up, or
    #: ``oncegate run`` stops. End the work then; a process that does not answer within four seconds is killed.
    cancelled: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)

    def json(self) -> Any:
        """The payload as JSON.

        Raises :class:`DeadLetter` when it is none, because no retry would change that.
        """
        try:
            return json.loads(self.payload if self.payload is not None else b"")
        except (ValueError, RecursionError) as error:
            # Without the payload itself: reasons are logged.
            raise DeadLetter(f"the payload is no JSON: {type(error).__name__}") from error

    def header(self, name: str) -> Optional[bytes]:
        """The value of the last header of this name; ``None`` when there is none."""
        return next((value for found, value in reversed(self.headers) if found == name), None)


def parse(line: Mapping[str, Any]) -> Message:
    """The message of a line of the protocol. Fields that this version does not know are ignored."""
    return Message(
        payload=_bytes(line, "payload"),
        idempotency_key=line["idempotency_key"],
        attempt=line["attempt"],
        recovered=line["recovered"],
        lease=line["lease_ms"] / 1000,
        fencing_token=line.get("fencing_token"),
        origin=line["origin"],
        key=_bytes(line, "key"),
        headers=tuple((name, _value(value)) for name, value in line["headers"]),
        headers_left_out=line.get("headers_left_out", 0),
    )


def _bytes(line: Mapping[str, Any], name: str) -> Optional[bytes]:
    """A field that is text when it is UTF-8, and base64 under another name when it is not."""
    if f"{name}_base64" in line:
        return base64.b64decode(line[f"{name}_base64"])
    text = line.get(name)
    return None if text is None else text.encode()


def _value(value: Any) -> Optional[bytes]:
    if isinstance(value, dict):
        return base64.b64decode(value["base64"])
    return None if value is None else str(value).encode()
