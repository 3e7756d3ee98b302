"""A power cut at every moment of a program: its writes are recorded by strace and replayed up to each of them.

What counts as on the disk is the least that POSIX promises: the bytes of a file up to its last fsync, and the names in
a folder up to the last fsync of that folder. A new folder is a name in its parent. Whatever came later may be lost:
bytes before names or names before bytes, of every file and folder up to another moment.
"""

import ctypes
import hashlib
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tests.forked import Forked

Tree: TypeAlias = dict[str, bytes | None]  # path below the root → contents; None for a folder
Check: TypeAlias = Callable[[Path, list[str]], str]  # folder, marks that were passed → what is wrong, or ''

MARK = "/power-cut-mark/"
WRITES = "write,pwrite64,writev,ftruncate,truncate,fallocate,copy_file_range,sendfile,pwritev,pwritev2,mmap"
NAMES = "openat,open,creat,mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,rmdir,link,linkat,symlink,symlinkat"
SYNCS = "fsync,fdatasync,lseek,dup2,dup3"
# In the middle of another thread's call strace writes a line in two parts.
_UNFINISHED = re.compile(r"(\d+) +(.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)$")
_CALL = re.compile(r"\d+ +(\w+)\((.*)\) += (-?\d+)(?:<(.*)>)?")
_HEX = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_PLACE = re.compile(r"(-?\w+)<((?:\\x[0-9a-f]{2})*)>(?!\(deleted\))")
PR_SET_PTRACER, PTRACER_ANY = 0x59616D61, -1


class Operation(NamedTuple):
    """A change below the root, or a mark."""

    kind: str  # "create", "mkdir", "write", "truncate", "sync", "rename", "remove", "mark"
    path: str
    other: str = ""  # the new path of "rename"
    at: int = 0  # of "write" and "truncate", in bytes
    data: bytes = b""


def mark(text: str) -> None:
    """Say in the record of this process that something is promised from now on."""
    with suppress(FileNotFoundError):
        os.unlink(f"{MARK}{text}")


