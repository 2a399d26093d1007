"""Tests of the fusion proof and the numeric checks."""
