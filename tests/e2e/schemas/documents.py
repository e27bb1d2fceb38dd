"""Random documents in a format, each with the key of its JSON, made by docs/KEY_FORMAT.md's implementation in Python.

    documents.py avro|protobuf|json COUNT SEED VECTORS FOLDER

Writes a JSON line for each schema: its text, and its documents as `payload` (hexadecimal), `key` (the specification) and
`result` (the store key, or the kind of the error). The bytes come from fastavro and from Google's protobuf.
"""

import base64
import gzip
import io
import json
import random
import re
import struct
import sys
from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal
from pathlib import Path

COUNT, SEED = int(sys.argv[2]), int(sys.argv[3])
sys.path.insert(0, sys.argv[4])
import check  # noqa: E402

random.seed(SEED)
OF_A_SCHEMA = 50
EPOCH = datetime(1970, 1, 1)


class Exact(str):
    """A number as JSON spells it."""


def write_json(value):
    if isinstance(value, Exact):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(json.dumps(name) + ":" + write_json(inner) for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(write_json, value)) + "]"
    return json.dumps(value)


def text():
    alphabet = "aZ09 -_\"\\/\n\t\u00e9\u4e2d\U0001f600\x01"
    return "".join(random.choice(alphabet) for _ in range(random.choice([0, 1, 3, 8, 20])))


def blob(most=12):
    return bytes(random.randrange(256) for _ in range(random.randrange(most)))


def integer(bits):
    return random.choice([0, 1, -1, 7, -(1 << bits - 1), (1 << bits - 1) - 1, random.getrandbits(bits - 1)])


def double():
    return random.choice([0.0, 1.0, 0.1, -2.5, 1e300, 5e-324, random.uniform(-1e6, 1e6)])


def single():
    return struct.unpack("<f", struct.pack("<f", random.choice([0.0, 0.1, -2.5, 3e38, 1e-45, random.uniform(-1e6, 1e6)])))[0]


def shortest(number, form="<f"):
    """The shortest decimal that is this number: the nearest of them, and of two as near the one further from zero."""
    if number == 0:
        return Exact("0")
    for digits in range(1, 18):
        spelt = Context(prec=digits, rounding=ROUND_HALF_UP).create_decimal(Decimal(number))
        if struct.pack(form, float(spelt)) == struct.pack(form, number):
            return Exact(spelt)
    raise ValueError(number)


def fraction(nanos):
    if nanos == 0:
        return ""
    if nanos % 1_000_000 == 0:
        return f".{nanos // 1_000_000:03}"
    return f".{nanos // 1_000:06}" if nanos % 1_000 == 0 else f".{nanos:09}"


