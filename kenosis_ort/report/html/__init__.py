"""The report as one HTML page, and as a fragment for notebooks."""
