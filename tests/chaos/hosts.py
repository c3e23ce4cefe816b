"""A host per node: network namespaces joined by a switch in one of its own. Root and iproute2.

What the machine itself runs (routers, clients) is a host on that switch, too. A link that is down
loses packets without a word, as a pulled cable does; ports that are `isolated` reach everybody but
each other. Nothing of it touches the machine's own network. The life: up() -> used -> down().
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

KNOCK_S = 1.0
SUBNETS = 250


def obstacle() -> str:
    """Why this machine does not let us make hosts; empty if it does."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("ip", "bridge", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} on PATH"
    return "" if _try("ip", "netns", "list") else "ip netns does not work here"


def _try(*words: str) -> bool:
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _do(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, check=False, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@dataclass
class Hosts:
    """One per name of `names`; `troubled`: links that are down, or isolated, now."""

    names: Sequence[str]
    troubled: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self._prefix = f"bt{os.getpid()}"
        self._subnet = f"10.213.{os.getpid() % SUBNETS}"

    @property
    def own_address(self) -> str:
        """Of what the machine itself runs."""
        return f"{self._subnet}.254"

    @property
    def own_port(self) -> str:
        """The machine's interface to the switch."""
        return f"{self._prefix}-own"

    def address(self, name: str) -> str:
        return f"{self._subnet}.{1 + self.names.index(name)}"

    def enter(self, name: str) -> tuple[str, ...]:
        """Words before a command that runs on that host; its process is the command's."""
        return ("nsenter", f"--net=/var/run/netns/{self.space(name)}")

    def up(self) -> None:
        """Raises OSError; then `down` takes away what there is."""
        switch, own = self.space("sw"), self.own_port
        _do("ip", "netns", "add", switch)
        _do("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _do("ip", "-n", switch, "link", "set", "br0", "up")
        for name in self.names:
            space = self.space(name)
            _do("ip", "netns", "add", space)
            _do("ip", "link", "add", "eth0", "netns", space, "type", "veth",
                "peer", "name", name, "netns", switch)  # fmt: skip
            _do("ip", "-n", space, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            _do("ip", "-n", space, "link", "set", "eth0", "up")
            _do("ip", "-n", space, "link", "set", "lo", "up")
            _do("ip", "-n", switch, "link", "set", name, "master", "br0", "up")
        _do("ip", "link", "add", own, "type", "veth", "peer", "name", "own", "netns", switch)
        _do("ip", "-n", switch, "link", "set", "own", "master", "br0", "up")
        _do("ip", "address", "add", f"{self.own_address}/24", "dev", own)
        _do("ip", "link", "set", own, "up")

    def down(self) -> None:
        """Links go with their namespaces. Twice is safe."""
        for name in (*self.names, "sw"):
            _try("ip", "netns", "delete", self.space(name))

    def unplug(self, name: str) -> None:
        """Take its link off the bridge; another switch carries its frames."""
        _do("ip", "-n", self.space("sw"), "link", "set", name, "nomaster")

    def cut(self, name: str) -> None:
        """Pull its cable."""
        _do("ip", "-n", self.space("sw"), "link", "set", name, "down")
        self.troubled.add(name)

    def part(self, names: Sequence[str]) -> None:
        """These do not reach each other any more; everybody else does."""
        for name in names:
            self._isolate(name, "on")
            self.troubled.add(name)

    def heal(self) -> None:
        """Every link as in the beginning."""
        for name in self.troubled:
            self._isolate(name, "off")
            _do("ip", "-n", self.space("sw"), "link", "set", name, "up")
        self.troubled.clear()

    async def reaches(self, target: str, port: int, source: str | None = None) -> bool:
        """Whether a connection is made in time; `source` None: from this machine."""
        knock = ("timeout", str(KNOCK_S), "bash", "-c", f"</dev/tcp/{self.address(target)}/{port}")
        words = knock if source is None else (*self.enter(source), *knock)
        process = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.DEVNULL)
        return await process.wait() == 0

    def _isolate(self, name: str, word: str) -> None:
        switch = f"--net=/var/run/netns/{self.space('sw')}"
        _do("nsenter", switch, "bridge", "link", "set", "dev", name, "isolated", word)

    def space(self, name: str) -> str:
        return f"{self._prefix}-{name}"
