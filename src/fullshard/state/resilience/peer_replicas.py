"""Copies of snapshots on other machines: each rank's goes to a peer on the next machine, in a ring.

A rank listens on its own port and writes what arrives into its machine's directory, under the number of the rank that
it belongs to. After a machine is lost, its ranks' snapshots come back the same way.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from pathlib import Path

from fullshard.core.comm import Mesh
from fullshard.state.resilience.snapshot_buffer import BYTES_NAME, MANIFEST_NAME, SnapshotBuffer
from fullshard.state.storage import SMALL, require_sealed

SECONDS = 120.0
"""Longest silence of another machine in the middle of a copy."""

_TOKEN_BYTES = 32
_HEAD = struct.Struct("!QQ")
_STORED = b"1"

_log = logging.getLogger("fullshard")


class PeerReplicas:
    """One rank's connections to the ranks of other machines; made by every rank, for copies of snapshots.

    Attributes:
        each: Number of ranks on each machine.
    """

    def __init__(self, ranks: Mesh, directory: Path) -> None:
        """Listen, and exchange addresses; what arrives is stored under ``directory``.

        The group's ranks exchange a secret, and connections without it are refused.
        """
        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
        everywhere = set(ranks.all_gather_object(here))
        # Machines with different numbers of ranks would need another pairing, so they have no peers.
        self.each = here if len(everywhere) == 1 and ranks.size % here == 0 else ranks.size
        self._rank, self._size = ranks.rank, ranks.size
        self._directory = directory
        self._addresses: list[tuple[str, int, bytes]] = []
        if self.several:
            token = secrets.token_bytes(_TOKEN_BYTES)
            listener = socket.create_server(("", 0))
            threading.Thread(target=self._listen, args=(listener, token), daemon=True).start()
            self._addresses = ranks.all_gather_object((_own_address(), listener.getsockname()[1], token))

    @property
    def several(self) -> bool:
        """True if there are several machines with equally many ranks."""
        return self.each < self._size

    @property
    def peer(self) -> int:
        """The rank of the next machine that keeps this rank's snapshots."""
        return (self._rank + self.each) % self._size

    def buffer_of(self, rank: int, serial: int) -> SnapshotBuffer:
        """Return the buffer on this machine of a rank's snapshot with a serial number; there are two for each rank."""
        return SnapshotBuffer(self._directory / f"rank-{rank:05d}" / str(serial % 2))

    def send(self, rank: int, directory: Path) -> None:
        """Send the complete snapshot in ``directory`` to another rank, and return when it is stored there.

        Raises:
            OSError: The connection failed, or the other rank did not store it.
        """
        host, port, token = self._addresses[rank]
        manifest = (directory / MANIFEST_NAME).read_bytes()
        with socket.create_connection((host, port), SECONDS) as connection, (directory / BYTES_NAME).open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            connection.sendall(token + _HEAD.pack(len(manifest), nbytes) + manifest)
            connection.sendfile(file)
            if connection.recv(1) != _STORED:
                raise OSError(f"rank {rank} did not store the snapshot of rank {self._rank}")

    def _listen(self, listener: socket.socket, token: bytes) -> None:
        """Accept one connection after the other; runs in a thread."""
        with listener:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError as error:  # no descriptors left, say: the sender tries another time
                    _log.warning("Snapshots of other machines cannot be received at present: %s.", error)
                    time.sleep(1.0)
                    continue
                threading.Thread(target=self._receive, args=(connection, token), daemon=True).start()

    def _receive(self, connection: socket.socket, token: bytes) -> None:
        """Store one snapshot; if that fails, the connection ends without an answer, which tells the sender."""
        with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            connection.settimeout(SECONDS)
            if not hmac.compare_digest(bytes(_read(connection, bytearray(_TOKEN_BYTES))), token):
                return
            length, nbytes = _HEAD.unpack(_read(connection, bytearray(_HEAD.size)))
            if length > SMALL.nbytes:
                return
            manifest = bytes(_read(connection, bytearray(length)))
            require_sealed(manifest, needed=True)
            whole = json.loads(manifest)
            buffer = self.buffer_of(int(whole["rank"]), int(whole["serial"]))
            buffer.store(manifest, nbytes, lambda view: _read(connection, view))
            connection.sendall(_STORED)


def _read(connection: socket.socket, target: bytearray | memoryview) -> bytearray | memoryview:
    """Fill ``target`` from a connection.

    Raises:
        OSError: The connection ended early.
    """
    view = memoryview(target)
    while len(view):
        count = connection.recv_into(view)
        if count == 0:
            raise OSError("the connection ended in the middle of a snapshot")
        view = view[count:]
    return target


def _own_address() -> str:
    """Return the address under which the machine of rank 0 sees this one."""
    master = (os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "1")))
    family = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(master)  # sends nothing
        return probe.getsockname()[0]
