"""Stop a process at a chosen system call: kill it, fill its disk, interrupt it, or hold it while another one runs.

A child is forked, so nothing is imported again, and traced (ptrace). A filter of the kernel (seccomp) stops each
of its threads at the system calls that change files, whichever library makes them: Python, Rust (Lance) or C++. The
calls are counted, so a moment is a number, not a time. Linux on x86-64 only.
"""

import ctypes
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from errno import ENOSPC
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["before", "after", "halfway", "full", "interrupt", "hold"]

_TRACEME, _CONT, _GETREGS, _SETREGS, _SYSCALL, _SETOPTIONS = 0, 7, 12, 13, 24, 0x4200
_OPTIONS = 0x80 | 0x8 | 0x4 | 0x2 | 0x100000  # seccomp, clone, vfork, fork, exit kill
_SECCOMP_EVENT, _ALL_THREADS = 7, 0x40000000
_REGISTERS = struct.Struct("27Q")
_ARGUMENTS = (14, 13, 12, 7, 9, 8)  # rdi, rsi, rdx, r10, r8, r9
_RESULT, _NUMBER = 10, 15  # rax, orig_rax
_SHUTDOWN = 48
_CREATES = 0o1100  # O_CREAT, O_TRUNC
_AT_FDCWD = -100
_MOST_SECONDS = 300
"""After which a child that hangs is ended by SIGALRM."""


class Call(NamedTuple):
    """A system call: its number, and which arguments are the descriptor, the path, a length and the flags."""

    number: int
    descriptor: int | None = None
    path: int | None = None
    length: int | None = None
    flags: int | None = None
    grows: bool = False


CALLS = {
    "write": Call(1, 0, length=2, grows=True),
    "open": Call(2, path=0, flags=1, grows=True),
    "pwrite": Call(18, 0, length=2, grows=True),
    "writev": Call(20, 0, grows=True),
    "msync": Call(26),
    "sendfile": Call(40, 0, length=3, grows=True),
    "send": Call(44, 0, length=2),
    "sendmsg": Call(46, 0),
    "fsync": Call(74, 0),
    "fdatasync": Call(75, 0),
    "truncate": Call(76, path=0),
    "ftruncate": Call(77, 0),
    "rename": Call(82, path=1),
    "mkdir": Call(83, path=0, grows=True),
    "rmdir": Call(84, path=0),
    "creat": Call(85, path=0, grows=True),
    "link": Call(86, path=1, grows=True),
    "unlink": Call(87, path=0),
    "symlink": Call(88, path=1, grows=True),
    "openat": Call(257, 0, path=1, flags=2, grows=True),
    "mkdirat": Call(258, 0, path=1, grows=True),
    "unlinkat": Call(263, 0, path=1),
    "renameat": Call(264, 2, path=3),
    "linkat": Call(265, 2, path=3, grows=True),
    "symlinkat": Call(266, 1, path=2, grows=True),
    "fallocate": Call(285, 0, grows=True),
    "pwritev": Call(296, 0, grows=True),
    "renameat2": Call(316, 2, path=3),
    "copy_file_range": Call(326, 2, length=4, grows=True),
}
_NAMES = {call.number: name for name, call in CALLS.items()}


class Event(NamedTuple):
    """A system call that changes files: its name and the path."""

    call: str
    path: str


@dataclass(frozen=True)
class Fault:
    """What happens at which event.

    Args:
        number: Of the event, from 0.
        kind: Kill it before, after or halfway through the call (a write of half the bytes); let this and all later
            calls that need space fail, or break the connection that sends; send SIGINT; or call `meanwhile` and go on.
        meanwhile: For `hold`.
    """

    number: int
    kind: Kind
    meanwhile: Callable[[], Any] = int


@dataclass
class Traced:
    """How a traced process ended.

    Attributes:
        events: In order.
        code: Its exit code; negative: the signal that ended it.
        output: What it printed.
    """

    events: list[Event] = field(default_factory=list)
    code: int = 0
    output: str = ""


