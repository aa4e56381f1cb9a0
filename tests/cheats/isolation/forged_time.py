"""Sends an answer with a time that is not a number, and with one that is below zero."""

import gc
from multiprocessing.connection import Connection


def custom_kernel(data):
    for connection in gc.get_objects():
        if isinstance(connection, Connection):
            connection.send_bytes(b'{"outputs": [], "wall_ns": NaN, "gpu_ns": -1.0}')
    return data[-1]
