"""grpc-requests: every message found by reflection; services, calls, a stream to its end."""

from __future__ import annotations

import sys

import grpc
from grpc_requests import Client

ADDRESS, MODEL, KEY = sys.argv[1:]
SERVICE = "baton.serve.v1.Inference"
PROMPT = {"text": "What is prefill?", "temperature": 0.0}


class Keyed(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Says the key with every call, reflection's too."""

    def intercept_unary_unary(self, go_on, details, request):
        details = details._replace(metadata=[("authorization", f"Bearer {KEY}")])
        return go_on(details, request)

    intercept_unary_stream = intercept_stream_stream = intercept_unary_unary


client = Client.get_by_endpoint(ADDRESS, interceptors=[Keyed()])
assert {SERVICE, "grpc.health.v1.Health"} <= set(client.service_names), client.service_names
inference = client.service(SERVICE)
assert set(inference.method_names) == {"Generate", "Abort", "Models", "ServerInfo"}

health = client.service("grpc.health.v1.Health")
for name in ("", SERVICE):
    assert health.Check({"service": name})["status"] == "SERVING", name

models = inference.Models({})["models"]
assert [model["id"] for model in models] == [MODEL], models
try:
    raise AssertionError(inference.ServerInfo({}))
except grpc.RpcError as error:  # operators' alone
    assert error.code() == grpc.StatusCode.UNAUTHENTICATED, error

events = list(inference.Generate({**PROMPT, "max_tokens": 9, "ignore_eos": True}))
ids = [token for event in events for token in event.get("token_ids", [])]
assert len(ids) == 9, events
assert events[-1]["finish_reason"] == "length", events[-1]
assert events[-1]["usage"]["completion_tokens"] == 9, events[-1]
again = list(inference.Generate({**PROMPT, "max_tokens": 9, "ignore_eos": True}))
assert [event.get("text") for event in again] == [event.get("text") for event in events]
assert inference.Abort({"request_id": "nobody"}).get("found", False) is False

try:
    list(inference.Generate({**PROMPT, "temperature": -1.0}))
except grpc.RpcError as error:
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
    print("ok", len(events))
