"""Run a command, and let the kernel kill it when the parent process ends.

    python -I -S lifeline.py PARENT_PID COMMAND [ARGUMENT...]

More exactly, the kernel sends SIGKILL when the *thread* that started this process ends. The command
replaces this process and keeps its pid. (Popen's `preexec_fn` could do the same, but it runs Python
code after a fork, which is not safe beside gRPC's threads.)
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit("the process that started this one has ended")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
