"""Workers in processes of their own, spoken to as `oncegate run` speaks to them."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

from oncegate import DeadLetter, Later, Message, Retry, batch_worker, worker

SOURCES = pathlib.Path(__file__).resolve().parent.parent / "src"


class Process:
    """A worker whose handler is this text."""

    def __init__(self, folder, handler, decorator="@worker"):
        script = pathlib.Path(folder) / "script.py"
        prelude = "import asyncio, os, subprocess, sys\nfrom oncegate import DeadLetter, Later, Message, Retry, batch_worker, worker\n"
        script.write_text(f"{prelude}{decorator}\n{handler}\nhandle.run()\n")
        environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.process = subprocess.Popen([sys.executable, script], env=environment, text=True, **pipes)
        self.ready = self.read()

    def read(self):
        return json.loads(self.process.stdout.readline())

    def line(self, id, payload="{}", **fields):
        origin = {"kafka": {"topic": "orders", "partition": 3, "offset": 42}}
        line = dict(type="message", v=1, id=id, idempotency_key="8e03978e", attempt=1, recovered=False, lease_ms=30000)
        line.update(origin=origin, headers=[], payload=payload)
        return {**line, **fields}

    def give(self, id, payload="{}", **fields):
        self.send(**self.line(id, payload, **fields))

    def give_batch(self, **payloads):
        """Messages whose ids are the names."""
        self.send(type="batch", v=1, messages=[self.line(id, payload) for id, payload in payloads.items()])

    def outcomes(self, **payloads):
        """The answers to a batch, by id and in their order."""
        self.give_batch(**payloads)
        answers = [self.read() for _ in payloads]
        return {answer.pop("id"): answer for answer in answers}

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


class WorkerCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def start(self, handler, decorator="@worker"):
        process = Process(self.folder, handler, decorator)
        self.addCleanup(lambda: (process.process.kill(), process.process.communicate()))
        return process


class WorkerTest(WorkerCase):
    def test_each_outcome_is_answered(self):
        process = self.start(
            "def handle(message):\n"
            "    order = message.json()\n"
            "    if order == 'retry': raise Retry('busy', delay=0.5)\n"
            "    if order == 'soon': raise Retry('busy')\n"
            "    if order == 'later': raise Later('it opens at nine', delay=30)\n"
            "    if order == 'sometime': raise Later('not ready')\n"
            "    if order == 'dead': raise DeadLetter('no such account')\n"
            "    if order == 'bug': return {}['missing']\n"
            "    if order == 'exit': sys.exit(3)\n"
            "    return order"
        )
        self.assertEqual(process.ready, {"type": "ready", "v": 1, "max_in_flight": 1, "ahead": 16})
        self.assertEqual(process.answer("[9007199254740993]"), {"outcome": "complete", "result": [9007199254740993]})
        self.assertEqual(process.answer("null"), {"outcome": "complete"})
        self.assertEqual(process.answer('"retry"'), {"outcome": "retry", "reason": "busy", "delay_ms": 500})
        self.assertEqual(process.answer('"soon"'), {"outcome": "retry", "reason": "busy"})
        later = {"outcome": "later", "reason": "it opens at nine", "delay_ms": 30000}
        self.assertEqual(process.answer('"later"'), later)
        self.assertEqual(process.answer('"sometime"'), {"outcome": "later", "reason": "not ready"})
        self.assertEqual(process.answer('"dead"'), {"outcome": "dead-letter", "reason": "no such account"})
        self.assertEqual(process.answer('"bug"'), {"outcome": "retry", "reason": "KeyError: 'missing'"})
        self.assertEqual(process.answer('"exit"'), {"outcome": "retry", "reason": "SystemExit: 3"})
        garbage = process.answer(payload_base64="/w==")
        self.assertEqual(garbage, {"outcome": "dead-letter", "reason": "the payload is no JSON: UnicodeDecodeError"})
        code, out, err = process.end()
        self.assertEqual((code, out), (0, ""))
        self.assertIn("KeyError: 'missing'", err)

    def test_what_is_ahead_begins_after_an_answer_or_never(self):
        """The first message waits until its cancellation, and those behind it have not begun."""
        process = self.start(
            "def handle(message):\n"
            "    print('begun', message.idempotency_key, flush=True)\n"
            "    if message.json() == 'wait': message.cancelled.wait()\n"
        )
        process.give("1", '"wait"', idempotency_key="k1")
        for id in ["2", "3", "4"]:
            process.give(id, idempotency_key=f"k{id}")
        # What has begun is not recalled, and what has not is.
        process.send(type="recall", id="1")
        process.send(type="recall", id="3")
        self.assertEqual(process.read(), {"id": "3", "outcome": "not-run"})
        process.send(type="cancel", id="4")
        self.assertEqual(process.read(), {"id": "4", "outcome": "not-run"})
        process.send(type="cancel", id="1")
        self.assertEqual(process.read(), {"id": "1", "outcome": "complete"})
        self.assertEqual(process.read(), {"id": "2", "outcome": "complete"})
        for kind in ["recall", "cancel"]:
            process.send(type=kind, id="2")
        code, out, err = process.end()
        self.assertEqual((code, out), (0, ""))
        self.assertEqual(err.split("\n"), ["begun k1", "begun k2", ""])

    def test_nothing_begins_after_the_end_of_input(self):
        process = self.start("def handle(message):\n    if message.json() == 'wait': message.cancelled.wait(0.5)\n")
        process.give("1", '"wait"')
        process.give("2")
        code, out, _ = process.end()
        answers = {answer["id"]: answer["outcome"] for answer in map(json.loads, out.splitlines())}
        self.assertEqual((code, answers), (0, {"1": "complete", "2": "not-run"}))

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

    def test_whatever_the_result_is_the_message_is_completed(self):
        deep = "def nested():\n    result = []\n    for _ in range(10_000): result = [result]\n    return result\n"
        hostile = "class Hostile(dict):\n    def items(self): raise ZeroDivisionError\n"
        imports = "import datetime, decimal\n"
        for handler in ("def handle(message)", "async def handle(message)"):
            lines = f"{imports}{deep}{hostile}@worker\n{handler}: return eval(message.payload)"
            process = self.start(lines, "")
            for result in ("nested()", "Hostile(a=1)", "datetime.datetime.now()", "decimal.Decimal(1)", "{('a',): 1}"):
                self.assertEqual(process.answer(result), {"outcome": "complete"}, result)
            self.assertEqual(process.end()[2].count("completed without it"), 5)

    def test_an_error_without_a_text_is_an_answer(self):
        error = "class Silent(Exception):\n    def __str__(self): raise ValueError('no text')\n"
        for handler in ("def handle(message)", "async def handle(message)"):
            process = self.start(f"{error}@worker\n{handler}: raise eval(message.payload)", "")
            self.assertEqual(process.answer("Silent()")["outcome"], "retry")
            self.assertEqual(process.answer("DeadLetter(Silent())")["outcome"], "dead-letter")
            self.assertEqual(process.answer("DeadLetter(7)"), {"outcome": "dead-letter", "reason": "7"})
            self.assertEqual(process.end()[0], 0)

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


#: Handlers of batches: a function, and a coroutine function that handles the messages at the same time.
ONE_OF_A_BATCH = (
    "def one(order):\n"
    "    if order == 'retry': return Retry('busy', delay=0.5)\n"
    "    if order == 'later': return Later('not ready', delay=1.5)\n"
    "    if order == 'dead': raise DeadLetter('no such account')\n"
    "    if order == 'bug': return {}['missing']\n"
    "    if order == 'bytes': return b'no JSON'\n"
    "    return order\n"
)
BATCH_FUNCTION = (
    "def caught(message):\n"
    "    try: return one(message.json())\n"
    "    except Exception as error: return error\n"
    "@batch_worker\n"
    "def handle(batch): return [caught(message) for message in batch]"
)
BATCH_COROUTINE = (
    "async def alone(message): return one(message.json())\n"
    "@batch_worker\n"
    "async def handle(batch): return await asyncio.gather(*map(alone, batch), return_exceptions=True)"
)


class BatchTest(WorkerCase):
    def test_each_message_of_a_batch_has_its_own_outcome(self):
        for handler, at_a_time in ((BATCH_FUNCTION, 1), (BATCH_COROUTINE, 16)):
            process = self.start(ONE_OF_A_BATCH + handler, "")
            self.assertEqual(process.ready, {"type": "ready", "v": 1, "max_in_flight": at_a_time, "batches": True})
            payloads = dict(a='{"n":1}', b='"retry"', c='"later"', d='"dead"', e='"bug"', f='"bytes"', g="{", h="null")
            answers = process.outcomes(**payloads)
            self.assertEqual(list(answers), list(payloads))
            self.assertEqual(answers["a"], {"outcome": "complete", "result": {"n": 1}})
            self.assertEqual(answers["b"], {"outcome": "retry", "reason": "busy", "delay_ms": 500})
            self.assertEqual(answers["c"], {"outcome": "later", "reason": "not ready", "delay_ms": 1500})
            self.assertEqual(answers["d"], {"outcome": "dead-letter", "reason": "no such account"})
            self.assertEqual(answers["e"], {"outcome": "retry", "reason": "KeyError: 'missing'"})
            self.assertEqual(answers["f"], {"outcome": "complete"})
            self.assertEqual(answers["g"]["outcome"], "dead-letter")
            self.assertEqual(answers["h"], {"outcome": "complete"})
            # What `oncegate run` gives without `batch`, and `worker-test` always.
            self.assertEqual(process.answer("1"), {"outcome": "complete", "result": 1})
            code, out, err = process.end()
            self.assertEqual((code, out), (0, ""))
            self.assertIn("KeyError: 'missing'", err)

    def test_what_concerns_the_batch_is_the_outcome_of_each(self):
        bodies = {
            "raise OSError('the database is away')": ("retry", "OSError: the database is away"),
            "raise Later('not yet')": ("later", "not yet"),
            "raise DeadLetter('no')": ("retry", "no"),
            "sys.exit(3)": ("retry", "SystemExit: 3"),
            "return [1, 2, 3]": ("retry", "ValueError: the handler returned 3 outcomes for 2 messages"),
            "return dict(a=1, b=2)": ("retry", "TypeError: the handler returned a value of type dict; it returns"),
            "return 'ok'": ("retry", "TypeError: the handler returned a value of type str; it returns"),
            "return None": ("complete", None),
        }
        for kind in ("", "async "):
            for body, (outcome, reason) in bodies.items():
                process = self.start(f"{kind}def handle(batch): {body}", "@batch_worker(max_in_flight=2)")
                answers = process.outcomes(a="1", b="2")
                self.assertEqual(list(answers), ["a", "b"])
                for answer in answers.values():
                    self.assertEqual(answer["outcome"], outcome, answer)
                    self.assertTrue((answer.get("reason") or "").startswith(reason or ""), answer)
                # The process goes on, and an error of one message is its own.
                alone = process.outcomes(c="3")["c"]
                self.assertEqual(alone["outcome"], "dead-letter" if "DeadLetter" in body else answer["outcome"], body)
                self.assertEqual(process.end()[0], 0)

    def test_an_awaitable_that_is_not_awaited_is_no_result(self):
        process = self.start("async def one(): pass\n@batch_worker\ndef handle(batch): return [one(), 2]", "")
        answers = process.outcomes(a="1", b="2")
        self.assertEqual((answers["a"]["outcome"], answers["b"]["outcome"]), ("retry", "complete"))
        process = self.start("async def all(batch): pass\n@batch_worker\ndef handle(batch): return all(batch)", "")
        self.assertEqual([answer["outcome"] for answer in process.outcomes(a="1", b="2").values()], ["retry", "retry"])

    def test_a_batch_is_cancelled_when_each_of_its_messages_is(self):
        function = (
            "def handle(batch):\n"
            "    batch[0].cancelled.wait()\n"
            "    print('first', file=sys.stderr, flush=True)\n"
            "    batch[1].cancelled.wait()\n"
            "    raise Retry('cancelled')"
        )
        coroutine = (
            "async def handle(batch):\n"
            "    while not batch[0].cancelled.is_set(): await asyncio.sleep(0.001)\n"
            "    print('first', file=sys.stderr, flush=True)\n"
            "    await asyncio.Event().wait()"
        )
        for handler in (function, coroutine):
            process = self.start(handler, "@batch_worker")
            process.give_batch(a="1", b="2")
            process.send(type="cancel", id="a")
            self.assertEqual(process.process.stderr.readline(), "first\n")
            process.send(type="cancel", id="b")
            for id in ("a", "b"):
                self.assertEqual(process.read(), {"id": id, "outcome": "retry", "reason": "cancelled"})
            self.assertEqual(process.end()[:2], (0, ""))


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

    def test_a_worker_for_batches_is_still_a_function(self):
        @batch_worker
        def charge(batch: "list[Message]") -> "list[object]":
            """Charges."""
            return [message.json() for message in batch]

        self.assertEqual(charge([Message(b"1"), Message(b"2")]), [1, 2])
        self.assertEqual((charge.__name__, charge.__doc__, charge.max_in_flight), ("charge", "Charges.", 1))

    def test_wrong_numbers_are_refused(self):
        for delay in (-1, float("nan"), float("inf")):
            for outcome in (Retry, Later):
                with self.assertRaises(ValueError):
                    outcome("busy", delay=delay)
        for decorator in (worker, batch_worker):
            with self.assertRaises(ValueError):
                decorator(lambda message: None, max_in_flight=0)


if __name__ == "__main__":
    unittest.main()
