# A worker with an empty effect, a coroutine function: oncegate run --handler-exec 'python3 coroutine.py MAX_IN_FLIGHT'
import sys

from oncegate import Message, worker


@worker(max_in_flight=int(sys.argv[1]))
async def handle(message: Message) -> None:
    pass


handle.run()
