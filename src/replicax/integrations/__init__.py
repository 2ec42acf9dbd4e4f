"""Bridges to other libraries; nothing else in replicax imports them."""
