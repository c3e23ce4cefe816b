"""What users of the Python client import: `from baton.client import Client`."""

from baton.client.client import AsyncClient, Client
from baton.client.values import (
    GenerateEvent,
    GenerateOptions,
    Generation,
    Logprobs,
    Migrations,
    Model,
    Node,
    ServerInfo,
    Usage,
)
from baton.runtime.tls import ClientTls

__all__ = [
    "AsyncClient",
    "Client",
    "ClientTls",
    "GenerateEvent",
    "GenerateOptions",
    "Generation",
    "Logprobs",
    "Migrations",
    "Model",
    "Node",
    "ServerInfo",
    "Usage",
]
