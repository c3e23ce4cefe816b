"""A switch in user space, in the place of the bridge between hosts: it carries frames late, loses
some, and carries none between hosts that are kept apart.

Frames are real ones of the kernel's TCP, so what is lost is sent again by TCP, with its time-outs.
Life: the hosts are up -> `async with Switch(...)` -> part() and heal() -> the hosts go down.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tests.chaos.hosts import Hosts

T = TypeVar("T")
EVERY_PROTOCOL = 3  # ETH_P_ALL
SENT_HERE = 4  # PACKET_OUTGOING: a frame that we have sent ourselves
MAX_FRAME = 1 << 16
BUFFER_BYTES = 4 << 20
CLONE_NEWNET = 0x40000000
SIOCETHTOOL = 0x8946
SETTINGS = (0x17, 0x1F, 0x25)  # ETHTOOL_STXCSUM, _STSO, _SGSO: frames as they leave for a wire
OWN = "own"  # the port of the machine that runs the test


class Switch:
    """`delay_s`: of each frame. `loss`: the share of frames that are lost. Event loop only."""

    def __init__(self, hosts: Hosts, delay_s: float, loss: float, seed: int) -> None:
        self._hosts = hosts
        self._delay_s = delay_s
        self._loss = loss
        self._random = random.Random(seed)
        self._ports: dict[str, socket.socket] = {}
        self._learned: dict[bytes, str] = {}  # MAC address -> port
        self._parted: frozenset[str] = frozenset()
        self.carried = 0
        self.lost = 0
        self.withheld: Counter[frozenset[str]] = Counter()  # frames between hosts kept apart

    async def __aenter__(self) -> Switch:
        loop, space = asyncio.get_running_loop(), self._hosts.space("sw")
        for name in (*self._hosts.names, OWN):
            self._hosts.unplug(name)
            port = in_namespace(space, lambda name=name: _open(name))
            self._ports[name] = port
            loop.add_reader(port, self._receive, name, port)
        for name in self._hosts.names:
            in_namespace(self._hosts.space(name), lambda: whole_frames("eth0"))
        whole_frames(self._hosts.own_port)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for port in self._ports.values():
            asyncio.get_running_loop().remove_reader(port)
            port.close()
        self._ports.clear()

    def part(self, one: str, other: str) -> None:
        """From now on these two do not reach each other."""
        self._parted = frozenset((one, other))

    def heal(self) -> None:
        self._parted = frozenset()

    def _receive(self, source: str, port: socket.socket) -> None:
        try:
            frame, (_, _, kind, _, _) = port.recvfrom(MAX_FRAME)
        except BlockingIOError:
            return
        if kind == SENT_HERE:
            return
        self._learned[frame[6:12]] = source
        target = self._learned.get(frame[:6])
        targets = [target] if target else [name for name in self._ports if name != source]
        for each in targets:
            pair = frozenset((source, each))
            if pair == self._parted:
                self.withheld[pair] += 1
            elif self._random.random() < self._loss:
                self.lost += 1
            else:
                asyncio.get_running_loop().call_later(self._delay_s, self._send, each, frame)

    def _send(self, target: str, frame: bytes) -> None:
        port = self._ports.get(target)
        if port is None:
            return  # the switch is closed
        try:
            port.send(frame)
        except OSError:  # its queue is full, as that of a real switch may be
            self.lost += 1
        else:
            self.carried += 1


def in_namespace(name: str, work: Callable[[], T]) -> T:
    """Do `work` on a thread whose network is the namespace `name`."""
    done: list[T] = []

    def enter() -> None:
        with Path(f"/var/run/netns/{name}").open() as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        done.append(work())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    [result] = done
    return result


def _open(interface: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL))
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    port.setblocking(False)
    port.bind((interface, EVERY_PROTOCOL))
    return port


def whole_frames(interface: str) -> None:
    """Let the kernel cut segments and compute checksums itself: no device behind it will."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for command in SETTINGS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            address = ctypes.addressof(value)
            request = struct.pack("16sP16x", interface.encode(), address)
            fcntl.ioctl(asked, SIOCETHTOOL, request)
