"""The only room that opens sessions of the runtime: opens, counts, and knows what the installed one reads."""
