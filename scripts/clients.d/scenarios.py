"""The scenarios that the client of every language must pass. They wait for facts, and never for a time."""

from __future__ import annotations

import signal
from typing import Any, Callable, List
from uuid import uuid4

from world import Agent, Proxy, Server, World, check

SCENARIOS: List[Callable[["Stage"], None]] = []


def scenario(of: Callable[["Stage"], None]) -> Callable[["Stage"], None]:
    SCENARIOS.append(of)
    return of


class Stage:
    """Two agents of one language that share a server."""

    def __init__(self, world: World, language: str, store: str) -> None:
        self.world, self.language, self.store = world, language, store
        self.server = Server(world, store)
        self.one, self.two = self.agent(), self.agent()

    def agent(self, url: str = "", scope: str = "jobs", **environment: str) -> Agent:
        return Agent(self.world, self.language, url or self.server.url, scope, **environment)

    def effects(self, key: Any) -> List[int]:
        return [effect["attempt"] for effect in self.world.effects() if effect["key"] == key]


@scenario
def the_first_call_runs_and_duplicates_get_its_result(stage: Stage) -> None:
    result = {"pages": 12, "text": "ä\u2028\"\\ \U0001f4d6", "list": [1, 2.5, None, True, {}]}
    night = {"job": "nightly", "at": str(uuid4())}
    check(stage.one.done(stage.one.call(night, result=result)) == result, "the first call returns its result")
    for agent in (stage.one, stage.two):
        name = agent.call(night, result="another")
        check(agent.done(name) == result, "a duplicate gets the first result")
        check(not agent.has_begun(name), "a duplicate does not run")
    check(stage.effects(night) == [1], "one effect")
    key = str(uuid4())
    check(stage.one.done(stage.one.call(key, bytes="AP8Bgg==")) == "AP8Bgg==", "bytes are a result")
    check(stage.two.done(stage.two.call(key, bytes="")) == "AP8Bgg==", "and come back")
    key = str(uuid4())
    check(stage.one.done(stage.one.call(key)) is None, "so is none")
    check(stage.two.done(stage.two.call(key)) is None and stage.effects(key) == [1], "which is one, too")


@scenario
def one_that_waits_gets_the_result_of_one_that_runs_and_another_is_busy(stage: Stage) -> None:
    key, flag = str(uuid4()), stage.world.flag()
    first = stage.one.call(key, result=7, until=str(flag))
    stage.one.began(first)
    check(stage.two.error(stage.two.call(key, wait_ms=0)) == "Busy", "busy at once, if that is wanted")
    waits = [agent.call(key, result=8) for agent in (stage.one, stage.two)]
    flag.touch()
    check([stage.one.done(waits[0]), stage.two.done(waits[1])] == [7, 7], "both get the result")
    check(stage.one.done(first) == 7 and stage.effects(key) == [1], "one effect")


@scenario
def a_failure_is_tried_again_until_all_attempts_are_used_up(stage: Stage) -> None:
    key = str(uuid4())
    for attempt in (1, 2, 3):
        agent = (stage.one, stage.two)[attempt % 2]
        name = agent.call(key, "raise")
        check(agent.began(name)["attempt"] == attempt, "attempts are counted")
        check(agent.end(name)["error"] == "thrown", "the error is passed on")
    end = stage.two.end(stage.two.call(key))
    check(end["error"] == "GivenUp" and "the bank is closed" in end["detail"], "given up with the reason:", end)
    key = str(uuid4())
    stage.one.end(stage.one.call(key, "raise"))
    check(stage.two.done(stage.two.call(key, result=2)) == 2, "the next attempt succeeds")
    check(stage.effects(key) == [1, 2], "two attempts")


@scenario
def a_permanent_failure_is_final_and_work_for_later_has_not_failed(stage: Stage) -> None:
    key = str(uuid4())
    check(stage.one.error(stage.one.call(key, "permanent")) == "thrown", "the error is passed on")
    end = stage.two.end(stage.two.call(key))
    check(end["error"] == "GivenUp" and "no such user" in end["detail"], "no attempt follows:", end)
    key = str(uuid4())
    for _again in range(4):
        name = stage.one.call(key, "later")
        check(stage.one.began(name)["attempt"] == 1, "it counts as no attempt")
        stage.one.end(name)
    check(stage.one.done(stage.one.call(key, result=1)) == 1, "and is done at last")


@scenario
def other_arguments_are_a_mismatch_and_another_function_is_another_key(stage: Stage) -> None:
    key = str(uuid4())
    stage.one.done(stage.one.call(key, result=1, arguments={"amount": 5}))
    check(stage.two.error(stage.two.call(key, arguments={"amount": 6})) == "Mismatch", "other arguments")
    check(stage.two.done(stage.two.call(key, arguments={"amount": 5.0})) == 1, "equal ones")
    check(stage.two.done(stage.two.call(key, function="charge", result=2)) == 2, "another function")
    check(len(stage.effects(key)) == 2, "two effects")


