"""Sends messages with Amazon's extended client for Python, which puts their bodies into S3.

    extended_client.py ENDPOINT QUEUE_URL BUCKET [--group GROUP] BODY...
"""

import argparse

import boto3
import sqs_extended_client  # noqa: F401: it adds what is set below to the clients of boto3

LOGIN = {"region_name": "us-east-1", "aws_access_key_id": "anybody", "aws_secret_access_key": "canary-secret"}

parser = argparse.ArgumentParser()
parser.add_argument("endpoint")
parser.add_argument("queue")
parser.add_argument("bucket")
parser.add_argument("bodies", nargs="+")
parser.add_argument("--group")
arguments = parser.parse_args()

sqs = boto3.client("sqs", endpoint_url=arguments.endpoint, **LOGIN)
sqs.s3_client = boto3.client("s3", endpoint_url=arguments.endpoint, **LOGIN)
sqs.large_payload_support = arguments.bucket
sqs.always_through_s3 = True
for number, body in enumerate(arguments.bodies):
    # The first one as its oldest releases did.
    sqs.use_legacy_attribute = number == 0
    more = {}
    if arguments.group:
        more = {"MessageGroupId": arguments.group, "MessageDeduplicationId": f"{arguments.group}-{number}"}
    sqs.send_message(
        QueueUrl=arguments.queue,
        MessageBody=body,
        MessageAttributes={"tenant": {"DataType": "String", "StringValue": "acme"}},
        **more,
    )
