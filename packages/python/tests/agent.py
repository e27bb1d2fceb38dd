"""Does what scripts/clients says, with the client of this package: commands and events are lines of JSON."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import threading
import time
from typing import Any, Dict

from oncegate import DeadLetter, Later
from oncegate.functions import Attempt, Client, Error

scope, ledger_path, mode = sys.argv[1:4]
ledger = os.open(ledger_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
client = Client(scope=scope, patience=float(os.environ.get("AGENT_PATIENCE", "10")))
printing = threading.Lock()


def say(command: Dict[str, Any], **event: Any) -> None:
    with printing:
        print(json.dumps({"id": command["id"], **event}), flush=True)


def has_effect(command: Dict[str, Any], attempt: Attempt) -> None:
    entry = {"effect": command["id"], "pid": os.getpid(), "attempt": attempt.number, "key": command["key"]}
    os.write(ledger, ("\n" + json.dumps(entry) + "\n").encode())
    os.fsync(ledger)


def began(command: Dict[str, Any], attempt: Attempt) -> None:
    say(command, began=True, attempt=attempt.number, recovered=attempt.recovered, fenced=attempt.fencing_token is not None)


def ended(command: Dict[str, Any]) -> Any:
    kind = command["work"]
    if kind == "raise":
        raise ValueError("the bank is closed")
    if kind == "permanent":
        raise DeadLetter("no such user")
    if kind == "later":
        raise Later("not yet", delay=0)
    return base64.b64decode(command["bytes"]) if "bytes" in command else command.get("result")


def waits(command: Dict[str, Any], attempt: Attempt) -> bool:
    if attempt.cancelled.is_set() and not command.get("ignores"):
        say(command, cancelled=True)
        attempt.check()
    return "until" in command and not os.path.exists(command["until"])


def work(command: Dict[str, Any], attempt: Attempt) -> Any:
    began(command, attempt)
    time.sleep(command.get("ms", 0) / 1000)
    has_effect(command, attempt)
    while waits(command, attempt):
        if command["work"] != "compute":
            time.sleep(0.01)
    time.sleep(command.get("ms", 0) / 1000)
    return ended(command)


async def work_async(command: Dict[str, Any], attempt: Attempt) -> Any:
    began(command, attempt)
    await asyncio.sleep(command.get("ms", 0) / 1000)
    has_effect(command, attempt)
    try:
        while waits(command, attempt):
            if command["work"] != "compute":
                await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        say(command, cancelled=True)
        raise
    await asyncio.sleep(command.get("ms", 0) / 1000)
    return ended(command)


def options(command: Dict[str, Any]) -> Dict[str, Any]:
    seconds = {name: command[f"{name}_ms"] / 1000 for name in ("wait", "lease") if f"{name}_ms" in command}
    return {"arguments": command.get("arguments"), "function": command.get("function"), **seconds}


def done(command: Dict[str, Any], result: Any) -> None:
    if isinstance(result, bytes):
        say(command, bytes=base64.b64encode(result).decode())
    else:
        say(command, done=result)


def failed(command: Dict[str, Any], error: BaseException) -> None:
    kind = type(error).__name__ if isinstance(error, Error) else "thrown"
    say(command, error=kind, detail=str(error))


def call(command: Dict[str, Any]) -> None:
    try:
        done(command, client.run(command["key"], lambda attempt: work(command, attempt), **options(command)))
    except Exception as error:
        failed(command, error)


async def call_async(command: Dict[str, Any]) -> None:
    async def of(attempt: Attempt) -> Any:
        return await work_async(command, attempt)

    try:
        done(command, await client.run(command["key"], of, **options(command)))
    except Exception as error:
        failed(command, error)


async def main_async() -> None:
    loop, running = asyncio.get_running_loop(), set()
    commands: "asyncio.Queue[Any]" = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(commands.put_nowait, json.loads(line))
        loop.call_soon_threadsafe(commands.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    while (command := await commands.get()) is not None:
        task = asyncio.ensure_future(call_async(command))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)


def main() -> None:
    if mode == "async":
        asyncio.run(main_async())
    else:
        threads = []
        for line in sys.stdin:
            threads.append(threading.Thread(target=call, args=(json.loads(line),)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    client.close()


if __name__ == "__main__":
    main()
