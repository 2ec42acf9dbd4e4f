"""`replicax doctor`: whether this machine, and the cluster it is told of, are fit for training.

One section of the report a file; each returns its checks as values, and only `_report.py` prints.
"""
