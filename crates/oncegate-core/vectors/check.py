#!/usr/bin/env python3
"""An implementation of the key format of oncegate in Python, written from docs/KEY_FORMAT.md alone,
that checks itself against the published test vectors.

    pip install blake3 && python3 check.py [keys.json]

It is there to prove that the document is enough, and as a start for other languages. It favours
clearness over speed.
"""

# invariant (all tests): one-language-format

import base64
import gzip
import json
import re
import struct
import sys
import unicodedata
import zlib
from datetime import datetime, timezone
from fractions import Fraction
from pathlib import Path

import blake3

KEY_CONTEXT = "oncegate 2026-11-21 idempotency key v1"
FINGERPRINT_CONTEXT = "oncegate 2026-11-21 fingerprint v1"
SPECIFICATION_CONTEXT = "oncegate 2026-11-21 fingerprint specification v1"
MAX_DEPTH = 64
DEFAULT_LIMIT = 4 * 1024 * 1024
# Unicode White_Space. Python's strip() takes U+001C to U+001F as well.
SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
ASCII_SPACE = b"\t\n\f\r "


class Refused(Exception):
    """The specification is wrong."""


class Bad(Exception):
    """The message is wrong; the argument is the kind of error."""


# --- JSON ---------------------------------------------------------------------------------------


class Number(str):
    """A number as it is spelt."""


class Members(list):
    """The members of an object, in the order of the document."""


