"""`replicax doctor`: a check of this machine, and of its cluster, before training.

Each section of the report is a file that returns its checks as values; only `_report.py` prints.
"""