def iso(count, unit):
    seconds, part = divmod(count, unit)
    return (EPOCH + timedelta(seconds=seconds)).isoformat() + fraction(part * (1_000_000_000 // unit))


def paths(value, here=()):
    """Every path into a document."""
    if here and len(here) < 8:
        yield here
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from paths(inner, here + (name,))
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from paths(inner, here + (str(position),))


def spell(path):
    return ".".join("".join("\\" + c if c in ".\\,:*" else c for c in part) for part in path)


# Other names of fields, by the names in the document: what a path may call them.
OTHER_NAMES = {}
# Paths that a document may have and this one has not.
ABSENT = [("gone",)]

find_step, read_exceptions = check.step, check.read_paths


def document_name(part):
    return next((name for name, others in OTHER_NAMES.items() if part in others), part)


def step_by_any_name(value, part):
    found = find_step(value, part)
    return find_step(value, document_name(part)) if found is check.MISSING else found


def exceptions_by_any_name(texts):
    return [tuple(map(document_name, path)) for path in read_exceptions(texts)]


check.step, check.read_paths = step_by_any_name, exceptions_by_any_name


def called(path):
    """The path with any of the names of its fields."""
    return spell([random.choice([part, *OTHER_NAMES.get(part, [])]) for part in path])


def excepted(path):
    """The same for an exception. What is inside a list is named as the document names it."""
    return spell(path) if any(part.isdigit() for part in path) else called(path)


def chosen_paths(found):
    """Some paths: one of them may lead into another."""
    chosen = random.sample(found, min(len(found), random.choice([1, 1, 2, 3])))
    inside = [path for path in found if any(path[: len(outer)] == outer != path for outer in chosen)]
    if inside and random.random() < 0.6:
        chosen += random.sample(inside, min(len(inside), 2))
    if random.random() < 0.2:
        chosen.append(random.choice(ABSENT))
    return chosen


def part(path, found):
    kind = random.random()
    if kind < 0.3:
        return called(path)
    more = {"blank": random.choice(["error", "absent", "value"]), "optional": maybe()}
    if kind < 0.6:
        return {"path": called(path), **more}
    places = [path, *chosen_paths(found)]
    random.shuffle(places)
    return {"first_of": [called(inner) for inner in dict.fromkeys(places)], **more}


def literal(document, path):
    value = check.find(check.read_json(write_json(document).encode(), check.DEFAULT_LIMIT), path)
    if isinstance(value, bool) or (isinstance(value, str) and not isinstance(value, check.Number)):
        return value
    if isinstance(value, check.Number) and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    return "no such value"


def case(document, found):
    when = random.choice([random.choice(found), random.choice(ABSENT)])
    table = {"path": called(when)}
    if maybe():
        table["is"] = literal(document, when)
    return {"when": table, "parts": [part(path, found) for path in chosen_paths(found)]}


def specification(document):
    found = [path for path in paths(document) if all(part.strip() for part in path)]
    kind = random.random()
    if not found or kind < 0.25:
        return {"payload": {"except": [excepted(path) for path in chosen_paths(found)]}} if found and kind < 0.18 else "payload"
    if kind < 0.45:
        spec = {"json": [called(path) for path in chosen_paths(found)]}
    elif kind < 0.75:
        spec = {"parts": [part(path, found) for path in chosen_paths(found)]}
    else:
        spec = {"cases": [case(document, found) for _ in range(random.choice([1, 2]))]}
        if maybe():
            spec["cases"].append({"parts": [part(path, found) for path in chosen_paths(found)]})
    if random.random() < 0.15:
        spec["tenant"] = {"json": called(random.choice(found))}
    return spec


def result(spec, document):
    message = {"payload": write_json(document).encode(), "headers": [], "message_key": None, "message_id": None}
    try:
        return check.key(spec, "billing", "orders", message)[1]
    except check.Bad as bad:
        return bad.args[0]


def one(payload, document, twin=None):
    while True:
        spec = specification(document)
        try:
            return {"payload": payload.hex(), "key": spec, "result": result(spec, twin or document)}
        except check.Refused:
            # Two names of one field may be one path.
            continue


# --- Avro ---------------------------------------------------------------------------------------


class Avro:
    """A random schema."""

    def __init__(self):
        self.names = 0

    def name(self):
        self.names += 1
        return f"Named{self.names}"

    def type(self, depth):
        simple = ["int", "long", "float", "double", "string", "bytes", "boolean", "fixed", "enum", "decimal", "date"]
        simple += ["time-millis", "time-micros", "timestamp-millis", "timestamp-micros", "local", "uuid", "fixed-decimal"]
        kind = random.choice(simple + (["array", "map", "union", "record"] * 3 if depth < 3 else []))
        if kind in ("int", "long", "float", "double", "string", "bytes", "boolean"):
            return kind
        if kind == "fixed":
            return {"type": "fixed", "name": self.name(), "size": random.randrange(1, 6)}
        if kind == "enum":
            return {"type": "enum", "name": self.name(), "symbols": ["RED", "GREEN", "BLUE"]}
        if kind == "decimal":
            return {"type": "bytes", "logicalType": "decimal", "precision": 30, "scale": random.choice([0, 2, 9])}
        if kind == "fixed-decimal":
            return {"type": "fixed", "name": self.name(), "size": 13, "logicalType": "decimal", "precision": 30, "scale": 3}
        if kind == "date":
            return {"type": "int", "logicalType": "date"}
        if kind == "time-millis":
            return {"type": "int", "logicalType": kind}
        if kind in ("time-micros", "timestamp-millis", "timestamp-micros"):
            return {"type": "long", "logicalType": kind}
        if kind == "local":
            return {"type": "long", "logicalType": "local-timestamp-micros"}
        if kind == "uuid":
            return {"type": "fixed", "name": self.name(), "size": 16, "logicalType": "uuid"}
        if kind == "array":
            return {"type": "array", "items": self.type(depth + 1)}
        if kind == "map":
            return {"type": "map", "values": self.type(depth + 1)}
        if kind == "union":
            return ["null", random.choice(["string", "long", {"type": "array", "items": "int"}]), "boolean"]
        return self.record(depth + 1)

    def record(self, depth):
        names = random.sample(["id", "amount", "name", "at", "items", "x", "y_2", "Zed"], random.randrange(1, 7))
        fields = [{"name": name, "type": self.type(depth), "aliases": OTHER_NAMES.get(name, [])} for name in names]
        return {"type": "record", "name": self.name(), "fields": fields}


def avro_value(schema):
    """(what is encoded without logical types, the JSON of it)"""
    if isinstance(schema, list):
        branch = random.choice(schema)
        return avro_value(branch)
    kind = schema if isinstance(schema, str) else schema["type"]
    logical = None if isinstance(schema, str) else schema.get("logicalType")
    if logical == "decimal":
        size = schema.get("size", 12)
        unscaled = random.choice([0, 1, -1, 1234, -99, random.randrange(-(10**24), 10**24)])
        raw = unscaled.to_bytes(size, "big", signed=True)
        if kind == "bytes" and random.random() < 0.5:
            raw = unscaled.to_bytes((unscaled.bit_length() + 8) // 8 or 1, "big", signed=True)
        return raw, Exact(format(Decimal(unscaled).scaleb(-schema["scale"]), "f"))
    if logical == "date":
        days = random.randrange(-700_000, 2_900_000)
        return days, (EPOCH + timedelta(days=days)).date().isoformat()
    if logical in ("time-millis", "time-micros"):
        unit = 1_000 if logical == "time-millis" else 1_000_000
        count = random.randrange(86_400 * unit)
        return count, iso(count, unit)[11:]
    if logical and "timestamp" in logical:
        unit = 1_000 if logical.endswith("millis") else 1_000_000
        count = random.randrange(-60_000_000_000 * unit, 250_000_000_000 * unit)
        return count, iso(count, unit) + ("" if logical.startswith("local") else "Z")
    if logical == "uuid":
        raw = bytes(random.randrange(256) for _ in range(16))
        digits = raw.hex()
        return raw, "-".join([digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]])
    if kind == "null":
        return None, None
    if kind == "boolean":
        value = random.random() < 0.5
        return value, value
    if kind in ("int", "long"):
        value = integer(32 if kind == "int" else 64)
        return value, Exact(value)
    if kind == "float":
        value = single()
        return value, shortest(value)
    if kind == "double":
        value = double()
        return value, shortest(value, "<d")
    if kind == "string":
        value = text()
        return value, value
    if kind in ("bytes", "fixed"):
        value = blob() if kind == "bytes" else bytes(random.randrange(256) for _ in range(schema["size"]))
        return value, base64.b64encode(value).decode()
    if kind == "enum":
        value = random.choice(schema["symbols"])
        return value, value
    if kind == "array":
        pairs = [avro_value(schema["items"]) for _ in range(random.randrange(4))]
        return [raw for raw, _ in pairs], [twin for _, twin in pairs]
    if kind == "map":
        pairs = {text(): avro_value(schema["values"]) for _ in range(random.randrange(4))}
        return {n: raw for n, (raw, _) in pairs.items()}, {n: twin for n, (_, twin) in pairs.items()}
    pairs = {field["name"]: avro_value(field["type"]) for field in schema["fields"]}
    return {n: raw for n, (raw, _) in pairs.items()}, {n: twin for n, (_, twin) in pairs.items()}


def without_logical(schema):
    """The schema that writes what is given, without fastavro's conversions."""
    if isinstance(schema, list):
        return [without_logical(branch) for branch in schema]
    if isinstance(schema, dict):
        kept = {name: value for name, value in schema.items() if name != "logicalType"}
        for name in ("items", "values"):
            if name in kept:
                kept[name] = without_logical(kept[name])
        if "fields" in kept:
            kept["fields"] = [{**field, "type": without_logical(field["type"])} for field in kept["fields"]]
        return kept
    return schema


def avro():
    import fastavro

    for name in ["id", "amount", "name", "at", "items", "x"]:
        OTHER_NAMES[name] = [f"former_{name}", f"first_{name}"]
    for _ in range(0, COUNT, OF_A_SCHEMA):
        schema = Avro().record(0)
        parsed = fastavro.parse_schema(without_logical(schema))
        documents = []
        for _ in range(OF_A_SCHEMA):
            raw, twin = avro_value(schema)
            out = io.BytesIO()
            fastavro.schemaless_writer(out, parsed, raw)
            documents.append(one(out.getvalue(), twin))
        yield {"schema": json.dumps(schema), "documents": documents}


# --- Protobuf -----------------------------------------------------------------------------------


def protobuf():
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf import duration_pb2, struct_pb2, timestamp_pb2, wrappers_pb2  # noqa: F401
    from grpc_tools import protoc

    here = Path(__file__).parent
    compiled = str(Path(sys.argv[5]) / "shop.desc")
    import grpc_tools

    well_known = str(Path(grpc_tools.__file__).parent / "_proto")
    assert protoc.main(["", f"-I{here}", f"-I{well_known}", f"--descriptor_set_out={compiled}", "--include_imports", "shop.proto"]) == 0
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(Path(compiled).read_bytes()).file:
        pool.Add(file)
    order = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))
    for descriptor in [order.DESCRIPTOR, pool.FindMessageTypeByName("shop.Order.Customer")]:
        for field in descriptor.fields:
            ABSENT.append((field.name,))
            if field.json_name != field.name:
                OTHER_NAMES[field.json_name] = [field.name]
    ABSENT.extend([("customer", "level"), ("payer", "id"), ("others", "0", "id"), ("customer", "parent", "level")])
    documents = []
    for _ in range(COUNT):
        message = order()
        fill_order(message)
        twin = protobuf_twin(message)
        documents.append(one(message.SerializeToString(), twin))
    yield {"schema": (here / "shop.proto").read_text(), "documents": documents}


