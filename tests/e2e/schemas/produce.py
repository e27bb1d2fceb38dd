"""Writes orders to a topic of Kafka with the serialisers of confluent-kafka-python, which register their schemas.

    produce.py BROKERS REGISTRY TOPIC avro|avro-evolved|protobuf|json FIRST COUNT

Order N has the id `A-N`, the amount N.50 and a time. `avro-evolved` has renamed the id, with an alias, and has a new field with
a default before it; its customer is a schema of its own. Prints a line of JSON for each message: its JSON.
"""

import json
import sys
import tempfile
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.serialization import MessageField, SerializationContext

brokers, url, topic, kind, first, count = sys.argv[1:]
registry = SchemaRegistryClient({"url": url})
NOON = datetime(2024, 5, 1, 12, tzinfo=timezone.utc)
AMOUNT = {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}
AT = {"type": "long", "logicalType": "timestamp-millis"}


def avro():
    from confluent_kafka.schema_registry.avro import AvroSerializer

    fields = [{"name": "order_id", "type": "string"}, {"name": "amount", "type": AMOUNT}, {"name": "at", "type": AT}]
    schema = {"type": "record", "name": "Order", "namespace": "shop", "fields": fields}
    if kind == "avro":
        return AvroSerializer(registry, json.dumps(schema)), lambda order: order
    customer = {"type": "record", "name": "Customer", "namespace": "shop", "fields": [{"name": "id", "type": "string"}]}
    registry.register_schema("shop.Customer", Schema(json.dumps(customer), "AVRO"))
    fields[0] = {"name": "orderId", "type": "string", "aliases": ["order_id"]}
    fields.insert(0, {"name": "currency", "type": "string", "default": "EUR"})
    fields.append({"name": "customer", "type": ["null", "shop.Customer"], "default": None})
    references = [SchemaReference("shop.Customer", "shop.Customer", 1)]
    text = Schema(json.dumps(schema), "AVRO", references)

    def evolved(order):
        return {"currency": "EUR", "orderId": order["order_id"], "amount": order["amount"], "at": order["at"], "customer": {"id": "C"}}

    return AvroSerializer(registry, text), evolved


def protobuf():
    from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf import duration_pb2, struct_pb2, timestamp_pb2, wrappers_pb2  # noqa: F401
    import grpc_tools
    from grpc_tools import protoc

    well_known = str(Path(grpc_tools.__file__).parent / "_proto")
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/shop.desc"
        arguments = ["", f"-I{Path(__file__).parent}", f"-I{well_known}", f"--descriptor_set_out={out}", "shop.proto"]
        assert protoc.main(arguments) == 0
        files = descriptor_pb2.FileDescriptorSet.FromString(Path(out).read_bytes()).file
    pool = descriptor_pool.Default()
    for file in files:
        pool.Add(file)
    order_class = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))

    def message(order):
        made = order_class(order_id=order["order_id"], amount=int(order["amount"] * 100))
        made.at.FromDatetime(order["at"].replace(tzinfo=None))
        return made

    return ProtobufSerializer(order_class, registry, {"use.deprecated.format": False}), message


def plain():
    from confluent_kafka.schema_registry.json_schema import JSONSerializer

    properties = {"order_id": {"type": "string"}, "amount": {"type": "number"}, "at": {"type": "string"}}
    schema = {"title": "Order", "type": "object", "properties": properties}

    def message(order):
        return {"order_id": order["order_id"], "amount": float(order["amount"]), "at": order["at"].isoformat()}

    return JSONSerializer(json.dumps(schema), registry), message


serializer, shape = {"protobuf": protobuf, "json": plain}.get(kind, avro)()
producer = Producer({"bootstrap.servers": brokers})
for number in range(int(first), int(first) + int(count)):
    order = {"order_id": f"A-{number}", "amount": Decimal(number) + Decimal("0.50"), "at": NOON + timedelta(milliseconds=number)}
    value = serializer(shape(order), SerializationContext(topic, MessageField.VALUE))
    producer.produce(topic, key=order["order_id"], value=value)
    cents = int(order["amount"] * 100) if kind == "protobuf" else float(order["amount"])
    print(json.dumps({"order_id": order["order_id"], "amount": cents, "at": order["at"].isoformat()}))
assert producer.flush(60) == 0
