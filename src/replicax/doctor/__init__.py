"""`replicax doctor`: a check of this machine, and of its cluster, before training.

Each section of the report is one file. It returns its checks as values; only `_report.py` prints.
"""
