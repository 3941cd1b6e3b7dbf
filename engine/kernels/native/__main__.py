"""Compiles the kernels beside their source, for an image that has no compiler later: `python -m engine.kernels.native`."""

from engine.kernels.native import FOLDER, compiled

if __name__ == "__main__":
    print(compiled(FOLDER))
