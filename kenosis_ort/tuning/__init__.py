"""Decisions by measuring on this machine: races, the promise, the profile of a machine."""