def maybe():
    return random.random() < 0.5


def fill_customer(customer, depth=0):
    if maybe():
        customer.id = text()
    if maybe():
        customer.level = integer(32)
    if depth < 3 and maybe():
        customer.parent.SetInParent()
        fill_customer(customer.parent, depth + 1)


def fill_order(m):
    if maybe():
        m.order_id = text()
    if maybe():
        m.amount = integer(64)
    if maybe():
        m.coupon = text()
    if maybe():
        m.customer.SetInParent()
        fill_customer(m.customer)
    m.sizes.extend(integer(32) for _ in range(random.randrange(4)))
    for _ in range(random.randrange(3)):
        m.tags[text()] = integer(64)
    m.color = random.choice([0, 1, 7, 5, -3])
    payment = random.randrange(4)
    if payment == 0:
        m.card = text()
    elif payment == 1:
        m.account = random.getrandbits(64)
    elif payment == 2:
        m.payer.SetInParent()
        fill_customer(m.payer)
    if maybe():
        m.at.seconds = random.randrange(-62_000_000_000, 250_000_000_000)
        m.at.nanos = random.choice([0, 250_000_000, 1_000, 999_999_999])
    if maybe():
        sign = random.choice([1, -1])
        m.took.seconds = sign * random.randrange(1_000)
        m.took.nanos = sign * random.choice([0, 500_000_000, 1])
    if maybe():
        m.note.value = text()
    if maybe():
        m.count.value = integer(64)
    if maybe():
        m.extra.update({"a": 1.5, "list": [True, None, "x"], "inner": {text(): 2.0}})
    if maybe():
        m.delta = integer(32)
    if maybe():
        m.rate = double()
    if maybe():
        m.ratio = single()
    if maybe():
        m.raw = blob()
    for _ in range(random.randrange(3)):
        fill_customer(m.others.add())
    for _ in range(random.randrange(3)):
        fill_customer(m.by_level[integer(32)])
    if maybe():
        m.stamp = random.getrandbits(64)
    if maybe():
        m.shift = integer(32)
    m.is_gift = maybe()
    if maybe():
        m.small = random.getrandbits(32)
    m.words.extend(text() for _ in range(random.randrange(3)))
    if maybe():
        m.maybe = integer(32)


