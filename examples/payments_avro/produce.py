"""Writes payments in Avro with the serialisers of confluent-kafka-python, which register their schemas.

    produce.py BROKERS REGISTRY TOPIC < PAYMENTS

A payment is a line of JSON on standard input. The first half is written with the schema of before: the order had another
name, and there was no currency.
"""

import json
import sys
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from random import Random

from confluent_kafka import Producer
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

brokers, url, topic = sys.argv[1:]
new = json.loads((Path(__file__).parent / "payment.avsc").read_text())
old = {**new, "fields": [field for field in new["fields"] if field["name"] not in ("currency", "order_id")]}
old["fields"].insert(1, {"name": "order", "type": "string"})

registry = SchemaRegistryClient({"url": url})
write_old, write_new = (AvroSerializer(registry, json.dumps(schema)) for schema in (old, new))
producer = Producer({"bootstrap.servers": brokers})
payments = [json.loads(line, parse_float=Decimal) for line in sys.stdin]
# Duplicates come on any partition, as after a change of the partition count.
random = Random(len(payments))
for number, payment in enumerate(payments):
    payment["amount"] = Decimal(payment["amount"])
    payment["sent_at"] = datetime.fromtimestamp(payment["sent_at"], timezone.utc)
    if number < len(payments) // 2:
        value, write = {**payment, "order": payment["order_id"]}, write_old
    else:
        value, write = {**payment, "currency": "EUR"}, write_new
    value = write(value, SerializationContext(topic, MessageField.VALUE))
    producer.produce(topic, key=str(random.randrange(500)), value=value)
    producer.poll(0)
assert producer.flush(60) == 0
