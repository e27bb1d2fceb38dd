"""Prints requests that the providers' own libraries sign, whole and damaged, and what the libraries say of them.

Each line is one request in JSON: `python3 sign.py SEED COUNT`. The libraries are those of
scripts/webhooks-requirements.txt. All of them are told one time, so the requests are the same for a seed.
"""

import base64
import datetime as dates
import json
import random
import sys
from types import SimpleNamespace
from urllib.parse import parse_qsl, urlencode

import standardwebhooks.webhooks
import stripe._webhook
import svix.webhooks
from slack_sdk.signature import Clock, SignatureVerifier
from stripe import WebhookSignature
from twilio.request_validator import RequestValidator, get_signature_algorithm

NOW = 1_733_027_000
PRINTABLE = [chr(code) for code in range(0x20, 0x7F)]


class FixedDate(dates.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, tz)


class FixedClock(Clock):
    def now(self):
        return float(NOW)


standardwebhooks.webhooks.datetime = FixedDate
stripe._webhook.time = SimpleNamespace(time=lambda: float(NOW))


class Parameters:
    """A form as the frameworks give it to Twilio's library."""

    def __init__(self, pairs):
        self.pairs = pairs

    def __iter__(self):
        return (name for name, _ in self.pairs)

    def __bool__(self):
        return bool(self.pairs)

    def getall(self, name):
        return [value for known, value in self.pairs if known == name]


def text(rng, most=12):
    return "".join(rng.choice("abcXYZ019 _-é漢😀&=+%\"'\\") for _ in range(rng.randint(1, most)))


def token(rng, most=20):
    return "".join(rng.choice("abcdefXYZ0123456789") for _ in range(rng.randint(4, most)))


def document(rng, **members):
    members["data"] = {text(rng): rng.choice([text(rng), rng.randint(0, 9**15), None, 0.1]) for _ in range(rng.randint(0, 3))}
    indent = rng.choice([None, None, 2])
    return json.dumps(members, ensure_ascii=rng.choice([True, False]), indent=indent).encode()


def is_accepted(check):
    """A library refuses by an error, by `False`, or by failing over what it has got."""
    try:
        return check() is not False
    except Exception:
        return False


class Standard:
    """Signs with Standard Webhooks or Svix, which verify."""

    preset = "standard"
    signed = ["id", "timestamp", "signature"]
    has_time = True
    forward = 300
    other = True

    def secret(self, rng):
        key = base64.b64encode(rng.randbytes(rng.randint(24, 64))).decode()
        return rng.choice(["whsec_", "whsec_", ""]) + rng.choice([key, key.rstrip("=")])

    def make(self, rng, secret, at):
        prefix = rng.choice(["webhook-", "svix-"])
        library = standardwebhooks.webhooks if prefix == "webhook-" else svix.webhooks
        body = document(rng, type=token(rng))
        ident = "msg_" + token(rng)
        signature = library.Webhook(secret).sign(ident, dates.datetime.fromtimestamp(at, dates.timezone.utc), body.decode())
        others = [f"v1,{base64.b64encode(rng.randbytes(32)).decode()}", f"v1a,{base64.b64encode(rng.randbytes(64)).decode()}"]
        signatures = rng.sample(others, rng.randint(0, 2))
        signatures.insert(rng.randint(0, len(signatures)), signature)
        headers = {prefix + "id": ident, prefix + "timestamp": str(at), prefix + "signature": " ".join(signatures)}
        return {"headers": headers, "body": body, "url": "", "id": [ident]}

    def accepts(self, request, secret):
        headers = request["headers"]
        if any(name.startswith("svix-") for name in headers):
            return is_accepted(lambda: svix.webhooks.Webhook(secret).verify(request["body"], headers))
        library = standardwebhooks.webhooks.Webhook(secret)
        return is_accepted(lambda: library.verify(request["body"], headers, json_parse=False))


class Stripe:
    preset = "stripe"
    has_time = True
    # The library lets any time in the future pass; the preset does not.
    forward = 300

    def secret(self, rng):
        return "whsec_" + token(rng, 40)

    def make(self, rng, secret, at):
        ident = "evt_" + token(rng)
        body = document(rng, id=ident, type="charge.succeeded", object="event")
        header = WebhookSignature.generate_signature_header(body.decode(), secret, at)
        time, signature = header.split(",")
        items = rng.sample([f"v1={rng.randbytes(32).hex()}", f"v0={rng.randbytes(32).hex()}", "v2"], rng.randint(0, 3))
        items.insert(rng.randint(0, len(items)), signature)
        items.insert(rng.randint(0, len(items)), time)
        return {"headers": {"Stripe-Signature": ",".join(items)}, "body": body, "url": "", "id": [ident]}

    def accepts(self, request, secret):
        header = request["headers"].get("Stripe-Signature")
        return is_accepted(lambda: WebhookSignature.verify_header(request["body"], header, secret, 300))


class Slack:
    preset = "slack"
    has_time = True
    forward = 100_000

    def secret(self, rng):
        return rng.randbytes(16).hex()

    def make(self, rng, secret, at):
        ident = "Ev" + token(rng)
        body = document(rng, type="event_callback", event_id=ident)
        signature = SignatureVerifier(secret).generate_signature(timestamp=str(at), body=body)
        headers = {"X-Slack-Request-Timestamp": str(at), "X-Slack-Signature": signature}
        return {"headers": headers, "body": body, "url": "", "id": [ident]}

    def accepts(self, request, secret):
        verifier = SignatureVerifier(secret, FixedClock())
        return is_accepted(lambda: verifier.is_valid_request(request["body"], request["headers"]))


