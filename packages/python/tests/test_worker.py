"""Workers in processes of their own, spoken to as `oncegate run` speaks to them."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

from oncegate import DeadLetter, Message, Retry, worker

SOURCES = pathlib.Path(__file__).resolve().parent.parent / "src"


class Process:
    """A worker whose handler is this text."""

    def __init__(self, folder, handler, decorator="@worker"):
        script = pathlib.Path(folder) / "script.py"
        prelude = "import asyncio, os, subprocess, sys\nfrom oncegate import DeadLetter, Message, Retry, worker\n"
        script.write_text(f"{prelude}{decorator}\n{handler}\nhandle.run()\n")
        environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.process = subprocess.Popen([sys.executable, script], env=environment, text=True, **pipes)
        self.ready = self.read()

    def read(self):
        return json.loads(self.process.stdout.readline())

    def give(self, id, payload="{}", **fields):
        origin = {"kafka": {"topic": "orders", "partition": 3, "offset": 42}}
        line = dict(type="message", v=1, id=id, idempotency_key="8e03978e", attempt=1, recovered=False, lease_ms=30000)
        line.update(origin=origin, headers=[], payload=payload)
        self.send(**{**line, **fields})

    def send(self, **line):
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def answer(self, payload="{}", **fields):
        self.give("17", payload, **fields)
        answer = self.read()
        assert answer.pop("id") == "17", answer
        return answer

    def end(self):
        """The exit code after the end of its input, what was left on its standard output, and its standard error."""
        out, err = self.process.communicate()
        return self.process.returncode, out, err


class WorkerTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def start(self, handler, decorator="@worker"):
        process = Process(self.folder, handler, decorator)
        self.addCleanup(lambda: (process.process.kill(), process.process.communicate()))
        return process

    def test_each_outcome_is_answered(self):
        process = self.start(
            "def handle(message):\n"
            "    order = message.json()\n"
            "    if order == 'retry': raise Retry('busy', delay=0.5)\n"
            "    if order == 'soon': raise Retry('busy')\n"
            "    if order == 'dead': raise DeadLetter('no such account')\n"
            "    if order == 'bug': return {}['missing']\n"
            "    if order == 'exit': sys.exit(3)\n"
            "    return order"
        )
        self.assertEqual(process.ready, {"type": "ready", "v": 1, "max_in_flight": 1})
        self.assertEqual(process.answer("[9007199254740993]"), {"outcome": "complete", "result": [9007199254740993]})
        self.assertEqual(process.answer("null"), {"outcome": "complete"})
        self.assertEqual(process.answer('"retry"'), {"outcome": "retry", "reason": "busy", "delay_ms": 500})
        self.assertEqual(process.answer('"soon"'), {"outcome": "retry", "reason": "busy"})
        self.assertEqual(process.answer('"dead"'), {"outcome": "dead-letter", "reason": "no such account"})
        self.assertEqual(process.answer('"bug"'), {"outcome": "retry", "reason": "KeyError: 'missing'"})
        self.assertEqual(process.answer('"exit"'), {"outcome": "retry", "reason": "SystemExit: 3"})
        garbage = process.answer(payload_base64="/w==")
        self.assertEqual(garbage, {"outcome": "dead-letter", "reason": "the payload is no JSON: UnicodeDecodeError"})
        code, out, err = process.end()
        self.assertEqual((code, out), (0, ""))
        self.assertIn("KeyError: 'missing'", err)

    def test_a_message_has_what_the_line_has(self):
        process = self.start(
            "def handle(message):\n"
            "    m = message\n"
            "    first = [None if m.payload is None else m.payload.hex(), m.idempotency_key, m.attempt, m.recovered, m.lease, m.fencing_token]\n"
            "    return first + [dict(m.origin), m.key and m.key.hex(), [[n, v and v.hex()] for n, v in m.headers],\n"
            "        m.headers_left_out, m.header('a') and m.header('a').hex()]"
        )
        fields = {"key_base64": "/w==", "headers": [["a", "x"], ["a", {"base64": "/g=="}], ["b", None]], "fencing_token": 7}
        answer = process.answer(None, payload_base64="/w==", attempt=2, recovered=True, headers_left_out=1, **fields)
        kafka = {"kafka": {"topic": "orders", "partition": 3, "offset": 42}}
        headers = [["a", "78"], ["a", "fe"], ["b", None]]
        expected = ["ff", "8e03978e", 2, True, 30.0, 7, kafka, "ff", headers, 1, "fe"]
        self.assertEqual(answer, {"outcome": "complete", "result": expected})
        tombstone = process.answer(None)["result"]
        self.assertEqual((tombstone[0], tombstone[5], tombstone[7]), (None, None, None))
        self.assertEqual(process.answer("")["result"][0], "")

    def test_what_is_printed_does_not_reach_the_protocol(self):
        process = self.start(
            "def handle(message):\n"
            "    print('charging')\n"
            "    os.write(1, b'written\\n')\n"
            "    left = subprocess.run(['cat'], check=True, capture_output=True).stdout\n"
            "    subprocess.run(['echo', 'by a child'], check=True)\n"
            "    return left.decode()"
        )
        self.assertEqual(process.answer(), {"outcome": "complete", "result": ""})
        self.assertEqual(process.answer(), {"outcome": "complete", "result": ""})
        code, out, err = process.end()
        self.assertEqual((code, out), (0, ""))
        for printed in ("charging", "written", "by a child"):
            self.assertEqual(err.count(printed), 2, err)

    def test_a_result_that_cannot_be_kept_is_left_out(self):
        process = self.start("def handle(message): return eval(message.payload)")
        for result in ("b'bytes'", "float('nan')", "'\\ud800'", "'x' * 17_000_000"):
            self.assertEqual(process.answer(result), {"outcome": "complete"}, result)
        self.assertEqual(process.end()[2].count("completed without it"), 4)

    def test_a_handler_that_returns_an_awaitable_has_not_run(self):
        process = self.start("def handle(message):\n    async def later(): pass\n    return later()")
        self.assertEqual(process.answer()["outcome"], "retry")

    def test_messages_run_at_the_same_time_and_are_answered_in_any_order(self):
        # Each message waits until another one has come: one at a time would wait forever.
        function = "import threading\nmeet = threading.Barrier(3)\ndef handle(message): meet.wait()"
        coroutine = (
            "here = []\n"
            "async def handle(message):\n"
            "    here.append(message)\n"
            "    while len(here) < 3: await asyncio.sleep(0.001)"
        )
        for handler in (function, coroutine):
            lines, definition = handler.rsplit("\n" + ("async def" if "async def" in handler else "def"), 1)
            definition = ("async def" if "async def" in handler else "def") + definition
            process = self.start(definition, f"{lines}\n@worker(max_in_flight=3)")
            self.assertEqual(process.ready["max_in_flight"], 3)
            for id in ("1", "2", "3"):
                process.give(id)
            answers = [process.read() for _ in range(3)]
            self.assertEqual(sorted(answer["id"] for answer in answers), ["1", "2", "3"])
            self.assertEqual(process.end()[0], 0)

    def test_a_cancelled_message_is_answered(self):
        function = "def handle(message):\n    message.cancelled.wait()\n    raise Retry('cancelled')"
        coroutine = "async def handle(message): await asyncio.Event().wait()"
        for handler in (function, coroutine):
            process = self.start(handler)
            process.give("17")
            process.send(type="cancel", id="17")
            self.assertEqual(process.read(), {"id": "17", "outcome": "retry", "reason": "cancelled"})
            # Too late, or never there.
            process.send(type="cancel", id="17")
            process.send(type="something-new", id="18")
            self.assertEqual(process.end()[:2], (0, ""))

    def test_a_coroutine_that_exits_does_not_end_the_others(self):
        process = self.start("async def handle(message):\n    if message.json(): sys.exit(3)")
        self.assertEqual(process.ready["max_in_flight"], 16)
        self.assertEqual(process.answer("1"), {"outcome": "retry", "reason": "SystemExit: 3"})
        self.assertEqual(process.answer("0"), {"outcome": "complete"})

    def test_what_runs_at_the_end_of_input_is_finished(self):
        for kind in ("", "async "):
            process = self.start(f"{kind}def handle(message):\n    print('begun', file=sys.stderr, flush=True)\n    return 1")
            process.give("17")
            code, out, _ = process.end()
            self.assertEqual((code, json.loads(out)), (0, {"id": "17", "outcome": "complete", "result": 1}))

    def test_sigterm_ends_it(self):
        process = self.start("def handle(message):\n    message.cancelled.wait()")
        process.give("17")
        process.process.send_signal(signal.SIGTERM)
        self.assertEqual(process.process.wait(), -signal.SIGTERM)


class FunctionTest(unittest.TestCase):
    def test_a_worker_is_still_a_function(self):
        @worker(max_in_flight=2)
        def charge(message: Message) -> object:
            """Charges."""
            return message.json()["order_id"]

        self.assertEqual(charge(Message(b'{"order_id": "A-7"}')), "A-7")
        self.assertEqual((charge.__name__, charge.__doc__, charge.max_in_flight), ("charge", "Charges.", 2))
        for payload in (b"", b"{", b"\xff", b"[" * 100_000, None):
            with self.assertRaises(DeadLetter):
                charge(Message(payload))

    def test_wrong_numbers_are_refused(self):
        for delay in (-1, float("nan"), float("inf")):
            with self.assertRaises(ValueError):
                Retry("busy", delay=delay)
        with self.assertRaises(ValueError):
            worker(lambda message: None, max_in_flight=0)


if __name__ == "__main__":
    unittest.main()
