"""Which file system a file is on, where Linux tells it."""

from __future__ import annotations

import os
import re
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")

_SHARED = """
    9p afs beegfs ceph cifs coda davfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs pvfs2 smb3 smbfs
    fuse.blobfuse fuse.blobfuse2 fuse.ceph fuse.ceph-fuse fuse.curlftpfs fuse.davfs fuse.gcsfuse fuse.glusterfs
    fuse.goofys fuse.juicefs fuse.rclone fuse.s3fs fuse.seaweedfs fuse.smbnetfs fuse.sshfs
"""
NETWORK = frozenset(_SHARED.split())
"""File systems that another machine may write to, where a lock or a shared memory of this one means nothing."""


def network_file_system(path: Path, mountinfo: Path = MOUNTINFO) -> str | None:
    """Return the type of the network file system that a file is on; None if it is local, or nobody can tell."""
    try:
        lines = mountinfo.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    real, longest, kind = os.path.realpath(path), "", ""
    for line in lines:
        mount, _, source = line.partition(" - ")
        point = _unescaped(mount.split(" ")[4])
        # The last of several on the same directory covers the others.
        if len(point) >= len(longest) and f"{real}/".startswith(point.rstrip("/") + "/"):
            longest, kind = point, source.split(" ")[0]
    return kind if kind in NETWORK else None


def _unescaped(text: str) -> str:
    """Undo what the kernel does to blanks and backslashes: an octal number each."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
