"""Measurements: each prints the floor or the peer, the figure and the ratio, and ends in one line of JSON."""
