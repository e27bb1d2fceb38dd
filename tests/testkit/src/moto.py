"""moto's server, with an SQS that handles one call at a time.

It handles each call in a thread, and keeps no lock over a queue's messages: two receives at the same time may bring the same
ten. A receive that waits for messages lets the other calls pass.
"""

import sys
import threading

from moto.server import main
from moto.sqs import models, responses

CALL = threading.Lock()
CALL_ACTION = responses.SQSResponse.call_action
WAIT_FOR_MESSAGES = models.Queue.wait_for_messages


def call_action(response):
    with CALL:
        return CALL_ACTION(response)


def wait_for_messages(queue, timeout):
    CALL.release()
    try:
        WAIT_FOR_MESSAGES(queue, timeout)
    finally:
        CALL.acquire()


responses.SQSResponse.call_action = call_action
models.Queue.wait_for_messages = wait_for_messages
main(sys.argv[1:])
