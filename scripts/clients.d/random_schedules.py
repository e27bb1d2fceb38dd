"""Random schedules: kills of clients and servers, pauses, cut connections; two servers over one store. The ledger of
effects and what the calls returned are the judge."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import defaultdict
from typing import Any, Dict, List, Set
from uuid import uuid4

from world import PATIENCE, Agent, Ended, Failed, Proxy, Server, World, check

LEASE_MS = 1_000
KEYS = 8
CALLS = 60
FAULTS = ["kill a client", "freeze a client", "kill a server", "cut connections"]


class Member:
    """An agent with its proxy, and the thread that reads what it says."""

    def __init__(self, run: "Run", language: str, server: Server) -> None:
        self.server, self.proxy = server, Proxy(server.address)
        self.agent = Agent(run.world, language, self.proxy.url)
        self.is_gone = False
        self._run = run
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                event = self.agent.next(PATIENCE)
            except (Ended, Failed):
                return
            self._run.note(event)

    def close(self) -> None:
        check(self.agent.close() == 0, self.agent.language, "ends")
        self._reader.join(PATIENCE)


class Run:
    def __init__(self, world: World, seed: int, store: str, languages: List[str]) -> None:
        self.world, self.seed, self.languages = world, seed, languages
        self.random = random.Random(seed)
        self.servers = [Server(world, store, LEASE_MS, attempts=100) for _ in range(2)]
        self.keys = [f"{uuid4()}" for _ in range(KEYS)]
        self.called: Dict[str, str] = {}
        self.results: Dict[str, Set[str]] = defaultdict(set)
        #: The calls that have not ended, and those of them that a fault has hit meanwhile.
        self.open: Dict[str, Member] = {}
        self.hit: Set[str] = set()
        #: The calls that ended by a release, and those that were told of the loss of their claim.
        self.released: Set[str] = set()
        self.lost: Set[str] = set()
        self.faults = {fault: 0 for fault in FAULTS}
        self._lock = threading.Lock()
        self.members = [self.member(at) for at in range(4)]

    def member(self, at: int) -> Member:
        return Member(self, self.languages[at % len(self.languages)], self.servers[at % 2])

    def note(self, event: Dict[str, Any]) -> None:
        with self._lock:
            key = self.called[event["id"]]
            if "done" in event:
                self.results[key].add(event["done"])
            if {"done", "error"} & set(event):
                self.open.pop(event["id"], None)
            if event.get("error") == "thrown":
                self.released.add(event["id"])
            if event.get("error") == "LeaseLost":
                self.lost.add(event["id"])

    def call(self, member: Member, key: str, **command: Any) -> str:
        name = uuid4().hex
        with self._lock:
            self.called[name] = key
            self.open[name] = member
        member.agent.call(key, id=name, result=name, **command)
        return name

    def hits(self, *members: Member) -> None:
        """A fault hits what these do now."""
        with self._lock:
            self.hit.update(name for name, member in self.open.items() if member in members)

    def fault(self) -> None:
        kind = self.random.choice(FAULTS)
        self.faults[kind] += 1
        at = self.random.randrange(len(self.members))
        member = self.members[at]
        if kind == "kill a client":
            self.hits(member)
            member.agent.kill()
            self.members[at] = self.member(at)
        elif kind == "freeze a client":
            self.hits(member)
            member.agent.stop()
            time.sleep(self.random.uniform(0.2, 1.8) * LEASE_MS / 1000)  # a fault, and no wait for a fact
            member.agent.signal(signal.SIGCONT)
        elif kind == "kill a server":
            server = self.random.choice(self.servers)
            self.hits(*(member for member in self.members if member.server is server))
            server.kill()
            server.start_again()
        else:
            self.hits(member)
            member.proxy.refuse(True)
            time.sleep(self.random.uniform(0, 1.2) * LEASE_MS / 1000)
            member.proxy.refuse(False)

    def go(self) -> None:
        for at in range(CALLS):
            member, key = self.random.choice(self.members), self.random.choice(self.keys)
            work = self.random.choice(["return", "return", "return", "later"])
            self.call(member, key, work=work, ms=self.random.choice([0, 5, 50, 200]))
            if at % 6 == 5:
                self.fault()
        # All is quiet now: each key is called until it has a result.
        last = Agent(self.world, self.languages[self.seed % len(self.languages)], self.servers[0].url)
        for key in self.keys:
            name = uuid4().hex
            self.called[name] = key
            last.call(key, id=name, result=name)
            self.results[key].add(last.done(name))
        check(last.close() == 0, "the last one ends")
        for member in self.members:
            member.close()

    def judge(self) -> str:
        effects: Dict[str, List[Dict[str, Any]]] = defaultdict(list)
        for effect in self.world.effects():
            effects[effect["key"]].append(effect)
        further = 0
        for key in self.keys:
            check(len(self.results[key]) == 1, "each call of a key has one result:", self.results[key])
            (result,) = self.results[key]
            others = [effect for effect in effects[key] if effect["effect"] != result]
            check(len(others) < len(effects[key]), "a result without its effect:", key)
            unexplained = [
                effect
                for effect in others
                if effect["effect"] not in self.hit | self.released | self.lost
            ]
            check(not unexplained, "second effects that no fault explains:", unexplained)
            further += len(others)
        return f"{len(self.called)} calls of {KEYS} keys, {further} further runs, all explained; {self.faults}"


def run(seed: int, store: str, languages: List[str]) -> str:
    with World() as world:
        schedule = Run(world, seed, store, languages)
        schedule.go()
        return schedule.judge()
