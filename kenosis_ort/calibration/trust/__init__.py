"""Range trust: ranges from made-up samples, corrected by what the model knows, and a verdict on them."""
