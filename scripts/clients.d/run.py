"""Runs the scenarios in every language, and random schedules of faults. Started by scripts/clients."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Iterator, List, Optional, Tuple

import random_schedules
import scenarios
from world import AGENTS, PATIENCE, World


@contextmanager
def redis() -> Iterator[str]:
    """The Redis of the run, or one of its own."""
    if url := os.environ.get("ONCEGATE_TEST_REDIS"):
        yield url
        return
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
        server = subprocess.Popen(command + ["--appendonly", "yes"], stdout=subprocess.DEVNULL)
        try:
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until and server.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    time.sleep(0.02)
            yield f"redis://127.0.0.1:{port}"
        finally:
            server.kill()
            server.wait()


def in_language(language: str, store: str, redis_url: str, only: Optional[str]) -> List[Tuple[str, str]]:
    """Runs the scenarios; returns what failed."""
    failed = []
    with World() as world:
        place = {"sqlite": f"sqlite:{world.folder}/store.db", "redis": redis_url}[store]
        stage = scenarios.Stage(world, language, place)
        for scenario in scenarios.SCENARIOS:
            if only and only not in scenario.__name__:
                continue
            try:
                scenario(stage)
            except Exception as error:
                trace = "".join(traceback.format_exception(type(error), error, error.__traceback__)[-3:])
                failed.append((f"{language} on {store}: {scenario.__name__}", trace))
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--languages", default=",".join(AGENTS))
    parser.add_argument("--stores", default="sqlite,redis")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only")
    chosen = parser.parse_args()
    languages, stores = chosen.languages.split(","), chosen.stores.split(",")
    began, failed = time.monotonic(), []
    with redis() as redis_url, ThreadPoolExecutor(3) as pool:
        # Each language on the first store, and the first language on each.
        runs = [(language, stores[0]) for language in languages] + [(languages[0], store) for store in stores[1:]]
        tried = pool.map(lambda run: in_language(run[0], run[1], redis_url, chosen.only), runs)
        for run, found in zip(runs, tried):
            failed += found
            print(f"    {run[0]} on {run[1]}: {'failed' if found else 'passed'}", flush=True)
        for seed in range(chosen.first_seed, chosen.first_seed + (0 if chosen.only else chosen.seeds)):
            with tempfile.TemporaryDirectory() as folder:
                store = f"sqlite:{folder}/store.db" if seed % 2 else redis_url
                try:
                    print(f"    seed {seed}: {random_schedules.run(seed, store, languages)}", flush=True)
                except Exception:
                    failed.append((f"seed {seed}", traceback.format_exc()))
    for what, trace in failed:
        print(f"\nFAILED {what}\n{trace}", file=sys.stderr)
    print(f"    {len(failed)} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