@scenario
def nothing_runs_without_a_key_a_token_a_scope_or_a_server(stage: Stage) -> None:
    keys: List[Any] = [None, "", " ", {}, [], {"job": None}]
    for key in keys:
        check(stage.one.error(stage.one.call(key)) == "Refused", "the key", key)
        check(not stage.effects(key), "nothing ran")
    wrong = {
        "Refused": [
            stage.agent(ONCEGATE_TOKEN="another-token-of-the-tests"),
            stage.agent(scope="others"),
            stage.agent(scope="nowhere"),
        ],
        # The port of a server that is away: nothing listens on it.
        "Unavailable": [stage.agent("http://127.0.0.1:1", AGENT_PATIENCE="0.2")],
    }
    for kind, agents in wrong.items():
        for agent in agents:
            name = agent.call("no key of any other scenario")
            check(agent.error(name) == kind, kind)
            check(not agent.has_begun(name), "nothing ran")
            check(agent.close() == 0, "and it ends")


@scenario
def a_scope_with_a_key_specification_reads_the_key_as_its_document(stage: Stage) -> None:
    agent, order = stage.agent(scope="orders"), str(uuid4())
    first = agent.call({"order_id": order, "sent": 1}, result=1)
    check(agent.began(first)["fenced"], "the scope is fenced")
    check(agent.done(first) == 1, "it runs")
    check(agent.done(agent.call({"order_id": order, "sent": 2}, result=2)) == 1, "the order was known")
    check(agent.error(agent.call({"id": order})) == "Refused", "no order")
    check(agent.close() == 0, "it ends")


@scenario
def a_function_that_computes_or_waits_keeps_its_claim(stage: Stage) -> None:
    # A machine that stops for seconds may cost a claim, so one of three must be kept past its first lease.
    for _again in range(3):
        proxy, flag = Proxy(stage.server.address), stage.world.flag()
        agents = [stage.agent(proxy.url), stage.agent(proxy.url)]
        works = zip(agents, ("compute", "wait"))
        calls = [(agent, agent.call(str(uuid4()), work, lease_ms=4_000, until=str(flag), result=1)) for agent, work in works]
        for agent, name in calls:
            agent.began(name)
        proxy.wait_for("/v1/claims/extend extended", 8)
        flag.touch()
        ends = [agent.end(name).get("done") for agent, name in calls]
        check(all(agent.close() == 0 for agent in agents), "both end")
        if ends == [1, 1]:
            return
    check(False, "each time one was cancelled, or taken over")


@scenario
def a_frozen_owner_is_taken_over_and_refused_when_it_thaws(stage: Stage) -> None:
    key, flag, agent = str(uuid4()), stage.world.flag(), stage.agent()
    stale = agent.call(key, result="stale", lease_ms=500, until=str(flag), ignores=True)
    agent.began(stale)
    agent.stop()
    name = stage.two.call(key, result="second")
    taken = stage.two.began(name)
    check(taken["attempt"] == 2 and taken["recovered"], "it is told that it took over:", taken)
    check(stage.two.done(name) == "second", "it completes")
    flag.touch()
    agent.signal(signal.SIGCONT)
    check(agent.error(stale) == "LeaseLost", "the stale owner is refused")
    check(stage.one.done(stage.one.call(key)) == "second", "the first completion is final")
    check(agent.close() == 0, "it ends")


@scenario
def a_killed_owner_is_taken_over(stage: Stage) -> None:
    key, agent = str(uuid4()), stage.agent()
    agent.began(agent.call(key, lease_ms=500, until="/never"))
    agent.kill()
    name = stage.two.call(key, result=2)
    taken = stage.two.began(name)
    check(taken["attempt"] == 2 and taken["recovered"], "it is told that it took over:", taken)
    check(stage.two.done(name) == 2, "it completes")


@scenario
def a_function_whose_claim_is_lost_is_cancelled(stage: Stage) -> None:
    proxy = Proxy(stage.server.address)
    agent = stage.agent(proxy.url)
    name = agent.call(str(uuid4()), lease_ms=1_000, until="/never")
    agent.began(name)
    proxy.refuse(True)
    agent.event(name, lambda event: "cancelled" in event)
    proxy.refuse(False)
    check(agent.error(name) == "LeaseLost", "and the call has no result")
    check(agent.close() == 0, "it ends")


