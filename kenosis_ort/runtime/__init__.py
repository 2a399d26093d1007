"""The only package that opens sessions of the runtime: it opens, counts, and knows what the installed one reads."""
