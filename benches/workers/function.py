# A worker with an empty effect, a function: oncegate run --handler-exec 'python3 function.py MAX_IN_FLIGHT AHEAD'
import sys

from oncegate import Message, worker

max_in_flight, ahead = map(int, sys.argv[1:])


@worker(max_in_flight=max_in_flight, ahead=ahead)
def handle(message: Message) -> None:
    pass


handle.run()
