"""Which process of `baton up` gets which flag: rules for every option of router, nodes and engine.

A flag that only the router has goes to the router. A flag of engine or nodes goes to every node,
and a flag that both have goes to both. An option of the launcher itself (UpOptions) is decided by
the launcher. A flag that makes no sense for several processes on one machine is refused, with a
sentence why. A flag that is added to a configuration becomes a flag of `baton up` without further
work (tests/deploy/test_flags.py).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from baton.engine.config import EngineConfig
from baton.node.config import NodeConfig
from baton.protocol.errors import ConfigError
from baton.runtime.config import add_config, add_options, given
from router.config import RouterConfig

_OWN_NODES: Final = "`baton up` starts the nodes itself: --prefill N --decode M --encode E"
_NO_TLS: Final = "nodes of `baton up` meet on this machine alone, without TLS"
_NO_PODS: Final = "nodes of `baton up` are no pods"
_NAMES: Final = "`baton up` names its nodes itself: prefill-0, decode-0, ..."
_ONE_PORT: Final = "several nodes cannot share a port; each takes a free one, and `up` says which"


def option_names(options: type) -> frozenset[str]:
    """Return the fields of a configuration that are flags, or secrets of the environment."""
    return frozenset(spec.name for spec in fields(options) if "help" in spec.metadata)


ENGINE: Final = option_names(EngineConfig)
NODE: Final = option_names(NodeConfig)
ROUTER: Final = option_names(RouterConfig)
_SINGLE_PORTS: Final = frozenset(name for name in NODE if name.endswith("port"))
REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(_SINGLE_PORTS - ROUTER, _ONE_PORT),
    **dict.fromkeys(("prefill_node", "decode_node", "encode_node"), _OWN_NODES),
    **dict.fromkeys(("node_tls_cert", "node_tls_key", "node_tls_ca"), _NO_TLS),
    **dict.fromkeys(("kv_tls_cert", "kv_tls_key", "kv_tls_ca"), _NO_TLS),
    **dict.fromkeys(("pod_name", "kubernetes_api", "service_account"), _NO_PODS),
    "advertise_host": "nodes of `baton up` meet on this machine alone",
    "break_socket": "`baton up --demo` makes it",
    **dict.fromkeys(("core_board", "spare_cores"), "`baton up` decides it: --lend-cores"),
    "cpu_cores": "`baton up` splits the cores among its processes: --cores",
    "models": "`baton up` serves one model; docs/several_models.md starts several",
    "node_id": _NAMES,
    "secret_file": "it draws a secret at each start, for its own processes",
    "reuse_port": "routers of one `baton up` share its ports by --workers",
    "uds": "`baton up` asks its first question at a port; `baton router --uds` listens there",
}


def to_router(own: type) -> frozenset[str]:
    """Return the flags that the router gets unchanged. `own` are the launcher's options."""
    return ROUTER - option_names(own) - REFUSED.keys()


def to_nodes(own: type) -> frozenset[str]:
    """Return the flags that every node gets unchanged.

    There is no port among them, because only one process can have a port.
    """
    return (ENGINE | (NODE - option_names(own) - _SINGLE_PORTS)) - REFUSED.keys()


def add_flags(parser: argparse.ArgumentParser, own: type) -> None:
    """Add every flag of `baton up`. `own` are the launcher's options."""
    add_config(parser)
    router, nodes = to_router(own) - ENGINE, to_nodes(own)
    add_options(parser.add_argument_group("launcher"), own)
    add_options(parser.add_argument_group("engine of every node"), EngineConfig, nodes & ENGINE)
    add_options(parser.add_argument_group("router"), RouterConfig, router)
    add_options(parser.add_argument_group("nodes"), NodeConfig, nodes - ENGINE - router)
    for name in REFUSED:
        flag = "--" + name.replace("_", "-")
        silent = argparse.SUPPRESS
        parser.add_argument(flag, dest=name, nargs="?", default=silent, help=silent)


def given_flags(arguments: argparse.Namespace, own: type) -> dict[str, object]:
    """Return the given flags that are passed on.

    Raises ConfigError for a flag that makes no sense here.
    """
    told = vars(arguments)
    for config in (EngineConfig, NodeConfig, RouterConfig):  # those in the file, too
        told = given(config, arguments, os.environ) | told
    for name, reason in REFUSED.items():
        if name in told:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is no flag of `baton up`: {reason}", field=name)
    passed = to_router(own) | to_nodes(own)
    return {name: value for name, value in told.items() if name in passed}
