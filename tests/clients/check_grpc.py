"""grpc-requests, unmodified, calls the gRPC API by reflection alone: `./run clients`."""

from __future__ import annotations

import pytest

from tests.clients.conftest import SCRIPT_S, SCRIPTS, Cluster, Install, run_client

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_grpc_requests(install: Install, demo: Cluster) -> None:
    script = str(SCRIPTS / "grpc_reflected.py")
    python = install(["grpc-requests"])
    command = [str(python), script, demo.grpc, demo.model, demo.key]
    assert "ok" in await run_client(command, SCRIPT_S)