def protobuf_twin(message):
    """The JSON of a message: Protobuf's, with 64-bit numbers as numbers."""
    name = message.DESCRIPTOR.full_name
    if name == "google.protobuf.Timestamp":
        return (EPOCH + timedelta(seconds=message.seconds)).isoformat() + fraction(message.nanos) + "Z"
    if name == "google.protobuf.Duration":
        sign = "-" if message.seconds < 0 or message.nanos < 0 else ""
        return f"{sign}{abs(message.seconds)}{fraction(abs(message.nanos))}s"
    if name == "google.protobuf.Struct":
        return {key: protobuf_twin(value) for key, value in message.fields.items()}
    if name == "google.protobuf.ListValue":
        return [protobuf_twin(value) for value in message.values]
    if name == "google.protobuf.Value":
        kind = message.WhichOneof("kind")
        value = getattr(message, kind)
        if kind == "null_value":
            return None
        if kind == "number_value":
            return shortest(value, "<d")
        return protobuf_twin(value) if kind in ("struct_value", "list_value") else value
    if name.endswith("Value") and name.startswith("google.protobuf."):
        return protobuf_scalar(message.DESCRIPTOR.fields[0], message.value)
    twin = {}
    for field, value in message.ListFields():
        twin[field.json_name] = protobuf_field(field, value)
    return twin