@scenario
def lost_answers_are_asked_for_again(stage: Stage) -> None:
    proxy, key = Proxy(stage.server.address), str(uuid4())
    agent = stage.agent(proxy.url)
    proxy.lose_next_reply("/v1/claims")
    proxy.lose_next_reply("/v1/claims/complete")
    name = agent.call(key, result=1)
    began = agent.began(name)
    check(began["attempt"] == 1 and not began["recovered"], "the repeated claim gets the same grant:", began)
    check(agent.done(name) == 1, "the repeated completion is applied again")
    passed = ["lost /v1/claims granted", "/v1/claims granted"]
    passed += ["lost /v1/claims/complete completed", "/v1/claims/complete completed"]
    check(proxy.answered == passed, "each was sent twice:", proxy.answered)
    check(stage.effects(key) == [1], "one effect")
    proxy.lose_next_reply("/v1/claims/release")
    check(agent.error(agent.call(key + "b", "raise")) == "thrown", "a release is repeated, too")
    check(agent.began(agent.call(key + "b", result=2))["attempt"] == 2, "and counted once")
    check(agent.close() == 0, "it ends")


@scenario
def a_server_that_is_killed_loses_no_claim(stage: Stage) -> None:
    server, key, flag = Server(stage.world, stage.store), str(uuid4()), stage.world.flag()
    agent = stage.agent(server.url)
    name = agent.call(key, result=1, until=str(flag))
    agent.began(name)
    server.kill()
    check(stage.two.error(stage.two.call(key, wait_ms=0)) == "Busy", "another server knows the claim")
    flag.touch()
    server.start_again()
    check(agent.done(name) == 1, "the completion waited for the server")
    check(stage.two.done(stage.two.call(key)) == 1 and stage.effects(key) == [1], "one effect")
    check(agent.close() == 0, "it ends")


@scenario
def a_result_that_is_too_large_is_lost_and_the_work_is_done(stage: Stage) -> None:
    for size in (100_000, 400_000):
        key, large = str(uuid4()), "r" * size
        check(stage.one.done(stage.one.call(key, result=large)) == large, "the first call has it")
        check(stage.two.error(stage.two.call(key)) == "ResultLost", "a duplicate has not")
        check(stage.effects(key) == [1], "one effect")


@scenario
def recipe_a_cron_tick_of_three_replicas_runs_once(stage: Stage) -> None:
    late = stage.agent()
    tick = {"job": "report", "at": f"2026-11-29T03:00:00Z {uuid4()}"}
    calls = [(agent, agent.call(tick, wait_ms=0, result="12 pages")) for agent in (stage.one, stage.two)]
    ends = [agent.end(name) for agent, name in calls]
    check(any(end.get("done") == "12 pages" for end in ends), "one of them has run it:", ends)
    check(all(end.get("error", "Busy") == "Busy" for end in ends), "the other one knows:", ends)
    check(late.done(late.call(tick, wait_ms=0)) == "12 pages", "a replica that comes late gets the result")
    check(stage.effects(tick) == [1], "one effect")
    check(late.close() == 0, "it ends")


@scenario
def recipe_a_nightly_job_that_is_killed_in_the_middle_is_done(stage: Stage) -> None:
    night, flag = {"job": "archive", "night": str(uuid4())}, stage.world.flag()
    for attempt in (1, 2):
        agent = stage.agent()
        began = agent.began(agent.call(night, lease_ms=500, until=str(flag)))
        check(began["attempt"] == attempt and began["recovered"] == (attempt > 1), "it is told:", began)
        agent.kill()
    flag.touch()
    check(stage.one.done(stage.one.call(night, until=str(flag), result="done")) == "done", "the third one ends it")
    check(stage.two.done(stage.two.call(night)) == "done", "and that is final")


@scenario
def recipe_a_tool_that_an_agent_calls_twice_acts_once(stage: Stage) -> None:
    step = {"conversation": str(uuid4()), "step": 7, "tool": "transfer"}
    paid = stage.one.call(step, arguments={"to": "A-7", "amount": 100}, result={"transfer": "T-1"})
    check(stage.one.done(paid) == {"transfer": "T-1"}, "it is carried out")
    again = stage.two.call(step, arguments={"amount": 1e2, "to": "A-7"}, result={"transfer": "T-2"})
    check(stage.two.done(again) == {"transfer": "T-1"}, "the repetition gets the first answer")
    check(stage.two.error(stage.two.call(step, arguments={"to": "A-7", "amount": 900})) == "Mismatch", "not another amount")
    check(stage.effects(step) == [1], "one transfer")


@scenario
def an_agent_that_is_told_to_end_finishes_what_runs(stage: Stage) -> None:
    flag = stage.world.flag()
    name = stage.one.call(str(uuid4()), result=1, until=str(flag))
    stage.one.began(name)
    flag.touch()
    check(stage.one.close() == 0 and stage.two.close() == 0, "both end")
    check(stage.one.done(name) == 1, "with its result")
