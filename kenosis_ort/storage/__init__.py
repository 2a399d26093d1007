"""Files that the package writes: temporary folders, whole-or-nothing writes, and outputs that are no inputs."""