def read_json(payload, limit):
    if len(payload) > limit:
        raise Bad("too_large")
    if payload[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in payload[:2]:
        raise Bad("not_utf8")
    payload = payload.removeprefix(b"\xef\xbb\xbf")
    try:
        text = payload.decode("utf-8", "strict")
    except UnicodeDecodeError:
        raise Bad("not_utf8") from None
    too_deep = nesting(text) > MAX_DEPTH
    if too_deep:
        raise Bad("too_deep")

    def members(pairs):
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise Bad("duplicate_json_key")
        return Members(pairs)

    def constant(_):
        raise Bad("malformed_json")

    # Python takes \\u followed by signs, blanks or underscores in some versions, and lone surrogates in all.
    if re.search(r"(?<!\\)(?:\\\\)*\\u(?![0-9a-fA-F]{4})", text):
        raise Bad("malformed_json")
    try:
        value = json.loads(
            text, object_pairs_hook=members, parse_int=Number, parse_float=Number, parse_constant=constant
        )
    except ValueError:
        raise Bad("malformed_json") from None
    check_surrogates(value)
    return value


def nesting(text):
    deepest = depth = 0
    in_string = escaped = False
    for c in text:
        if in_string:
            in_string = escaped or c != '"'
            escaped = c == "\\" and not escaped
        elif c == '"':
            in_string = True
        elif c in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif c in "]}":
            depth -= 1
    return deepest


def check_surrogates(value):
    if isinstance(value, Members):
        for name, inner in value:
            check_surrogates(name)
            check_surrogates(inner)
    elif isinstance(value, list):
        for inner in value:
            check_surrogates(inner)
    elif isinstance(value, str) and any(0xD800 <= ord(c) < 0xE000 for c in value):
        raise Bad("malformed_json")


# --- paths --------------------------------------------------------------------------------------


def parse_path(text, escapes=".\\,:*"):
    if len(text.encode()) > 1024:
        raise Refused(text)
    parts, part, escaped, i = [], "", False, 0
    while True:
        if i == len(text) or text[i] == ".":
            if not part.strip(SPACE) or (part == "*" and not escaped):
                raise Refused(text)
            parts.append(part)
            part, escaped = "", False
            if i == len(text):
                break
        elif text[i] == "\\":
            i += 1
            if i == len(text) or text[i] not in escapes:
                raise Refused(text)
            part += text[i]
            escaped = True
        else:
            part += text[i]
        i += 1
    if len(parts) > MAX_DEPTH:
        raise Refused(text)
    return tuple(parts)


def spell(parts):
    return ".".join("\\*" if p == "*" else p.replace("\\", "\\\\").replace(".", "\\.") for p in parts)


DECODERS = ("json", "base64", "gzip")


def parse_place_path(text):
    """A path of a part: (names, [(decoder, names), ...]) and its canonical spelling."""
    if len(text.encode()) > 1024:
        raise Refused(text)
    segments, at = [], 0
    for i, c in enumerate(text + "|"):
        if c == "|" and (len(text[at:i]) - len(text[at:i].rstrip("\\"))) % 2 == 0:
            segments.append(text[at:i])
            at = i + 1
    if at != len(text) + 1:
        segments.append(text[at:])
    escapes = ".\\,:*|"
    is_root = segments[0] == "" and len(segments) > 1
    names = () if is_root else parse_path(segments[0], escapes)
    spelt, steps = spell(names).replace("|", "\\|"), []
    for segment in segments[1:]:
        name, dot, inner = segment.partition(".")
        if name not in DECODERS or (dot and name != "json"):
            raise Refused(text)
        inner = parse_path(inner, escapes) if dot else ()
        steps.append((name, inner))
        spelt += "|" + name + dot + spell(inner).replace("|", "\\|")
    return (names, tuple(steps)), spelt


MISSING = object()


def step(value, part):
    if isinstance(value, Members):
        return dict(value).get(part, MISSING)
    if isinstance(value, list) and re.fullmatch(r"0|[1-9][0-9]*", part) and int(part) < len(value):
        return value[int(part)]
    return MISSING


def find(value, parts):
    for part in parts:
        value = step(value, part)
        if value is MISSING:
            return MISSING
    return value


# --- values -------------------------------------------------------------------------------------


def lp(data):
    return struct.pack(">I", len(data)) + data


def tagged(tag, data):
    return tag + lp(data)


def number(text):
    sign = "-" if text.startswith("-") else ""
    mantissa, _, exponent = text.lstrip("+-").lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    if not digits:
        return b"0"
    significant = digits.rstrip("0")
    if len(exponent.lstrip("+-").lstrip("0")) > 18:
        raise OverflowError
    e = int(exponent or "0") - len(fraction) + len(digits) - len(significant)
    return (sign + significant + (f"e{e}" if e else "")).encode()


def encode(value, excepted=(), here=()):
    if value is None:
        return tagged(b"z", b"")
    if isinstance(value, bool):
        return tagged(b"b", b"\1" if value else b"\0")
    if isinstance(value, Number):
        try:
            return tagged(b"n", number(value))
        except OverflowError:
            raise Bad("exponent_too_large") from None
    if isinstance(value, str):
        return tagged(b"s", value.encode())
    if isinstance(value, Members):
        kept = [(n.encode(), encode(v, excepted, here + (n,))) for n, v in value if here + (n,) not in excepted]
        return b"o" + struct.pack(">I", len(kept)) + b"".join(lp(n) + v for n, v in sorted(kept))
    places = [(here + (str(i),), v) for i, v in enumerate(value)]
    kept = [encode(v, excepted, place) for place, v in places if place not in excepted]
    return b"a" + struct.pack(">I", len(kept)) + b"".join(kept)


def has_substance(value, excepted=(), here=()):
    if isinstance(value, Members):
        return any(has_substance(v, excepted, here + (n,)) for n, v in value if here + (n,) not in excepted)
    if isinstance(value, list):
        places = [(here + (str(i),), v) for i, v in enumerate(value)]
        return any(has_substance(v, excepted, place) for place, v in places if place not in excepted)
    if isinstance(value, (bool, Number)):
        return True
    return value is not None and value.strip(SPACE) != ""


def timestamp(text, unit):
    found = re.fullmatch(
        r"([0-9]{4})(?:-([0-9]{2})-([0-9]{2})|([0-9]{2})([0-9]{2}))"
        r"[Tt ]([0-9]{2})(?::([0-9]{2})(?::([0-9]{2})(?:[.,]([0-9]+))?)?|([0-9]{2})(?:([0-9]{2})(?:[.,]([0-9]+))?)?)"
        r" ?(?:UTC|[Zz]|([+-])([0-9]{2})(?::?([0-9]{2}))?)(?:\[[A-Za-z0-9/_.:+-]+\])?",
        text,
    )
    if not found:
        raise Bad("normaliser_failed")
    g = found.groups()
    year, month, day = int(g[0]), int(g[1] or g[3]), int(g[2] or g[4])
    hour, minute, second = int(g[5]), int(g[6] or g[9]), int(g[7] or g[10] or 0)
    fraction = g[8] or g[11] or ""
    sign, off_hour, off_minute = g[12], int(g[13] or 0), int(g[14] or 0)
    if off_hour > 23 or off_minute > 59:
        raise Bad("normaliser_failed")
    # datetime has no year 0; the calendar repeats every 400 years, which are 146097 days.
    try:
        then = datetime(year + 400 if year == 0 else year, month, day, hour, minute, second, tzinfo=timezone.utc)
    except ValueError:
        raise Bad("normaliser_failed") from None
    span = then - datetime(1970, 1, 1, tzinfo=timezone.utc)
    seconds = span.days * 86400 + span.seconds - (146097 * 86400 if year == 0 else 0)
    offset = off_hour * 3600 + off_minute * 60
    seconds -= offset if sign == "+" else -offset
    return instant(Fraction(seconds) + Fraction(int(fraction or "0"), 10 ** len(fraction)), unit)


def epoch(text, counted, unit):
    """The instant of a count. Fraction is exact; huge exponents are kept away from it."""
    try:
        canonical = number(text).decode()
    except OverflowError:
        raise Bad("normaliser_failed") from None
    digits, _, e = canonical.lstrip("-").partition("e")
    if len(digits) + int(e or "0") > 30:
        raise Bad("normaliser_failed")
    if len(digits) + int(e or "0") < -30:
        canonical = ("-" if canonical[0] == "-" else "") + "1e-30"
    seconds = Fraction(canonical) / 10 ** {"seconds": 0, "millis": 3, "micros": 6, "nanos": 9}[counted]
    if not -62167219200 <= seconds // 1 <= 253402300799:
        raise Bad("normaliser_failed")
    return instant(seconds, unit)


def instant(seconds, unit):
    if unit == "days":
        return f"{seconds // 86400}d".encode()
    places, suffix = {"seconds": (0, "s"), "millis": (3, "ms"), "micros": (6, "us"), "nanos": (9, "ns")}[unit]
    return f"{seconds * 10**places // 1}{suffix}".encode()


DECIMAL = r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?"


def field(value, normalisers, excepted=()):
    """The value of a field of a key; never blank."""
    if value is MISSING:
        raise Bad("missing_field")
    if value is None:
        raise Bad("null_field")
    encoded, blank = present(value, normalisers, excepted)
    if blank:
        raise Bad("blank")
    return encoded


def present(value, normalisers, excepted=()):
    """The value that is there, and whether it is blank."""
    last = normalisers[-1] if normalisers else ""
    counted = normalisers[-2].removeprefix("epoch-") if normalisers[-2:-1] and "epoch-" in normalisers[-2] else None
    if isinstance(value, Number) and normalisers[:1] == ["digits"]:
        if not re.fullmatch(r"-?[0-9]+", value) or value == "-0":
            raise Bad("normaliser_failed")
        value = str(value)
    if not isinstance(value, str) or isinstance(value, Number):
        if isinstance(value, Number) and counted and len(normalisers) == 2:
            return tagged(b"t", epoch(value, counted, last.removeprefix("timestamp-"))), False
        for n in normalisers:
            is_list = isinstance(value, list) and not isinstance(value, Members)
            if not (n == "decimal" and isinstance(value, Number) or n == "unordered" and is_list):
                raise Bad("normaliser_failed")
        if last == "unordered":
            elements = sorted(encode(element) for element in value)
            encoded = b"m" + struct.pack(">I", len(elements)) + b"".join(elements)
        else:
            encoded = encode(value, excepted)
        return encoded, not has_substance(value, excepted)
    for n in normalisers:
        if n == "trim":
            value = value.strip(SPACE)
        elif n == "lowercase":
            value = value.lower()
        elif n == "nfc":
            value = unicodedata.normalize("NFC", value)
        elif n == "unquote" and value.startswith('"'):
            value = unquoted(value)
    if not value.strip(SPACE):
        return tagged(b"s", value.encode()), True
    if last == "unordered":
        raise Bad("normaliser_failed")
    if last == "decimal":
        if not re.fullmatch(DECIMAL, value):
            raise Bad("normaliser_failed")
        try:
            return tagged(b"n", number(value)), False
        except OverflowError:
            raise Bad("normaliser_failed") from None
    if last.startswith("timestamp-"):
        unit = last.removeprefix("timestamp-")
        if counted and re.fullmatch(DECIMAL, value):
            return tagged(b"t", epoch(value, counted, unit)), False
        return tagged(b"t", timestamp(value, unit)), False
    return tagged(b"s", value.encode()), False


def unquoted(value):
    try:
        inside = json.loads(value)
        inside.encode()
        return inside
    except ValueError:  # no JSON, or half of a surrogate pair
        return value


# --- specifications -----------------------------------------------------------------------------

NORMALISERS = ["trim", "lowercase", "nfc", "decimal", "unordered", "text", "unquote", "digits"] + [
    f"epoch-{unit}" for unit in ("seconds", "millis", "micros", "nanos")
] + [f"timestamp-{unit}" for unit in ("days", "seconds", "millis", "micros", "nanos")]


def read_field(spec):
    if isinstance(spec, str):
        return parse_path(spec), []
    if not set(spec) <= {"path", "as", "default"}:
        raise Refused(spec)
    read_default(spec)
    return parse_path(spec["path"]), read_normalisers(spec)


def read_default(spec):
    # It is for formats: a document of JSON has no defaults.
    if type(spec.get("default", False)) is not bool:
        raise Refused(spec)
    return spec.get("default", False)


def read_normalisers(spec):
    names = spec.get("as", [])
    names = [names] if isinstance(names, str) else names
    for i, name in enumerate(names):
        final = any(n in ("decimal", "unordered") or n.startswith("timestamp") for n in names[:i])
        if name not in NORMALISERS or name in names[:i] or final:
            raise Refused(spec)
        if name.startswith("epoch-") and not "".join(names[i + 1 : i + 2]).startswith("timestamp-"):
            raise Refused(spec)
    return names


def read_paths(texts):
    paths = [parse_path(text) for text in texts]
    if len(set(paths)) < len(paths) or len(paths) > 256:
        raise Refused(texts)
    return paths


def read_name(name):
    if not name.strip(SPACE) or len(name.encode()) > 1024:
        raise Refused(name)
    return name


def all_places(source, what):
    sets = [what] if source == "parts" else [case[3] for case in what]
    places = [place for parts in sets for part in parts for place in part[1]]
    return places + ([case[1] for case in what if case[1]] if source == "cases" else [])


def check_decoders(source, what):
    texts = set()
    for kind, path, *_ in all_places(source, what):
        if kind == "path":
            names, steps = path
            for i in range(len(steps)):
                texts.add((names, steps[:i], steps[i][0]))
    if len(texts) > 16:
        raise Refused(what)


def read_spec(spec):
    if isinstance(spec, str):
        if spec not in ("payload", "message_key", "message_id", "message-key", "message-id"):
            raise Refused(spec)
        spec = {spec.replace("-", "_"): {}}
    sources = {"json", "payload", "header", "message_key", "message_id", "parts", "cases"} & set(spec)
    if len(sources) != 1 or not set(spec) <= sources | {"tenant", "domain", "max_payload_bytes"}:
        raise Refused(spec)
    source = sources.pop()
    limit = spec.get("max_payload_bytes", DEFAULT_LIMIT)
    if not 1 <= limit <= 1 << 30:
        raise Refused(spec)
    domain = spec.get("domain", "messages")
    if domain not in ("messages", "http"):
        raise Refused(spec)
    tenant = spec.get("tenant")
    if tenant and "header" in tenant:
        tenant = ("header", read_name(tenant["header"]))
    elif tenant:
        tenant = ("json", read_field(tenant["json"]))
    what = spec[source]
    if source == "json":
        what = sorted((read_field(f) for f in what), key=lambda f: spell(f[0]).encode())
        paths = [path for path, _ in what] + ([tenant[1][0]] if tenant and tenant[0] == "json" else [])
        if not what or len(set(paths)) < len(paths):
            raise Refused(spec)
    elif source == "payload":
        what = set(read_paths(what.get("except", [])))
    elif source == "header":
        what = read_name(what)
    elif source == "parts":
        what = read_parts(what)
    elif source == "cases":
        what = read_cases(what)
    if source in ("parts", "cases"):
        check_decoders(source, what)
    return source, what, tenant, limit, b"H" if domain == "http" else b"K"


# --- parts ---------------------------------------------------------------------------------------

PLACES = ("path", "header", "message_key", "message_id")
LETTERS = {"path": b"j", "header": b"h", "message_key": b"k", "message_id": b"i"}


def read_place(spec, more=()):
    """(source, what, normalisers) of a place; `what` is the parsed path or the name of a header."""
    spec = {"path": spec} if isinstance(spec, str) else spec
    sources = [source for source in PLACES if source in spec]
    if len(sources) != 1 or not set(spec) <= {sources[0], "as", "default", *more}:
        raise Refused(spec)
    source = sources[0]
    takes_default = read_default(spec)
    if source == "path":
        what, spelt = parse_place_path(spec["path"])
        if takes_default and what[1]:
            raise Refused(spec)
    elif takes_default:
        raise Refused(spec)
    else:
        what = spelt = read_name(spec["header"]) if source == "header" else None
    label = LETTERS[source] + (lp(spelt.encode()) if spelt is not None else b"")
    return source, what, read_normalisers(spec), label


def read_parts(specs):
    parts = []
    for spec in specs:
        if isinstance(spec, dict) and "first_of" in spec:
            if not set(spec) <= {"first_of", "optional", "blank"}:
                raise Refused(spec)
            places = [read_place(place) for place in spec["first_of"]]
            label = b"f" + struct.pack(">I", len(places)) + b"".join(place[3] for place in places)
        else:
            places = [read_place(spec, ("optional", "blank"))]
            label = places[0][3]
        if not places or len({place[3] for place in places}) < len(places):
            raise Refused(spec)
        options = spec if isinstance(spec, dict) else {}
        parts.append((label, places, options.get("optional", False), options.get("blank", "error")))
    if not parts or len({part[0] for part in parts}) < len(parts) or sum(len(p[1]) for p in parts) > 256:
        raise Refused(specs)
    return sorted(parts, key=lambda part: part[0])


def read_cases(specs):
    cases = []
    for spec in specs:
        when, label, literal = None, b"0", None
        if "when" in spec:
            when = read_place(spec["when"], ("is",))
            if "is" in spec["when"]:
                literal = spec["when"]["is"]
                literal = encode(Number(literal) if type(literal) is int else literal)
            label = (b"p" if literal is None else b"e") + when[3] + (literal or b"")
        if not set(spec) <= {"when", "parts"} or any(label == c[0] and c[1] == when for c in cases):
            raise Refused(specs)
        if cases and cases[-1][1] is None:
            raise Refused(specs)
        cases.append((label, when, literal, read_parts(spec["parts"])))
    if not cases or sum(1 + len(case[3]) for case in cases) > 256:
        raise Refused(specs)
    return cases


def decoded(value, decoder, limit):
    """What a decoder makes of a string or bytes; MISSING and None pass as MISSING."""
    if value is MISSING or value is None:
        return MISSING
    if isinstance(value, Number) or not isinstance(value, (str, bytes)):
        raise Bad("decode_failed")
    data = value.encode() if isinstance(value, str) else value
    if decoder == "json":
        if len(data) > limit:
            raise Bad("too_large")
        try:
            return read_json(data, limit)
        except Bad:
            raise Bad("decode_failed") from None
    if decoder == "base64":
        if not re.fullmatch(rb"[A-Za-z0-9+/]*={0,2}|[A-Za-z0-9_-]*={0,2}", data):
            raise Bad("decode_failed")
        bare = data.rstrip(b"=")
        padded = bare + b"=" * (-len(bare) % 4)
        data_out = base64.urlsafe_b64decode(padded.replace(b"+", b"-").replace(b"/", b"_")) if len(bare) % 4 != 1 else None
        again = data_out is not None and base64.urlsafe_b64encode(data_out).rstrip(b"=")
        if again != bare.replace(b"+", b"-").replace(b"/", b"_") or data not in (bare, padded):
            raise Bad("decode_failed")
        data = data_out
    else:
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            raise Bad("decode_failed") from None
        if not data and not value:
            raise Bad("decode_failed")
    if len(data) > limit:
        raise Bad("too_large")
    return data


def read_value(place, message, document, limit):
    """(error kind or None, bytes of the value or None, whether it is blank)"""
    source, what, normalisers, _ = place
    if source == "path":
        if document is NO_PAYLOAD:
            return "no_payload", None, True
        names, steps = what
        value = find(document, names)
        for decoder, names in steps:
            value = find(decoded(value, decoder, limit), names)
        if value is MISSING or value is None:
            return "missing_field" if value is MISSING else "null_field", None, True
        if not isinstance(value, bytes):
            return None, *present(value, normalisers)
    elif source == "header":
        value = find_header(what, message)
        if value is None:
            return "missing_header", None, True
    else:
        value = message[source]
        if value is None:
            return "missing_" + source, None, True
    if len(value) > limit:
        raise Bad("too_large")
    if not normalisers:
        return None, tagged(b"x", value), not value.strip(ASCII_SPACE)
    try:
        return None, *present(value.decode("utf-8"), normalisers)
    except UnicodeDecodeError:
        raise Bad("normaliser_failed") from None


NO_PAYLOAD = object()


def write_parts(parts, message, document, limit):
    out, identifies = struct.pack(">I", len(parts)), False
    for label, places, optional, blank in parts:
        errors, value = [], None
        for place in places:
            error, value, is_blank = read_value(place, message, document, limit)
            if error is None and is_blank and blank == "error":
                raise Bad("blank")
            if error is None and (not is_blank or blank == "value"):
                identifies |= not is_blank
                break
            errors.append(error or "blank")
            value = None
        if value is None and not optional:
            raise Bad(errors[0])
        out += label + (tagged(b"u", b"") if value is None else value)
    if not identifies:
        raise Bad("blank")
    return out


def write_cases(cases, message, document, limit):
    for label, when, literal, parts in cases:
        if when is not None:
            error, value, _ = read_value(when, message, document, limit)
            if error is not None:
                continue
            if value[:1] == b"x" and literal is not None and literal[:1] == b"s":
                value = b"s" + value[1:]
            if literal is not None and value != literal:
                continue
        return label + write_parts(parts, message, document, limit)
    raise Bad("no_case")


# --- keys and fingerprints ----------------------------------------------------------------------


def blob(data, limit):
    if len(data) > limit:
        raise Bad("too_large")
    if not data.strip(ASCII_SPACE):
        raise Bad("blank")
    return tagged(b"x", data)


def find_header(name, message):
    exact = [value for known, value in message["headers"] if known == name]
    alike = [value for known, value in message["headers"] if ascii_lower(known) == ascii_lower(name)]
    values = exact or alike
    if len(set(values)) > 1:
        raise Bad("repeated_header")
    return values[0] if values else None


def ascii_lower(text):
    return "".join(chr(ord(c) + 32) if "A" <= c <= "Z" else c for c in text)


def header(name, message, limit):
    value = find_header(name, message)
    if value is None:
        raise Bad("missing_header")
    return blob(value, limit)


def key(spec, scope, route, message):
    source, what, tenant, limit, domain = read_spec(spec)
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", scope):
        raise Refused(scope)
    if len(route.encode()) > 1024:
        raise Bad("too_large")
    out = b"\x01" + domain + lp(scope.encode()) + lp(route.encode())
    document = None
    composed = source in ("parts", "cases")
    reads = composed and any(place[0] == "path" for place in all_places(source, what))
    if reads and message["payload"] is None and not (tenant and tenant[0] == "json"):
        document = NO_PAYLOAD
    elif reads or source in ("json", "payload") or (tenant and tenant[0] == "json"):
        if message["payload"] is None:
            raise Bad("no_payload")
        document = read_json(message["payload"], limit)
    if tenant is None:
        out += b"\0"
    elif tenant[0] == "header":
        out += b"\1" + header(tenant[1], message, limit)
    else:
        path, normalisers = tenant[1]
        out += b"\1" + field(find(document, path), normalisers)
    if source == "json":
        out += b"j" + struct.pack(">I", len(what))
        for path, normalisers in what:
            out += lp(spell(path).encode()) + field(find(document, path), normalisers)
    elif source == "payload":
        out += b"p" + field(document, [], what)
    elif source == "parts":
        out += b"m" + write_parts(what, message, document, limit)
    elif source == "cases":
        out += b"w" + write_cases(what, message, document, limit)
    elif source == "header":
        out += b"h" + lp(what.encode()) + header(what, message, limit)
    else:
        data = message[source]
        if data is None:
            raise Bad("missing_" + source)
        out += (b"k" if source == "message_key" else b"i") + blob(data, limit)
    digest = blake3.blake3(out, derive_key_context=KEY_CONTEXT).digest()[:16]
    return out, scope + ":" + base64url(digest)


def base64url(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def fingerprint(spec, key_spec, message):
    source, what, tenant, limit, _ = read_spec(key_spec)
    raw = spec == "raw"
    left_out = set() if raw or spec == "payload" else set(read_paths(spec["except"]))
    if not raw:
        left_out |= {path for path, _ in what} if source == "json" else set()
        if source in ("parts", "cases"):
            sets = [what] if source == "parts" else [case[3] for case in what]
            places = [place for parts in sets for part in parts for place in part[1]]
            left_out |= {place[1][0] for place in places if place[0] == "path" and not place[1][1]}
        left_out |= {tenant[1][0]} if tenant and tenant[0] == "json" else set()
    name = b"\x01" + (b"r" if raw else b"p") + struct.pack(">I", len(left_out))
    name += b"".join(lp(path) for path in sorted(spell(path).encode() for path in left_out))
    first = blake3.blake3(name, derive_key_context=SPECIFICATION_CONTEXT).digest()[0] % 255 + 1
    payload = message["payload"]
    if payload is None:
        out = b"\x01F0"
    elif len(payload) > limit:
        raise Bad("too_large")
    elif raw:
        out = b"\x01Fr" + tagged(b"x", payload)
    else:
        out = b"\x01Fp" + encode(read_json(payload, limit), left_out)
    return out, bytes([first]) + blake3.blake3(out, derive_key_context=FINGERPRINT_CONTEXT).digest()[:6]


# --- vectors ------------------------------------------------------------------------------------


def read_message(m):
    payload = None
    if "payload_repeat" in m:
        payload = "".join(piece * times for piece, times in m["payload_repeat"]).encode()
    elif "payload_hex" in m:
        payload = bytes.fromhex(m["payload_hex"])
    elif "payload" in m:
        payload = m["payload"].encode()
    return {
        "payload": payload,
        "headers": [(name, bytes.fromhex(value)) for name, value in m.get("headers_hex", [])],
        "message_key": bytes.fromhex(m["message_key_hex"]) if "message_key_hex" in m else None,
        "message_id": m["message_id"].encode() if "message_id" in m else None,
    }


def answer(vector):
    message = read_message(vector["message"])
    try:
        if "fingerprint" in vector:
            canonical, result = fingerprint(vector["fingerprint"], vector["key"], message)
            expected = {"fingerprint_hex": result.hex()}
        else:
            canonical, result = key(vector["key"], vector["scope"], vector["route"], message)
            expected = {"store_key": result}
    except Refused:
        return {"specification_refused": True}
    except Bad as bad:
        return {"error": bad.args[0]}
    if len(canonical) <= 1024:
        expected["canonical_hex"] = canonical.hex()
    return expected


def main():
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("keys.json")
    vectors = json.loads(path.read_text(encoding="utf-8"))["vectors"]
    wrong = 0
    for vector in vectors:
        given = answer(vector)
        if given != vector["expected"]:
            wrong += 1
            print(f"{vector['name']}:\n  here      {given}\n  published {vector['expected']}")
    print(f"{len(vectors) - wrong} of {len(vectors)} vectors hold")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
