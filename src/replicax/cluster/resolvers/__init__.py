"""The ways in which a process learns of its cluster and its place; one environment per file.

`replicax/cluster_resolver.py` lists them.
"""
