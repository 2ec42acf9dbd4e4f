"""replicax: `MirroredStrategy`, `strategy.run` and `strategy.reduce` inside an `rx.function`."""

from _replicax import serve_replicax

if __name__ == "__main__":
    serve_replicax(compiled=True)
