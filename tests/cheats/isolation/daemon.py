"""Leaves a process running that has left its session, its parent and its environment."""

import os
import sys

from honest import gemv


def custom_kernel(data):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.execve(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(60)"], {})
    os.wait()
    data[-1].copy_(gemv(data))
    return data[-1]
