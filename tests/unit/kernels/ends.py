"""A check that ends its process."""

import os


def interpret(_: str) -> None:
    os._exit(1)
