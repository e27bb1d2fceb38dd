"""Registers schemas that no reader can use, and such as need what serialisers have built in.

    register.py REGISTRY

Prints a JSON object: the id of each schema. `deleted` refers to a schema whose version has been deleted since.
"""

import json
import sys

import requests

url = sys.argv[1]


def post(subject, schema, kind, references=()):
    body = {"schema": schema, "schemaType": kind, "references": list(references)}
    answer = requests.post(f"{url}/subjects/{subject}/versions", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()["id"]


def proto(body, imports=""):
    return f'syntax = "proto3"; package shop; {imports} {body}'


ids = {}
order = {"type": "record", "name": "Order", "namespace": "shop", "fields": [{"name": "order_id", "type": "string"}]}
ids["order"] = post("order", json.dumps(order), "AVRO")

deep = "{o" * 1_000 + "{}" + "}" * 1_000
ids["deep"] = post(
    "deep",
    proto(
        "message O { O o = 1; } extend google.protobuf.MessageOptions { O oo = 50000; }"
        f" message M {{ string order_id = 1; option (oo) = {deep}; }}",
        'import "google/protobuf/descriptor.proto";',
    ),
    "PROTOBUF",
)
money = 'import "google/type/money.proto";'
ids["money"] = post("money", proto("message M { string order_id = 1; google.type.Money amount = 2; }", money), "PROTOBUF")
print(json.dumps(ids))
