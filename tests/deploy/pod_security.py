"""The Pod Security Standard `restricted`, as a list of what a pod breaks.

Source: kubernetes.io/docs/concepts/security/pod-security-standards (the rules of `baseline` and
`restricted` for Linux).
"""

from __future__ import annotations

from typing import Any

VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim",
    "projected", "secret",
}  # fmt: skip
PROFILES = ("RuntimeDefault", "Localhost")
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")

Json = dict[str, Any]


def violations(spec: Json) -> list[str]:
    """What a pod's `spec` breaks, one line each; empty for a restricted one."""
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    pod = spec.get("securityContext", {})
    found += [f"sysctl {each['name']}" for each in pod.get("sysctls", [])]
    for volume in spec.get("volumes", []):
        kinds = volume.keys() - {"name"}
        found += [f"volume {volume['name']}: {kind}" for kind in sorted(kinds - VOLUMES)]
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        found += [f"{container['name']}: {each}" for each in _of_container(container, pod)]
    return found


def _of_container(container: Json, pod: Json) -> list[str]:
    own = container.get("securityContext", {})
    merged = pod | own
    capabilities = own.get("capabilities", {})
    rules = {
        "privileged": own.get("privileged", False),
        "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is not False,
        "capabilities.drop": "ALL" not in capabilities.get("drop", []),
        "capabilities.add": bool(set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}),
        "runAsNonRoot": merged.get("runAsNonRoot") is not True,
        "runAsUser": merged.get("runAsUser") == 0,
        "seccompProfile": merged.get("seccompProfile", {}).get("type") not in PROFILES,
        "procMount": own.get("procMount", "Default") != "Default",
        "seLinuxOptions": bool(merged.get("seLinuxOptions", {}).keys() & {"user", "role"}),
        "hostPort": any(port.get("hostPort") for port in container.get("ports", [])),
        "host of a probe": any(
            handler.get("host")
            for probe in PROBES
            for handler in container.get(probe, {}).values()
            if isinstance(handler, dict)
        ),
    }
    return [name for name, broken in rules.items() if broken]
