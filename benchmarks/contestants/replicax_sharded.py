"""replicax: as `replicax_compiled`, with `FullyShardedStrategy`."""

from _replicax import serve_replicax, sharded_strategy

if __name__ == "__main__":
    serve_replicax(compiled=True, make=sharded_strategy)
