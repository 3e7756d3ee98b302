"""Make this process like one on Windows, as far as third-party packages allow: `python -m tests.like_windows MODULE`.

What Python lacks there is removed, and what Windows refuses raises its errors. Third-party packages and those parts of
the standard library that decide at import are loaded before. Nothing can be said of file names and drives.
"""

import concurrent.futures.process
import ctypes
import errno
import fcntl
import importlib
import logging.handlers
import multiprocessing.spawn
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

LOADED = (
    "torch", "torch._dynamo", "torch.utils.data", "torch.utils.tensorboard", "torchvision", "timm", "timm.models",
    "filelock", "huggingface_hub", "safetensors.torch", "sklearn.datasets", "rich.progress", "rich.console", "typer",
    "typer.testing", "PIL.Image", "jinja2", "yaml", "pyarrow.parquet", "datasets", "granian.server.embed",
    "starlette.applications", "prometheus_client", "onnxruntime", "onnx", "sentencepiece", "sacrebleu", "faiss",
)  # fmt: skip
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline", "curses")
SIGNALS = ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGKILL", "SIGPIPE", "SIGCHLD", "SIGALRM", "SIGBUS", "SIGCONT", "SIGSTOP",
           "SIGQUIT", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGWINCH", "SIGXCPU", "alarm", "setitimer", "getitimer",
           "pthread_kill", "pthread_sigmask", "sigpending", "sigwait", "sigwaitinfo", "siginterrupt")  # fmt: skip
SYSTEM = ("fork", "forkpty", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "sched_setscheduler",
          "SCHED_BATCH", "sched_yield", "getloadavg", "O_NOFOLLOW", "O_DIRECTORY", "O_NONBLOCK", "O_CLOEXEC", "O_PATH",
          "uname", "statvfs", "fstatvfs", "sysconf", "pread", "pwrite", "preadv", "fchmod", "fchown", "chown",
          "lchown", "getuid", "geteuid", "getgid", "getegid", "killpg", "getpgid", "setsid", "getsid", "nice",
          "mkfifo", "mknod", "posix_fallocate", "posix_fadvise", "sendfile", "wait", "wait3", "wait4", "waitid",
          "WNOHANG", "getpriority", "setpriority", "ttyname", "openpty", "sync", "fdatasync", "fchdir", "chroot",
          "getxattr", "setxattr", "memfd_create", "splice", "copy_file_range", "ctermid", "getgroups")  # fmt: skip


def pretend() -> None:
    """Change this process for the rest of its life."""
    for name in LOADED:
        try:
            importlib.import_module(name)
        except ImportError:  # an extra
            continue
    _files()
    _processes()
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in SIGNALS:
        vars(signal).pop(name, None)
    for name in SYSTEM:
        vars(os).pop(name, None)
    sys.platform = "win32"


def _files() -> None:
    """Refuse to open folders, to sync what is only read, and to replace or move what is open."""
    usage, get_flags = shutil.disk_usage, fcntl.fcntl
    statvfs, system_open, system_replace, system_fsync = os.statvfs, os.open, os.replace, os.fsync

    def disk_usage(path: Any) -> Any:
        space = statvfs(path)
        return type(usage("/"))(space.f_blocks * space.f_frsize, 0, space.f_bavail * space.f_frsize)

    def open_file(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None:
            raise NotImplementedError("dir_fd unavailable on this platform")
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return system_open(path, flags, mode)

    def replace(source: Any, target: Any) -> None:
        for one in (source, target):
            real = os.path.realpath(one)
            for number in os.listdir("/proc/self/fd"):
                try:
                    place = os.readlink(f"/proc/self/fd/{number}")
                except OSError:  # that of the listing
                    continue
                if place == real or place.startswith(real + os.sep):
                    raise PermissionError(errno.EACCES, f"{place} is open", str(one))
        if os.path.isdir(target):
            raise PermissionError(errno.EACCES, "Access is denied", str(target))
        system_replace(source, target)

    def fsync(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if get_flags(number, 3) & os.O_ACCMODE == os.O_RDONLY:  # 3: F_GETFL
            raise OSError(errno.EBADF, "Bad file descriptor")
        system_fsync(number)

    shutil.disk_usage = disk_usage
    shutil._use_fd_functions = False
    os.open, os.fsync = open_file, fsync
    os.replace = os.rename = replace
    os.supports_dir_fd.clear()


def _processes() -> None:
    """Let no signal look for a process, and answer for the two functions of Windows that are called."""
    system_kill = os.kill

    def kill(process: int, number: int) -> None:
        assert number, "signal 0 ends a process on Windows"
        system_kill(process, number)

    def memory(status: Any) -> bool:
        assert status[0] == 64
        status[1] = 8 << 30
        return True

    kernel = types.SimpleNamespace(
        GlobalMemoryStatusEx=memory,
        OpenProcess=lambda *handle: handle[-1] if Path(f"/proc/{handle[-1]}").exists() else 0,
        GetLastError=lambda: 87,
        WaitForSingleObject=lambda *_: 0x102,
        CloseHandle=lambda *_: True,
    )
    ctypes.windll = types.SimpleNamespace(kernel32=kernel)
    os.kill = kill


if __name__ == "__main__":
    _ = (concurrent.futures.process, logging.handlers, multiprocessing.spawn, subprocess, tempfile)
    pretend()
    runpy.run_path(sys.argv[1], run_name="__main__")
