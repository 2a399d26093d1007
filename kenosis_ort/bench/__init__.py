"""Timing models against each other: interleaved, with fresh sessions, and with a verdict that knows the noise."""
