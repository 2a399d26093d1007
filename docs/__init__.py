"""Scripts of the documentation: its generated parts and its pictures."""
