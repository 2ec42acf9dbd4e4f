"""The ways in which a process learns its cluster and its place in it; one environment per file.

`replicax/cluster_resolver.py` lists them.
"""
