"""What the file system says about a database's file: its identity, its permissions, and whether it is local."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from tenure.store.session import Gone

COMPANIONS = ("-wal", "-shm")
"""SQLite's log and its index. Connections with different ones do not see each other's transactions and locks."""
MOUNTINFO = Path("/proc/self/mountinfo")

_SHARED = """
    9p afs beegfs ceph cifs coda davfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs pvfs2 smb3 smbfs vboxsf
    virtiofs
    fuse.blobfuse fuse.blobfuse2 fuse.ceph fuse.ceph-fuse fuse.curlftpfs fuse.davfs fuse.gcsfuse fuse.glusterfs
    fuse.goofys fuse.juicefs fuse.rclone fuse.s3fs fuse.seaweedfs fuse.smbnetfs fuse.sshfs
"""
NETWORK = frozenset(_SHARED.split())
"""File systems that other machines may write to. Locks and shared memory of one machine do not reach the others."""


def network_file_system(path: Path, mountinfo: Path = MOUNTINFO) -> str | None:
    """Return the type of the network file system that a file is on; None if it is local, or unknown."""
    try:
        lines = mountinfo.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    real, longest, kind = os.path.realpath(path), "", ""
    for line in lines:
        mount, _, source = line.partition(" - ")
        point = _unescaped(mount.split(" ")[4])
        # Of several mounts on the same directory, the last covers the others.
        if len(point) >= len(longest) and f"{real}/".startswith(point.rstrip("/") + "/"):
            longest, kind = point, source.split(" ")[0]
    return kind if kind in NETWORK else None


def _unescaped(text: str) -> str:
    """Replace the octal escapes that the kernel writes for blanks and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def file_id(path: Path | str, *, companions: bool = True) -> str:
    """Return which file a path names, with SQLite's log and index beside it; raise OSError if there is none.

    A file system reuses the numbers of inodes, ext4 at once, but not while a process has the file open. So two equal
    ids mean the same file if the file of one of them has been open in this process ever since.
    """
    # Never open() the file: closing it would drop SQLite's locks.
    found = os.stat(path)  # noqa: PTH116
    beside = [inode_of(f"{os.path.realpath(path)}{suffix}") for suffix in COMPANIONS] if companions else []
    return "-".join(f"{number:x}" for number in (found.st_dev, found.st_ino, *beside))


def inode_of(path: str) -> int:
    """Return the number of a file's inode; 0 if there is no such file."""
    try:
        return os.stat(path).st_ino  # noqa: PTH116
    except FileNotFoundError:
        return 0


class DatabaseFile(NamedTuple):
    """The file that a connection has opened, and the path at which every process finds it."""

    path: Path
    id: str
    companions: bool
    """Whether the id includes the log and its index. They exist once a connection has read something."""

    @property
    def sentinels(self) -> Path:
        """The directory of locks beside the file. It is the same whichever symbolic link leads to the file."""
        return sentinels_of(self.path)

    def check(self) -> None:
        """Raise Gone if the path names another file by now, or the file has further names (hard links)."""
        try:
            there, links = file_id(self.path, companions=self.companions), hard_link_problem(self.path)
        except OSError as error:
            raise Gone(f"cannot check the file {str(self.path)!r}: {error.strerror}") from None
        if there != self.id:
            raise Gone(f"the file {str(self.path)!r}, or its -wal or -shm, was replaced by another one")
        if links:
            raise Gone(links)


def hard_link_problem(path: Path) -> str | None:
    """Return an error message if a file has several names, else None: SQLite keeps a separate log for each name."""
    count = os.stat(path).st_nlink  # noqa: PTH116
    # Some file systems report no link at all.
    if count < 2:
        return None
    return (
        f"the file {str(path)!r} has {count} hard links, and a process that opens it by another name does not see what "
        "is written by this one: remove the other links"
    )


def sentinels_of(path: Path) -> Path:
    """Return the directory of locks beside a database's file."""
    return Path(os.path.realpath(path) + ".sentinels")


def may_write(path: Path) -> bool:
    """Whether this user may read and write a file, or list and change a directory."""
    return os.access(path, os.R_OK | os.W_OK, effective_ids=os.access in os.supports_effective_ids)
