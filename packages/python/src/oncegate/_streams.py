"""The protocol's streams, which nothing else in the process can write to or read from."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any, BinaryIO, Iterator, Mapping

#: The longest line in either direction, in bytes, as `oncegate run` has it.
LINE_MAX_BYTES = 16 * 1024 * 1024


class Streams:
    """Lines of JSON from ``oncegate run`` and back.

    The process's own standard input becomes empty and its standard output becomes standard error. So a ``print``, a C
    library or a child process neither breaks the protocol nor takes lines away from it.
    """

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source = source
        self._sink = sink
        self._writing = threading.Lock()

    @classmethod
    def take_over(cls) -> Streams:
        """Takes file descriptors 0 and 1. Duplicates are not inherited by child processes."""
        sys.stdout.flush()
        source, sink = os.dup(0), os.dup(1)
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)
        os.dup2(2, 1)
        return cls(os.fdopen(source, "rb"), os.fdopen(sink, "wb"))

    def read(self) -> Iterator[Mapping[str, Any]]:
        """The lines until the input ends."""
        for line in self._source:
            yield json.loads(line)

    def write(self, line: Mapping[str, Any]) -> None:
        """Writes one line and flushes it; any thread may call this.

        Raises an exception, before anything is written, when it cannot be JSON or is too long.
        """
        # Lone surrogates must fail here: as an escape they would be an invalid line for the reader.
        text = json.dumps(line, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode() + b"\n"
        if len(text) > LINE_MAX_BYTES:
            raise ValueError(f"its line has {len(text)} bytes, more than {LINE_MAX_BYTES}")
        with self._writing:
            self._sink.write(text)
            self._sink.flush()
