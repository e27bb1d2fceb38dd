# A worker with an empty effect, for batches: oncegate run --batch-messages 100 --handler-exec 'python3 batch.py'
from oncegate import Message, batch_worker


@batch_worker
def handle(batch: list[Message]) -> None:
    pass


handle.run()