def why_not_here() -> str:
    """Why nothing can be recorded on this machine; '' where it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    done = subprocess.run(["strace", "-qq", "-e", "trace=fsync", "true"], capture_output=True, text=True)
    return f"strace cannot trace here: {done.stderr.strip()}" if done.returncode else ""


def recorded(root: Path, work: Callable[[], object], timeout_s: float = 600) -> list[Operation]:
    """What `work`, in a copy of this process, does below `root`."""
    root = root.resolve()
    before = tree_of(root)
    with tempfile.TemporaryDirectory() as folder:
        log, said, go = (Path(folder, name) for name in ("log", "said", "go"))

        def traced() -> None:
            ctypes.CDLL(None).prctl(PR_SET_PTRACER, PTRACER_ANY, 0, 0, 0)
            (go.parent / "ready").touch()
            _wait_for(go.exists)
            work()

        process = Forked(traced)
        _wait_for((go.parent / "ready").exists)
        options = ["-f", "-y", "-xx", "-s", str(1 << 28), "-e", "signal=none", "-e", f"trace={WRITES},{NAMES},{SYNCS}"]
        with said.open("wb") as stderr:
            tracer = subprocess.Popen(["strace", *options, "-o", str(log), "-p", str(process.pid)], stderr=stderr)
        _wait_for(lambda: b"attached" in said.read_bytes() or tracer.poll() is not None)
        go.touch()
        output = process.communicate(timeout_s)
        tracer.wait(timeout_s)
        if process.returncode:
            raise RuntimeError(f"the recorded process ended with {process.returncode}: {output} {said.read_text()}")
        operations = list(_Log(root).operations(log))
    disk = Disk(before)
    for operation in operations:
        disk.do(operation)
    if disk.tree() != tree_of(root):
        raise RuntimeError(f"the record is not whole: {_difference(disk.tree(), tree_of(root))}")
    return operations


def _wait_for(is_so: Callable[[], bool]) -> None:
    for _ in range(6000):
        if is_so():
            return
        time.sleep(0.01)
    raise TimeoutError


def _difference(one: Tree, other: Tree) -> list[str]:
    return sorted(path for path in {*one, *other} if one.get(path, 0) != other.get(path, 0))


class _Log:
    """Lines of strace as operations."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._at: dict[str, int | None] = {}  # descriptor → where it writes; None at the end

    def operations(self, log: Path) -> Iterator[Operation]:
        """Those below the root, in the order in which the calls ended."""
        begun: dict[str, str] = {}
        for line in log.read_text().split("\n"):
            if cut := _UNFINISHED.match(line):
                begun[cut[1]] = f"{cut[1]} {cut[2]}"
                continue
            if rest := _RESUMED.match(line):
                line = begun.pop(rest[1]) + rest[2]
            if call := _CALL.match(line):
                yield from self._of(call[1], call[2], int(call[3]), call[4])

    def _of(self, name: str, given: str, result: int, opened: str | None) -> Iterator[Operation]:
        paths = [] if "write" in name else self._paths(given)
        if paths and paths[0].startswith(MARK):
            yield Operation("mark", paths[0].removeprefix(MARK))
        if result < 0:
            return
        descriptor, place = (found[1], _text(found[2])) if (found := _PLACE.match(given)) else ("", "")
        if name in ("open", "openat", "creat"):
            self._at[str(result)] = None if "O_APPEND" in given else 0
            path = self._inside(_text(opened or ""))
            if path is not None and ("O_CREAT" in given or name == "creat"):
                yield Operation("create", path)
            if path is not None and ("O_TRUNC" in given or name == "creat"):
                yield Operation("truncate", path)
        elif name == "lseek" and self._at.get(descriptor) is not None:
            self._at[descriptor] = result
        elif name in ("mkdir", "mkdirat", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir"):
            inside = [self._inside(path) for path in paths]
            if any(path is not None for path in inside):
                kind = "rename" if "rename" in name else "mkdir" if "mkdir" in name else "remove"
                assert None not in inside, f"{name}({paths}) crosses the root"
                yield Operation(kind, inside[0] or "", (inside[-1] or "") if kind == "rename" else "")
        elif (path := self._inside(place)) is None:
            if name in ("dup2", "dup3", "link", "linkat", "symlink", "symlinkat"):
                assert all(self._inside(each) is None for each in paths), f"{name}({paths}) is not understood"
        elif name in ("fsync", "fdatasync"):
            yield Operation("sync", path)
        elif name in ("write", "writev", "pwrite64"):
            data = b"".join(_bytes(text) for text in _HEX.findall(given))[:result]
            own = self._at[descriptor]
            at = int(given.rpartition(", ")[2]) if name == "pwrite64" else -1 if own is None else own
            if own is not None and name != "pwrite64":
                self._at[descriptor] = own + result
            yield Operation("write", path, at=at, data=data)
        elif name == "ftruncate":
            yield Operation("truncate", path, at=int(given.rpartition(", ")[2]))
        else:
            is_reading = name == "lseek" or (name == "mmap" and not ("MAP_SHARED" in given and "PROT_WRITE" in given))
            assert is_reading, f"{name}({path}) is not understood"

    def _inside(self, path: str) -> str | None:
        """The path below the root; None for another."""
        path = os.path.normpath(path)
        return None if path != self._root and not path.startswith(f"{self._root}/") else path[len(self._root) + 1 :]

    def _paths(self, given: str) -> list[str]:
        found = re.findall(r'(?:-?\w+<([^>]*)>, )?"((?:\\x[0-9a-f]{2})+)"', given)
        return [os.path.join(os.getcwd(), _text(folder), _text(name)) for folder, name in found]


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def _text(text: str) -> str:
    return os.fsdecode(_bytes(text))


@dataclass(eq=False)
class Inode:
    """A file or folder: its changes in their order, and how many of them are certainly on the disk."""

    is_folder: bool
    changes: list[tuple[int, bytes] | int | dict[str, "Inode | None"]] = field(default_factory=list)
    durable: int = 0

    def names(self, count: int | None = None) -> dict[str, "Inode"]:
        """Of a folder after so many changes, or all."""
        found: dict[str, Inode | None] = {}
        for change in self.changes[:count]:
            assert isinstance(change, dict)
            found |= change
        return {name: inode for name, inode in found.items() if inode is not None}

    def contents(self, count: int | None = None) -> bytes:
        """Of a file after so many changes, or all."""
        data = bytearray()
        for change in self.changes[:count]:
            assert not isinstance(change, dict)
            _apply(data, change)
        return bytes(data)


def _apply(data: bytearray, change: tuple[int, bytes] | int) -> None:
    if isinstance(change, int):
        del data[change:]
        data.extend(bytes(change - len(data)))
        return
    at, written = change
    at = len(data) if at < 0 else at
    data.extend(bytes(max(0, at - len(data))))
    data[at : at + len(written)] = written


class Disk:
    """What a program sees, and what may be left of it."""

    def __init__(self, tree: Mapping[str, bytes | None]) -> None:
        """Begin with a tree that is all on the disk."""
        self.root = Inode(is_folder=True)
        for path, data in sorted(tree.items()):
            self.do(Operation("mkdir" if data is None else "create", path))
            if data:
                self.do(Operation("write", path, data=data))
        for inode in self._inodes():
            inode.durable = len(inode.changes)

    def do(self, operation: Operation) -> None:
        """Apply an operation to what the program sees."""
        kind, path = operation.kind, operation.path
        if kind == "mark":
            return
        if kind in ("write", "truncate", "sync"):
            # What was removed while it was open is not seen again.
            if (inode := self._find(path)) is not None:
                if kind == "sync":
                    inode.durable = len(inode.changes)
                elif kind == "write":
                    inode.changes.append((operation.at, operation.data))
                elif inode.changes or operation.at:
                    inode.changes.append(operation.at)
            return
        folder, name = self._parent(path)
        if kind == "create" and name in folder.names():
            return
        if kind in ("create", "mkdir"):
            folder.changes.append({name: Inode(is_folder=kind == "mkdir")})
        elif kind == "remove":
            folder.changes.append({name: None})
        else:
            target, new = self._parent(operation.other)
            moved = folder.names()[name]
            if target is folder:
                folder.changes.append({name: None, new: moved})
            else:
                target.changes.append({new: moved})
                folder.changes.append({name: None})

    def tree(self) -> Tree:
        """What the program sees."""
        return _walk(self.root, lambda inode: inode.names(), lambda inode: inode.contents())

    def left(self, how: str, chance: random.Random) -> Tree:
        """What is left after a power cut now, of all that may be."""

        def some(inode: Inode) -> int:
            return chance.randint(inode.durable, len(inode.changes))

        def zeros(inode: Inode) -> bytes:
            data = inode.contents(inode.durable)
            return data + bytes(max(0, len(inode.contents()) - len(data)))

        def torn(inode: Inode) -> bytes:
            count = some(inode)
            data = bytearray(inode.contents(count))
            if count < len(inode.changes) and isinstance(following := inode.changes[count], tuple):
                _apply(data, (following[0], following[1][: chance.randint(0, len(following[1]))]))
            return bytes(data)

        names, contents = {
            "what is synced": (lambda inode: inode.names(inode.durable), lambda inode: inode.contents(inode.durable)),
            "names without bytes": (lambda inode: inode.names(), lambda inode: inode.contents(inode.durable)),
            "names and sizes": (lambda inode: inode.names(), zeros),
            "bytes without names": (lambda inode: inode.names(inode.durable), lambda inode: inode.contents()),
            "everything": (lambda inode: inode.names(), lambda inode: inode.contents()),
            "some": (lambda inode: inode.names(some(inode)), torn),
        }[how]
        return _walk(self.root, names, contents)

    def _find(self, path: str) -> Inode | None:
        inode: Inode | None = self.root
        for name in filter(None, path.split("/")):
            inode = inode.names().get(name) if inode else None
        return inode

    def _parent(self, path: str) -> tuple[Inode, str]:
        above, _, name = path.rpartition("/")
        folder = self._find(above)
        assert folder is not None, path
        return folder, name

    def _inodes(self) -> list[Inode]:
        found = [self.root]
        for inode in found:
            if inode.is_folder:
                found += inode.names().values()
        return found


def _walk(
    root: Inode, names: Callable[[Inode], dict[str, Inode]], contents: Callable[[Inode], bytes], below: str = ""
) -> Tree:
    found: Tree = {}
    for name, inode in names(root).items():
        path = f"{below}{name}"
        found[path] = None if inode.is_folder else contents(inode)
        if inode.is_folder:
            found |= _walk(inode, names, contents, f"{path}/")
    return found


CERTAIN = ("what is synced", "names without bytes", "names and sizes", "bytes without names", "everything")


@dataclass
class Replayed:
    """How a program's record stood every cut."""

    operations: int
    syncs: int
    cuts: int = 0
    states: dict[str, tuple[Tree, list[str]]] = field(default_factory=dict)  # different ones, with the marks before
    faults: dict[str, str] = field(default_factory=dict)  # state → what is wrong, and after which operation

    def __str__(self) -> str:
        return (
            f"{self.operations:,} operations ({self.syncs:,} fsyncs), {self.cuts:,} cuts, {len(self.states):,} "
            f"different states, {len(self.faults):,} of them neither old nor new"
        )


def replayed(before: Tree, operations: list[Operation], check: Check, *, chances: int = 2, seed: int = 0) -> Replayed:
    """Cut the power after every operation, in all ways that are certain and `chances` others; check what is left."""
    kinds = Counter(operation.kind for operation in operations)
    found = Replayed(len(operations) - kinds["mark"], kinds["sync"])
    disk, marks, chance = Disk(before), list[str](), random.Random(seed)
    for operation in operations:
        disk.do(operation)
        if operation.kind == "mark":
            marks.append(operation.path)
        for how in (*CERTAIN, *["some"] * chances):
            found.cuts += 1
            tree = disk.left(how, chance)
            known_by = digest_of(tree, marks)
            if known_by in found.states:
                continue
            found.states[known_by] = tree, list(marks)
            with materialized(tree) as folder:
                if wrong := check(folder, marks):
                    found.faults[known_by] = f"{how}, after {operation.kind} {operation.path}: {wrong}"
    return found


def digest_of(tree: Tree, marks: list[str]) -> str:
    """What two states that are equal share."""
    digest = hashlib.blake2b("\0".join(marks).encode())
    for path in sorted(tree):
        data = tree[path]
        digest.update(f"\0{path}\0{-1 if data is None else len(data)}\0".encode("utf-8", "surrogateescape"))
        digest.update(data or b"")
    return digest.hexdigest()


@contextmanager
def materialized(tree: Tree) -> Iterator[Path]:
    """A tree as a folder, for a while."""
    in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=in_memory) as root:
        for path, data in sorted(tree.items()):
            if data is None:
                Path(root, path).mkdir()
            else:
                Path(root, path).write_bytes(data)
        yield Path(root)


def tree_of(root: Path) -> Tree:
    """What lies below a folder."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in sorted(root.rglob("*"))
    }