class Twilio:
    preset = "twilio"
    has_time = False

    def secret(self, rng):
        return rng.randbytes(16).hex()

    def make(self, rng, secret, at):
        validator = RequestValidator(secret)
        scheme = rng.choice(["https", "https", "http"])
        url = f"{scheme}://{rng.choice(['example.com', 'hooks.example.com:8443', 'u@example.com'])}/hooks/{token(rng)}"
        url += rng.choice(["", "?a=1&b=%20c", "?b=+"])
        ident, headers = "AC" + token(rng), {}
        algorithm = rng.choice(["HMAC_SHA1", "HMAC_SHA1", "HMAC_SHA256"])
        if algorithm == "HMAC_SHA256" or rng.random() < 0.2:
            headers["X-Twilio-Webhooks-Signature-Settings"] = f"key=webhooks_sharedkey_1,algorithm={algorithm}"
        if rng.random() < 0.3:
            body = document(rng, property="value")
            url += ("&" if "?" in url else "?") + "bodySHA256=" + validator.compute_hash(body.decode())
            headers["Content-Type"] = "application/json"
            parameters = {}
        else:
            names = ["Body", "From", "To", text(rng), "MediaUrl", "MediaUrl"]
            pairs = [(name, rng.choice([text(rng), ""])) for name in rng.sample(names, rng.randint(0, 6))]
            pairs += [("MessageSid", ident), ("MessageStatus", "delivered")]
            rng.shuffle(pairs)
            body = urlencode(pairs).encode()
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            parameters = Parameters(pairs)
        signed = url
        if ":8443" in url and rng.random() < 0.5:
            signed = url.replace(":8443", "", 1)
        elif ":8443" not in url and rng.random() < 0.3:
            host = url.split("/")[2]
            signed = url.replace(host, host + (":443" if scheme == "https" else ":80"), 1)
        headers["X-Twilio-Signature"] = validator.compute_signature(signed, parameters, algorithm)
        headers["I-Twilio-Idempotency-Token"] = ident
        return {"headers": headers, "body": body, "url": url, "id": ["token", ident]}

    def accepts(self, request, secret):
        headers = request["headers"]
        text = request["body"].decode("utf-8", "replace")
        if headers["Content-Type"] == "application/x-www-form-urlencoded":
            text = Parameters(parse_qsl(text, keep_blank_values=True))
        algorithm = get_signature_algorithm(headers.get("X-Twilio-Webhooks-Signature-Settings"))
        validator = RequestValidator(secret)
        signature = headers["X-Twilio-Signature"]
        return is_accepted(lambda: validator.validate(request["url"], text, signature, algorithm))


def damaged_bytes(rng, value):
    if not value:
        return value
    place = rng.randrange(len(value))
    return value[:place] + bytes([rng.randrange(256)]) + value[place + 1 :]


def damaged_text(rng, value):
    if not value:
        return value
    place = rng.randrange(len(value))
    return value[:place] + rng.choice(PRINTABLE) + value[place + 1 :]


# Of a header with the id alone, or the type of the content, no library looks at the value.
UNSIGNED = {"I-Twilio-Idempotency-Token", "Content-Type"}


def damages(rng, provider, secret, request):
    """Yields a request with each kind of damage."""

    def changed(**parts):
        return {**request, **parts}

    signed = [name for name in request["headers"] if name not in UNSIGNED]
    yield "none", request
    yield "a byte of the body", changed(body=damaged_bytes(rng, request["body"]))
    yield "a byte less", changed(body=request["body"][:-1])
    yield "a byte more", changed(body=request["body"] + rng.choice([b" ", b"\n", b"x", b"\xff"]))
    for name in signed:
        value = damaged_text(rng, request["headers"][name])
        yield f"a byte of {name}", changed(headers={**request["headers"], name: value})
        less = {known: value for known, value in request["headers"].items() if known != name}
        if name != "X-Twilio-Signature":
            yield f"no {name}", changed(headers=less)
    if request["url"]:
        yield "a byte of the address", changed(url=damaged_text(rng, request["url"]))
    other = provider.make(rng, secret, NOW)
    yield "the body of another", changed(body=other["body"])
    for name in signed:
        if name in other["headers"]:
            swapped = {**request["headers"], name: other["headers"][name]}
            yield f"{name} of another", changed(headers=swapped)
    yield "another secret", provider.make(rng, provider.secret(rng), NOW)
    if provider.has_time:
        for at in [NOW - 300, NOW - 301, NOW - rng.randint(302, 10**6), NOW + rng.randint(0, provider.forward)]:
            yield f"signed at {at - NOW:+}", provider.make(rng, secret, at)


def main():
    rng = random.Random(int(sys.argv[1]))
    for provider in [Standard(), Stripe(), Slack(), Twilio()]:
        for _ in range(int(sys.argv[2])):
            secrets = [provider.secret(rng) for _ in range(rng.randint(1, 3))]
            request = provider.make(rng, rng.choice(secrets), NOW)
            signer = next(secret for secret in secrets if provider.accepts(request, secret))
            for damage, request in damages(rng, provider, signer, request):
                print(
                    json.dumps(
                        {
                            "preset": provider.preset,
                            "damage": damage,
                            "secrets": secrets,
                            "headers": request["headers"],
                            "body": base64.b64encode(request["body"]).decode(),
                            "url": request["url"],
                            "now_unix_s": NOW,
                            "id": request["id"],
                            "accepted": any(provider.accepts(request, secret) for secret in secrets),
                        }
                    )
                )


main()
