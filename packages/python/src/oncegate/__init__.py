"""Workers for ``oncegate run``, in Python.

A worker is a function that ``oncegate run --handler-exec`` calls once for each message::

    from oncegate import DeadLetter, Message, Retry, worker

    @worker
    def charge(message: Message) -> dict[str, str]:
        order = message.json()
        receipt = bank.charge(order["order_id"], key=message.idempotency_key)
        return {"receipt": receipt}

    if __name__ == "__main__":
        charge.run()

What the function returns is kept as the result. :class:`Retry`, :class:`Later` and :class:`DeadLetter` are the other
outcomes. A :func:`batch_worker` gets many messages in one call.
"""

from oncegate._message import Message, Origin
from oncegate._outcome import DeadLetter, Later, Retry
from oncegate._worker import BatchWorker, Worker, batch_worker, worker

__all__ = ["BatchWorker", "DeadLetter", "Later", "Message", "Origin", "Retry", "Worker", "batch_worker", "worker"]
