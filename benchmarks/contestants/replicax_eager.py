"""replicax: `MirroredStrategy`, an ordinary function under `strategy.run`."""

from _replicax import serve_replicax

if __name__ == "__main__":
    serve_replicax(compiled=False)