def is_map(field):
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def protobuf_field(field, value):
    if is_map(field):
        of = field.message_type.fields_by_name["value"]
        return {str(key): protobuf_scalar(of, value[key]) for key in value}
    if getattr(field, "is_repeated", None) or (not hasattr(field, "is_repeated") and field.label == 3):
        return [protobuf_scalar(field, inner) for inner in value]
    return protobuf_scalar(field, value)


def protobuf_scalar(field, value):
    if field.message_type is not None:
        return protobuf_twin(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else Exact(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, bool) or isinstance(value, str):
        return value
    if isinstance(value, float):
        return shortest(value) if field.type == field.TYPE_FLOAT else shortest(value, "<d")
    return Exact(value)


# --- JSON ---------------------------------------------------------------------------------------


def random_json(depth=0):
    kind = random.randrange(5 if depth > 3 else 8)
    if kind == 0:
        return None
    if kind == 1:
        return maybe()
    if kind == 2:
        return Exact(random.choice([integer(64), double(), "1e3", "-0.0", "123456789012345678901234567890.5"]))
    if kind < 5:
        return text()
    if kind == 5:
        return [random_json(depth + 1) for _ in range(random.randrange(4))]
    return {text(): random_json(depth + 1) for _ in range(random.randrange(5))}


def compressed():
    documents = []
    for _ in range(COUNT):
        document = {text(): random_json() for _ in range(random.randrange(1, 6))}
        documents.append(one(gzip.compress(write_json(document).encode()), document))
    yield {"schema": "", "documents": documents}


for line in {"avro": avro, "protobuf": protobuf, "json": compressed}[sys.argv[1]]():
    print(json.dumps(line))
