"""Processes forked from one Python that has imported everything: real ones, to be killed, without waiting for imports.

`python -m tests.warm` is that Python. For each request on its socket it forks a waiter, which forks the process that
becomes the command and tells how that ends. A fork copies one thread only, so what is imported must start no other.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from torch.distributed import TCPStore

# What the commands import sooner or later.
MODULES = (
    "dflash_tool.commands.app", "dflash_tool.commands.train_tables", "dflash_tool.commands.extract_tables",
    "dflash_tool.commands.live_tables", "dflash_tool.pipeline", "dflash_tool.trainer.board", "torch._dynamo",
    "torch.distributed.run", "transformers.modeling_rope_utils", "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
)  # fmt: skip


class Warm:
    """The Python that forks; `close` ends it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, "-m", "tests.warm", str(theirs.fileno())]
            self._python = subprocess.Popen(
                words,
                cwd=Path(__file__).parents[1],
                env={**env, "JE_ARROW_MALLOC_CONF": "background_thread:false"},  # pyarrow's
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def start(self, words: Sequence[str], world: int = 1) -> "Run":
        """Begin `python -m MODULE ...` on so many ranks, which meet at a store of this process."""
        if world == 1:
            return Run([self._fork(words, {})])
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        size = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "TORCHELASTIC_RESTART_COUNT": 0}
        ranks = [{**place, **size, "RANK": rank, "LOCAL_RANK": rank} for rank in range(world)]
        return Run([self._fork(words, {name: str(value) for name, value in env.items()}) for env in ranks], store)

    def _fork(self, words: Sequence[str], env: Mapping[str, str]) -> "Process":
        assert words[1] == "-m"
        out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115 - `said` closes them
        reads, writes = os.pipe()
        request = json.dumps({"words": words[2:], "env": env})
        socket.send_fds(self._socket, [request.encode()], [writes, out.fileno(), err.fileno()])
        os.close(writes)
        return Process(os.fdopen(reads), out, err)

    def close(self) -> None:
        self._socket.close()
        self._python.wait(60)


class Process:
    """One of them: its pid, and its exit code once it has ended (a signal's number, negative)."""

    def __init__(self, status: IO[str], out: IO[str], err: IO[str]) -> None:
        self._status, self._files = status, (out, err)
        self.pid = int(status.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None) -> None:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("dflash", timeout or 0)
            self.returncode = int(self._status.readline())
            self._status.close()

    def said(self) -> tuple[str, str]:
        """What it has written to stdout and stderr; asked for once, when it has ended."""
        texts = []
        for file in self._files:
            with file:
                file.seek(0)
                texts.append(file.read())
        return texts[0], texts[1]


class Run:
    """A process, or the ranks of a group, as far as the tests use `subprocess.Popen`."""

    def __init__(self, ranks: Sequence[Process], store: object = None) -> None:
        self.ranks, self._store = ranks, store  # the store lives as long as the group

    @property
    def returncode(self) -> int | None:
        """0 if all ranks ended with it, else the first that is another."""
        codes = [rank.returncode for rank in self.ranks]
        return None if None in codes else next(filter(None, codes), 0)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        for rank in self.ranks:
            rank.wait(timeout)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """To every rank, as torchrun passes it on."""
        for rank in self.ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(0)
            if rank.returncode is None:
                os.kill(rank.pid, signum)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What all wrote to stdout and to stderr, one rank after the other."""
        self.wait(timeout)
        out, err = zip(*(rank.said() for rank in self.ranks), strict=True)
        return "".join(out), "".join(err)

    def end(self, timeout: float = 240) -> str:
        """What they said to the end, which is a good one."""
        out, err = self.communicate(timeout)
        assert self.returncode == 0, err
        return out


def serve(requests: socket.socket) -> list[str]:
    """Fork until the socket is closed. Comes back in each process that becomes a command, with its words."""
    for module in MODULES:
        importlib.import_module(module)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork copies one thread only"
    gc.freeze()  # what is imported stays: a process doesn't tear it down piece by piece when it exits
    while True:
        request, files, _, _ = socket.recv_fds(requests, 1 << 16, 3)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # waiters that have ended
                pass
        if not request:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            return _wait_for(*files, **json.loads(request))
        for file in files:
            os.close(file)


def _wait_for(status: int, out: int, err: int, words: list[str], env: dict[str, str]) -> list[str]:
    """Fork once more; tell the child's pid and exit code."""
    if pid := os.fork():
        os.write(status, f"{pid}\n".encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(status, f"{code}\n".encode())
        os._exit(0)
    os.close(status)
    for file, stream in ((out, 1), (err, 2)):
        os.dup2(file, stream)
        os.close(file)
    os.environ.update(env)
    return words


if __name__ == "__main__":
    sys.argv = serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
