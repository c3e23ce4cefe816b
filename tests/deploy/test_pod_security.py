"""The rules of Pod Security by which the chart is judged refuse what Kubernetes refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.deploy.pod_security import violations

Json = dict[str, Any]
GOOD: Json = {
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "volumes": [{"name": "tmp", "emptyDir": {}}],
    "containers": [
        {
            "name": "c",
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            },
            "livenessProbe": {"httpGet": {"path": "/", "port": 1}},
            "ports": [{"containerPort": 1}],
        }
    ],
}  # fmt: skip


def test_a_restricted_pod_breaks_nothing() -> None:
    assert violations(GOOD) == []


@pytest.mark.parametrize(
    ("path", "value", "broken"),
    [
        ("hostNetwork", True, "hostNetwork"),
        ("securityContext/sysctls", [{"name": "net.x"}], "sysctl net.x"),
        ("securityContext/runAsNonRoot", False, "c: runAsNonRoot"),
        ("securityContext/runAsUser", 0, "c: runAsUser"),
        ("securityContext/seccompProfile", {"type": "Unconfined"}, "c: seccompProfile"),
        ("volumes/0", {"name": "h", "hostPath": {"path": "/"}}, "volume h: hostPath"),
        ("containers/0/securityContext/privileged", True, "c: privileged"),
        (
            "containers/0/securityContext/allowPrivilegeEscalation", True,
            "c: allowPrivilegeEscalation",
        ),
        ("containers/0/securityContext/capabilities/drop", [], "c: capabilities.drop"),
        ("containers/0/securityContext/capabilities/add", ["IPC_LOCK"], "c: capabilities.add"),
        ("containers/0/securityContext/procMount", "Unmasked", "c: procMount"),
        ("containers/0/securityContext/seLinuxOptions", {"user": "u"}, "c: seLinuxOptions"),
        ("containers/0/ports/0/hostPort", 80, "c: hostPort"),
        ("containers/0/livenessProbe/httpGet/host", "10.0.0.1", "c: host of a probe"),
    ],
)  # fmt: skip
def test_each_rule_is_kept_alone(path: str, value: object, broken: str) -> None:
    pod: Any = copy.deepcopy(GOOD)
    *way, last = path.split("/")
    at = pod
    for word in way:
        at = at[int(word)] if word.isdigit() else at[word]
    at[int(last) if last.isdigit() else last] = value
    assert violations(pod) == [broken]