def run_traced(
    function: Callable[[], int],
    folders: tuple[Path, ...],
    log: Path,
    fault: Fault | None = None,
    sockets: bool = False,
) -> Traced:
    """Run a function in a child to its end or to the fault.

    Args:
        function: Returns the exit code.
        folders: Changes below these are events.
        log: File for the output.
        fault: What to do; None runs it undisturbed.
        sockets: Whether what is sent over a network is an event too.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _be_traced(function, log)
    found = Traced()
    os.waitpid(child, _ALL_THREADS)
    _ptrace(_SETOPTIONS, child, _OPTIONS)
    _ptrace(_CONT, child)
    roots, is_full = tuple(f"{folder}/" for folder in folders), False
    while True:
        thread, status = os.waitpid(-1, _ALL_THREADS)
        if not os.WIFSTOPPED(status):
            if thread == child:
                break
            continue
        if status >> 16 != _SECCOMP_EVENT:
            number = os.WSTOPSIG(status)
            _ptrace(_CONT, thread, number if number not in (signal.SIGTRAP, signal.SIGSTOP) else 0)
            continue
        registers = _registers(thread)
        event = _event(thread, registers)
        if event.path.startswith(roots) or (sockets and event.path.startswith("socket:")):
            found.events.append(event)
            if fault is not None and len(found.events) - 1 == fault.number:
                is_full = fault.kind == "full"
                _strike(fault, child, thread, registers)
            if is_full and event.path.startswith("socket:"):  # both ends see that the connection is gone
                registers[_NUMBER], registers[_ARGUMENTS[1]], is_full = _SHUTDOWN, socket.SHUT_RDWR, False
                _set_registers(thread, registers)
            elif is_full and CALLS[event.call].grows:
                registers[_NUMBER], registers[_RESULT] = 2**64 - 1, 2**64 - ENOSPC
                _set_registers(thread, registers)
        _ptrace(_CONT, thread)
    found.code = os.waitstatus_to_exitcode(status)
    found.output = log.read_text(errors="replace")
    return found


def in_child(function: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Return what a function returns in a forked child, so that this process stays as it is; its errors likewise."""
    sys.stdout.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        signal.alarm(_MOST_SECONDS)
        try:
            found = (True, function())
        except (Exception, SystemExit) as error:
            found = (False, (type(error).__name__, str(error)))
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(found, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    is_well, result = pickle.loads(content) if content else (False, ("no answer", f"a child ended with {code}"))
    if not is_well:
        raise ChildError(*result)
    return result


class ChildError(Exception):
    """An error of a child: the name of its class, and the message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


def _strike(fault: Fault, child: int, thread: int, registers: list[int]) -> None:
    if fault.kind == "interrupt":
        os.kill(child, signal.SIGINT)
    elif fault.kind == "hold":
        fault.meanwhile()
    elif fault.kind != "full":
        length = CALLS[_NAMES[registers[_NUMBER]]].length
        if fault.kind == "halfway" and length is not None:
            registers[_ARGUMENTS[length]] //= 2
            _set_registers(thread, registers)
        if fault.kind != "before":
            _ptrace(_SYSCALL, thread)
            os.waitpid(thread, _ALL_THREADS)
        os.kill(child, signal.SIGKILL)


def _event(thread: int, registers: list[int]) -> Event:
    name = _NAMES[registers[_NUMBER]]
    call = CALLS[name]
    path = ""
    if call.path is not None:
        path = _text(thread, registers[_ARGUMENTS[call.path]])
    if not path.startswith("/"):
        descriptor = _AT_FDCWD
        if call.descriptor is not None:
            descriptor = ctypes.c_int(registers[_ARGUMENTS[call.descriptor]]).value
        link = f"/proc/{thread}/" + ("cwd" if descriptor == _AT_FDCWD else f"fd/{descriptor}")
        try:
            path = f"{os.readlink(link)}/{path}" if path else os.readlink(link)
        except OSError:
            path = "?"
    return Event(name, path)


def _text(thread: int, address: int) -> str:
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(4096 - address % 4096).partition(b"\0")[0].decode(errors="replace")


def _registers(thread: int) -> list[int]:
    buffer = ctypes.create_string_buffer(_REGISTERS.size)
    _ptrace(_GETREGS, thread, ctypes.addressof(buffer))
    return list(_REGISTERS.unpack(buffer.raw))


def _set_registers(thread: int, registers: list[int]) -> None:
    buffer = ctypes.create_string_buffer(_REGISTERS.pack(*registers), _REGISTERS.size)
    _ptrace(_SETREGS, thread, ctypes.addressof(buffer))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_void_p] * 4


def _ptrace(request: int, thread: int, data: int = 0) -> None:
    if _libc.ptrace(request, thread, None, data) < 0 and ctypes.get_errno() != 3:  # ESRCH: it was killed meanwhile
        raise OSError(ctypes.get_errno(), f"ptrace({request}): {os.strerror(ctypes.get_errno())}")


def _be_traced(function: Callable[[], int], log: Path) -> None:
    """Run a function in a forked child under a tracer and a filter of system calls; does not return."""
    try:
        output = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(output, stream)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _ptrace(_TRACEME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        _filter_calls()
        _restart_threads()
        signal.alarm(_MOST_SECONDS)
        code = function()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _restart_threads() -> None:
    """Let LanceDB start its threads anew: they inherit the filter and the tracer only of a thread that has them."""
    if "lancedb.background_loop" in sys.modules:
        sys.modules["lancedb.background_loop"].LOOP._start()


def _filter_calls() -> None:
    """Let the kernel stop this process at the calls of `CALLS`, at those that open files only if they change them."""
    load, equal, test, answer, trace, allow = 0x20, 0x15, 0x45, 0x06, 0x7FF00000, 0x7FFF0000
    program = [(load, 0, 0, 0)]
    for call in CALLS.values():
        if call.flags is None:
            program += [(equal, 0, 1, call.number), (answer, 0, 0, trace)]
        else:
            program += [(equal, 0, 4, call.number), (load, 0, 0, 16 + 8 * call.flags), (test, 0, 1, _CREATES)]
            program += [(answer, 0, 0, trace), (answer, 0, 0, allow)]
    program.append((answer, 0, 0, allow))
    code = b"".join(struct.pack("HBBI", *each) for each in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer)))
    if _libc.prctl(38, 1, 0, 0, 0) != 0 or _libc.prctl(22, 2, ctypes.addressof(head), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")
