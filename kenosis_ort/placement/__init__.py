"""Placement of Q/DQ: the plan, decided by the target's rules before the graph is touched."""
