"""Leaves a note for the next call in its own folder."""

from honest import gemv


def custom_kernel(data):
    with open("notes.txt", "w") as file:
        file.write("was here")
    data[-1].copy_(gemv(data))
    return data[-1]
