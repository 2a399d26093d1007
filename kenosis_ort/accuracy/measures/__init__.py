"""What an output is measured in, by what it is: one kind of measure a file, and how a kind is told."""
