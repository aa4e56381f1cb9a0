"""Leaves a process running that could do the work, or watch the next call."""

import subprocess
import sys

from honest import gemv


def custom_kernel(data):
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    data[-1].copy_(gemv(data))
    return data[-1]
